"""What one step of the Blackwell backward moves through shared memory, counted by the emulator: no GPU needed.

    python -m bench.traffic

A step is one block of 128 queries against a CTA's 128 keys, head dim 128. Counted is what a step more adds to a launch,
so that prologue and epilogue drop out. Shared memory moves 128 bytes a clock. Row statistics are left out of the sum:
all lanes of a warp read the same 16 bytes, and the emulator counts them for each lane.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from warpcheck.machine import LaunchReport

from fa4.emulator import emulate
from fa4.oracle.cases import Case, make
from fa4.runtime.device import chip_of
from fa4.runtime.spec import Saved
from fa4.sm100.bwd.tiles import PAIR, SINGLE, BackwardTiles
from fa4.sm100.plan import Plan
from fa4.torch_ops.run import backward

BYTES_PER_CLOCK = 128
KEYS = 256  # two blocks, so that every row of the table runs two CTAs
CTAS = 2
# What reads or writes shared memory in the paper's arithmetic (arXiv 2603.05451), and how the emulator calls it.
COUNTED = {
    "operands of products": "mma_shared",
    "dS and dQ written": "shared_store",
    "dQ read by bulk additions": "bulk_reduce",
}
PAPER = {SINGLE: 3328, PAIR: 2688}  # clocks


def launch(tiles: BackwardTiles, blocks: int, *, deterministic: bool = False) -> LaunchReport:
    """The main kernel's report for `blocks` blocks of queries."""
    case = Case("traffic", seqlen_q=128 * blocks, seqlen_k=KEYS, heads_q=1, heads_kv=1, head_dim=128)
    problem = make(replace(case, deterministic=deterministic), seed=0)
    out, lse = torch.zeros_like(problem.inputs.q), torch.zeros(1, 1, 128 * blocks)
    with emulate("sm_100a") as gpu:
        plan = Plan(problem.spec, problem.inputs.extent, chip_of(out.device), backward_tiles=tiles)
        backward(problem.inputs, problem.spec, plan, Saved(out, lse, problem.dout))
    return max(gpu.launches, key=lambda report: report.mma_flops)


def per_step(tiles: BackwardTiles, *, deterministic: bool = False) -> tuple[dict[str, int], int]:
    """(bytes by path, warp-instructions) that one step adds to one CTA."""
    few, more = (launch(tiles, blocks, deterministic=deterministic) for blocks in (2, 3))
    moved = {path: (more.bytes[path] - few.bytes.get(path, 0)) // CTAS for path in more.bytes}
    return moved, (more.warp_instructions - few.warp_instructions) // CTAS


def clocks(moved: dict[str, int]) -> dict[str, int]:
    """Clocks of shared memory by kind of access."""
    return {kind: moved[path] // BYTES_PER_CLOCK for kind, path in COUNTED.items()}


def main() -> None:
    print("| row | " + " | ".join(COUNTED) + " | sum | paper | TMA loads, bytes | instructions | deterministic |")
    print("|---|" + "--:|" * (len(COUNTED) + 5))
    for name, tiles in (("single", SINGLE), ("pair", PAIR)):
        moved, instructions = per_step(tiles)
        _, ordered = per_step(tiles, deterministic=True)
        parts = clocks(moved)
        cells = (*parts.values(), sum(parts.values()), PAPER[tiles], moved["tma_load"], instructions, ordered)
        print(f"| {name} | " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
