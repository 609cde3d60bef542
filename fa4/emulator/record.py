"""Launches of foreign examples, and of fa4's own forwards and backwards, written by the emulator.

    python -m fa4.emulator.record DIR --cutlass PATH [--only REGEX]

`warpcheck compare DIR` runs them on a GPU. Needs CuTe DSL and no device.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
from warpcheck.options import CHIP, PATTERN
from warpcheck.tools.examples import EXAMPLES
from warpcheck.tools.recording import Recorder

from fa4.oracle import cases as problems

_NAMES = "^(hopper|ampere|fwd|bwd)"  # of what is recorded; fa4's own calls begin with their direction
OWN = (  # none with packed sequences: their tensor maps begin where no recorded memory lies
    problems.Case("fwd", seqlen_q=200, seqlen_k=200, causal=True),
    problems.Case("fwd_d128_gqa", seqlen_q=130, seqlen_k=260, head_dim=128, causal=True, heads_kv=1),
    problems.Case("fwd_d256", seqlen_q=130, seqlen_k=150, head_dim=256),
    problems.Case("fwd_decode", seqlen_q=1, seqlen_k=1300, heads_q=8, heads_kv=2, head_dim=128, causal=True),
    problems.Case("bwd_d64", seqlen_q=150, seqlen_k=200),
    problems.Case("bwd_d128_causal", seqlen_q=200, seqlen_k=300, head_dim=128, causal=True),
    problems.Case(
        "bwd_d128_ordered", seqlen_q=200, seqlen_k=300, head_dim=128, causal=True, deterministic=True, heads_kv=1
    ),
    problems.Case("bwd_d128_ordered_full", seqlen_q=250, seqlen_k=300, head_dim=128, deterministic=True),
    problems.Case("bwd_d192_128", seqlen_q=150, seqlen_k=200, head_dim=192, head_dim_v=128, causal=True),
    problems.Case("bwd_d256", seqlen_q=150, seqlen_k=200, head_dim=256, causal=True, heads_kv=1),
)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--cutlass", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", type=PATTERN, default=_NAMES, show_default=True,
              help="Regular expression on the names of examples.")  # fmt: skip
@click.option("--chip", type=CHIP, default="sm_90a", show_default=True, help="Chip to record for.")
def main(folder: Path, cutlass: Path, only: str, chip: str) -> None:
    from fa4.emulator import emulate

    folder.mkdir(parents=True, exist_ok=True)
    for example in EXAMPLES:
        if re.search(only, example.name):
            with emulate(chip) as gpu:
                recorder = Recorder(gpu, folder, example.name)
                example.run(cutlass)
            click.echo(f"{example.name}: {recorder.count} launches")
    for case in OWN:
        if re.search(only, case.name):
            with emulate(chip) as gpu:
                recorder = Recorder(gpu, folder, case.name)
                problem = problems.make(case, seed=0)
                problem.call_with_gradients() if case.name.startswith("bwd") else problem.call()
            click.echo(f"{case.name}: {recorder.count} launches")


if __name__ == "__main__":
    main()
