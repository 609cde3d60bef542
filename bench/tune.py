"""python -m bench.tune: time a chip's rows of tiles against each other, in turns, on the shapes of a suite.

    python -m bench.tune --chip 90 --suite paper --filter "d256"      # on an H100; rows go to bench/results
    python -m bench.tune --chip 90 --suite paper --dry-run             # compiles them all, on any machine

Beside the row that the table names, `table`, come rows that differ from it in one column. What a table's rows say of
themselves as evidence is what such a run showed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from fa4.runtime.device import Chip, chip_by_number, chip_of, emulating
from fa4.runtime.jit import compile_only
from fa4.runtime.spec import AttentionInputs, AttentionSpec, ProblemSize, Saved
from fa4.torch_ops import run

from . import machine
from .check import what_failed
from .run import RESULTS
from .suites import SUITES, BenchCase, made_tensors
from .timing import measure_in_turns

console = Console(highlight=False)
Rows = dict[str, Any]  # of tiles, by what tells them from the table's


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A chip's plan, and its rows for a problem in each direction."""

    plan: type
    forward: Callable[[AttentionSpec, ProblemSize, Chip], Rows]
    backward: Callable[[AttentionSpec, ProblemSize, Chip], Rows]


def _changed(row: Any, **columns: tuple) -> Rows:
    """The row, and it with each value of each column."""
    rows = {"table": row}
    for column, values in columns.items():
        for value in values:
            name = f"{column} {getattr(value, 'name', value)}".lower().replace("_", " ")
            rows[name] = dataclasses.replace(row, **{column: value})
    return {name: tiles for name, tiles in rows.items() if name == "table" or tiles != row}


def _sm90() -> Sweep:
    from fa4.fwd.variant import Schedule
    from fa4.sm90.bwd import tiles as backward
    from fa4.sm90.fwd import tiles as forward
    from fa4.sm90.plan import Plan

    def forward_rows(spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> Rows:
        row = forward.tiles_for(spec, chip, extent).row
        if row.consumers == 1:
            return _changed(row, splits=(1, 4, 8, 12, 16), most_stages=(2, 3, 4), tile_n=(32, 64, 128))
        columns = dict(
            consumers=(2, 3), tile_n=(64, 80, 96, 112, 128), ping_pong=(False, True), rescale_threshold=(0.0,)
        )
        return _changed(row, schedule=(Schedule.SINGLE,), ctas=(1, 2), l2_group=(33, 66, 132), **columns)

    def backward_rows(spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> Rows:
        row = backward.tiles_for(spec, chip, extent).row
        if spec.deterministic:
            return _changed(row, pairs_per_group=(None, 1, 2, 4, 8, 16, 33, 66, 132))
        return _changed(row, tile_m=(64, 80, 96, 128), first_writer=(False, True), ordered=(False, True))

    return Sweep(Plan, forward_rows, backward_rows)


def _sm100() -> Sweep:
    from fa4.sm100.bwd import tiles as backward
    from fa4.sm100.fwd import tiles as forward
    from fa4.sm100.fwd.config import Schedule
    from fa4.sm100.plan import Plan

    def forward_rows(spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> Rows:
        row = forward.tiles_for(spec, chip, extent).row
        return _changed(row, schedule=tuple(Schedule), polynomial=(0, 2, 4), sawtooth=(True,))

    def backward_rows(spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> Rows:
        row = backward.tiles_for(spec, chip).row
        return {"table": row} | ({} if row == backward.SINGLE else {"single": backward.SINGLE})

    return Sweep(Plan, forward_rows, backward_rows)


SWEEPS: dict[int, Callable[[], Sweep]] = {90: _sm90, 100: _sm100, 103: _sm100}


def works(
    case: BenchCase,
    sweep: Sweep,
    chip: Chip,
    device: torch.device,
    deterministic: bool = False,
    chosen: str = "",
) -> dict[str, Callable[[], object]]:
    """What is timed for each row; rows that the shape does not allow are left out, and said so."""
    q, k, v, dout = (x.detach() for x in made_tensors(case, device, seed=0))
    inputs = AttentionInputs(q, k, v, max_seqlen_q=case.seqlen_q, max_seqlen_k=case.seqlen_k)
    spec = AttentionSpec(
        q.dtype, case.head_dim, case.head_dim_v, case.heads_q, case.heads_kv, case.head_dim**-0.5,
        window_right=0 if case.causal else None, needs_backward=case.direction == "bwd",
        deterministic=deterministic,
    )  # fmt: skip
    is_forward, found = case.direction == "fwd", {}
    rows = (sweep.forward if is_forward else sweep.backward)(spec, inputs.extent, chip)
    saved = None
    for name, tiles in rows.items():
        if not re.search(chosen, name):
            continue
        try:
            plan = sweep.plan(spec, inputs.extent, chip, **{"forward_tiles" if is_forward else "backward_tiles": tiles})
            if not is_forward and saved is None:
                saved = Saved(*run.forward(inputs, spec, plan), dout)

            def work(plan=plan, saved=saved) -> object:
                return run.forward(inputs, spec, plan) if is_forward else run.backward(inputs, spec, plan, saved)

            work()
        except Exception as error:  # tiles that do not fit, or that the compiler refuses, end no sweep
            console.print(f"{case.label}: {name}: {what_failed(error)}")
            continue
        found[name] = work
    return found


@click.command(help=__doc__)
@click.option("--chip", "number", type=click.Choice([str(number) for number in SWEEPS]), required=True)
@click.option("--suite", type=click.Choice(list(SUITES)), default="paper", show_default=True)
@click.option("--filter", "pattern", default="", help="Only cases whose label matches this regular expression.")
@click.option("--rows", "chosen", default="", help="Only rows whose name matches this regular expression.")
@click.option("--deterministic", is_flag=True, help="Of backwards whose additions have an order.")
@click.option("--seconds", default=0.5, show_default=True, help="Spent on each row.")
@click.option("--output", type=click.Path(path_type=Path), default=None, help="Default: in bench/results.")
@click.option("--dry-run", is_flag=True, help="Compile the rows on any machine, time none.")
def main(
    number: str,
    suite: str,
    pattern: str,
    chosen: str,
    deterministic: bool,
    seconds: float,
    output: Path | None,
    dry_run: bool,
) -> None:
    sweep = SWEEPS[int(number)]()
    cases = [case for case in SUITES[suite] if re.search(pattern, case.label)]
    if not cases:
        raise click.BadParameter(f"{pattern!r} matches no case of suite {suite}", param_hint="--filter")
    if dry_run:
        with emulating(chip_by_number(int(number))), compile_only() as compiled:
            device = torch.device("cpu")
            for case in dict.fromkeys(dataclasses.replace(case, batch=1) for case in cases):
                works(case, sweep, chip_of(device), device, deterministic, chosen)
        console.print(f"{len(compiled.seconds)} kernels compiled in {sum(compiled.seconds.values()):.0f} s")
        return
    device = torch.device("cuda")
    if not torch.cuda.is_available() or chip_of(device).number != int(number):
        raise click.ClickException(f"needs an sm_{number}; --dry-run compiles the rows without one")
    facts = machine.facts(device)
    now = datetime.datetime.now(datetime.UTC)
    output = output or RESULTS / f"{now:%Y-%m-%d}_{machine.slug(facts['device'])}_tune.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    for case in cases:
        rows = works(case, sweep, chip_of(device), device, deterministic, chosen)
        timings = measure_in_turns(rows, device, seconds=seconds)
        table = Table("row", "ms (quartiles)", "TFLOP/s", title=case.label)
        with output.open("a") as file:
            for name, timing in timings.items():
                rate = case.flops / timing.median_ms / 1e9
                quartiles = f"{timing.median_ms:.3f} ({timing.q25_ms:.3f} to {timing.q75_ms:.3f})"
                table.add_row(name, quartiles, f"{rate:,.0f}")
                row = {"suite": "tune", "time": now.isoformat(timespec="seconds"), "machine": facts}
                row |= {
                    "provider": f"fa4: {name}{', deterministic' * deterministic}",
                    "label": case.label,
                    **dataclasses.asdict(case),
                }
                file.write(json.dumps({**row, **dataclasses.asdict(timing), "tflops": rate}) + "\n")
        console.print(table)
    console.print(f"rows appended to {output}")


if __name__ == "__main__":
    main()
