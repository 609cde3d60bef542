"""python -m warpcheck.timing.sass CUBIN ...: how much of its machine code is tied to its PTX, and least stalls.

The cubins must have line information (CuTe DSL: --generate-line-info), and with it their PTX.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from pathlib import Path

from warpcheck.timing.sass import issue_model
from warpcheck.timing.sass.code import cubin_in, embedded_ptx, functions
from warpcheck.timing.sass.pipes import rate
from warpcheck.timing.sass.stalls import distances

_ENOUGH = 20  # readers that an opcode needs for a line of the second table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubins", nargs="+", type=Path)
    least: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    print("| kernel | instructions | in a block | own PTX known | effects reached | copies | untied |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for path in parser.parse_args().cubins:
        cubin = cubin_in(path.read_bytes())
        ptx = embedded_ptx(cubin)
        if ptx is None:
            raise SystemExit(f"{path} has no line information: compile with --generate-line-info")
        for name in functions(cubin):
            model = issue_model(ptx, cubin, name)
            share = model.coverage
            copies = sum(map(len, (copy for block in model.blocks for copy in block.copies)))
            untied = sum(part.stop - part.start for part in model.untied)
            numbers = f"{share.tied:.2%} | {share.named:.2%} | {share.reached:.2%} | {copies} | {untied}"
            print(f"| {name[:40]} | {share.instructions} | {numbers} |")
            for opcode, clocks in distances(model.code).items():
                least[model.chip, opcode] += clocks
    print("\n| chip | opcode | readers | least clocks | latency in the table |\n|---|---|--:|--:|--:|")
    for (chip, opcode), clocks in sorted(least.items()):
        if clocks.total() >= _ENOUGH:
            print(f"| {chip} | {opcode} | {clocks.total()} | {min(clocks)} | {rate(opcode, chip).latency:g} |")


if __name__ == "__main__":
    main()
