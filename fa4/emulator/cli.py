"""python -m fa4 emulate: run fa4's own kernels on an emulated chip, from the shell."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import click
import torch
from warpcheck.errors import EmulationError
from warpcheck.machine import SCHEDULES, interleavings
from warpcheck.options import CHIP, COUNT, LENGTH, NEW_FILE, SIDE_OF_WINDOW, emulation_options

from fa4.oracle import cases
from fa4.runtime.device import chip_by_number
from fa4.runtime.dispatch import NoBackend, check_backend_name, select

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@click.command("emulate")
@click.argument("direction", type=click.Choice(["fwd", "bwd"]))
@click.option("--seqlen", type=LENGTH, default=256, show_default=True, help="Queries per sequence.")
@click.option("--seqlen-k", type=LENGTH, help="Keys per sequence [default: seqlen].")
@click.option("--batch", type=LENGTH, default=1, show_default=True)
@click.option("--heads", type=COUNT, default=1, show_default=True)
@click.option("--heads-kv", type=COUNT, help="Key/value heads [default: heads].")
@click.option("--head-dim", type=COUNT, default=128, show_default=True)
@click.option("--head-dim-v", type=COUNT, help="[default: head-dim]")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="bf16", show_default=True)
@click.option("--causal", is_flag=True)
@click.option("--window-size", type=(SIDE_OF_WINDOW, SIDE_OF_WINDOW), default=(-1, -1), show_default=True,
              help="Left and right; -1 is open.")  # fmt: skip
@click.option("--softcap", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--sink", is_flag=True, help="With a learnable sink.")
@click.option("--deterministic", is_flag=True)
@click.option("--chip", type=CHIP, default="sm_100a", show_default=True)
@click.option("--backend", default="auto", show_default=True)
@click.option("--seeds", type=COUNT, default=1, show_default=True, help="Seeds to run, each with the next schedule.")
@click.option("--schedule", type=click.Choice(SCHEDULES), help="[default: one after the other]")
@emulation_options
@click.option("--trace", "trace_path", type=NEW_FILE, help="Write a Chrome trace of the first seed.")
@click.option("--report/--no-report", default=True, show_default=True)
def emulate_command(
    direction: str, seqlen: int, seqlen_k: int | None, heads: int, heads_kv: int | None, dtype: str, sink: bool,
    chip: str, backend: str, seeds: int, schedule: str | None, options: dict[str, Any], trace_path: str | None,
    report: bool, **shape,
) -> None:  # fmt: skip
    """Run our attention kernels on an emulated chip, judged against float64, under one seed or several."""
    from fa4.emulator import emulate
    from warpcheck import trace

    heads_kv = heads_kv or heads
    if heads % heads_kv:
        raise click.BadParameter(f"{heads_kv} does not divide {heads} query heads", param_hint="'--heads-kv'")
    try:
        check_backend_name(backend)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--backend'") from None
    case = cases.Case(
        direction, seqlen_q=seqlen, seqlen_k=seqlen if seqlen_k is None else seqlen_k, heads_q=heads,
        heads_kv=heads_kv, dtype=_DTYPES[dtype], sink=sink, **shape,
    )  # fmt: skip
    wrong = 0
    for current, interleaving in interleavings(options["seed"], seeds, schedule):
        problem = cases.make(case, current)
        wants_trace = trace_path if current == options["seed"] else None
        start = time.perf_counter()
        try:
            given = {**options, "seed": current, "schedule": interleaving, "trace": wants_trace is not None}
            with emulate(chip, **given) as gpu:
                asked = dataclasses.replace(problem.spec, needs_backward=direction == "bwd")
                here = chip_by_number(gpu.chip_number, emulated=True)
                chosen = select(asked, here, backend).name
                if direction == "fwd":
                    judgements = cases.judge_forward(problem, *problem.call(backend=backend))
                else:
                    out, lse, grads = problem.call_with_gradients(backend=backend)
                    judgements = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads)
        except (EmulationError, NoBackend) as error:
            raise click.ClickException(f"seed {current}, {interleaving}: {type(error).__name__}: {error}") from error
        click.echo(
            f"{chosen} on {chip}, seed {current}, {interleaving}: {time.perf_counter() - start:.1f} s, no finding"
        )
        for judgement in judgements:
            wrong += not judgement.right
            click.echo(f"  {judgement}{'' if judgement.right else '  WRONG'}")
        if wants_trace is not None:
            click.echo(f"  {trace.write(wants_trace, gpu.launches):,} events in {wants_trace}")
    if report:
        click.echo(gpu.report())
    if wrong:
        raise SystemExit(1)
