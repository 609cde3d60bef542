"""python -m bench.variants: what each kernel of a kind of layers brings, beside the other kernels of the same kind.

A tile table gives some lengths a kernel of their own, and each kernel takes seconds to compile. For random lengths, as
in bench.stalls, this command collects the kernels of each kind. For some sizes that the table gives to a kernel, it
times all of the kind. `gain` is the fastest other one's time over the chosen one's: below 1.03, a kernel does not pay
for its compilation at this size. Rows, one for each size, go to --out.
"""

from __future__ import annotations

import datetime
import itertools
import json
import random
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from fa4.api.call_ranges import compile_requests, folder_for
from fa4.runtime import dispatch
from fa4.runtime.device import Chip, chip_by_number, chip_of
from fa4.runtime.plan import ForwardBackwardPlan
from fa4.runtime.spec import AttentionInputs, AttentionSpec, ProblemSize, Saved
from fa4.torch_ops import run

from . import machine
from .stalls import KINDS, random_extents
from .timing import measure_in_turns

Kind = tuple[int, int, int, bool]


def spec_of(kind: Kind, needs_backward: bool) -> AttentionSpec:
    head_dim, heads_q, heads_kv, causal = kind
    return AttentionSpec(
        torch.bfloat16, head_dim, head_dim, heads_q, heads_kv, head_dim**-0.5, window_right=0 if causal else None,
        needs_backward=needs_backward,
    )  # fmt: skip


def collected(
    spec: AttentionSpec, chip: Chip, seqlen: tuple[int, int], tokens: int, draws: int, is_forward: bool
) -> dict[Any, tuple[Any, list[ProblemSize]]]:
    """Return (row of the table, the sizes that get it) by kernel; `draws` random sizes."""
    found: dict[Any, tuple[Any, list[ProblemSize]]] = {}
    for extent in itertools.islice(random_extents(0, seqlen, tokens), draws):
        direction = direction_of(plan_of(spec, extent, chip), is_forward)
        found.setdefault(direction.request().key, (direction.choice, []))[1].append(extent)
    return found


def plan_of(spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> ForwardBackwardPlan:
    plan = dispatch.select(spec, chip).plan(spec, extent, chip)
    assert isinstance(plan, ForwardBackwardPlan)
    return plan


def direction_of(plan: ForwardBackwardPlan, is_forward: bool) -> Any:
    return plan.both()[0 if is_forward else 1]


def alternatives(
    spec: AttentionSpec, extent: ProblemSize, chip: Chip, kernels: dict, is_forward: bool
) -> dict[str, ForwardBackwardPlan]:
    """Return a plan for the size by each kernel that rows of the kind lead to, by name; the chosen one first."""
    plan = plan_of(spec, extent, chip)
    chosen = direction_of(plan, is_forward)
    plans, keys = {chosen.choice.name: plan}, {chosen.request().key}
    for choice, _ in kernels.values():
        try:
            direction = type(chosen)(spec, extent, chip, choice.row)
        except ValueError:
            continue
        key = direction.request().key
        if key not in keys:
            keys.add(key)
            both = (direction, plan.both()[1]) if is_forward else (plan.both()[0], direction)
            name = choice.name if choice.name not in plans else f"{choice.name}, other heads or parts"
            plans[name] = plan.with_both(*both)
    return plans


def works(
    spec: AttentionSpec, extent: ProblemSize, plans: dict[str, ForwardBackwardPlan], is_forward: bool
) -> dict[str, Any]:
    """Return what is timed for each plan."""
    batch, rows, keys = extent
    shapes = (rows, spec.heads_q), (keys, spec.heads_kv), (keys, spec.heads_kv)
    q, k, v = (torch.randn(batch, *shape, spec.head_dim, device="cuda", dtype=spec.dtype) for shape in shapes)
    inputs = AttentionInputs(q, k, v, max_seqlen_q=rows, max_seqlen_k=keys)
    if is_forward:
        forwards = {name: run.ForwardExecutor(inputs, spec, plan) for name, plan in plans.items()}
        return {name: lambda forward=forward: forward(inputs) for name, forward in forwards.items()}
    saved = Saved(*run.forward(inputs, spec, next(iter(plans.values()))), torch.randn_like(q))
    backwards = {name: run.BackwardExecutor(inputs, spec, plan) for name, plan in plans.items()}
    return {name: lambda backward=backward: backward(inputs, saved) for name, backward in backwards.items()}


def _chosen_sizes(extents: list[ProblemSize], count: int) -> list[ProblemSize]:
    """Return sizes of the whole range, sorted by length."""
    extents = sorted(dict.fromkeys(extents), key=lambda extent: (extent.max_seqlen_q, extent.batch))
    last = len(extents) - 1
    return [extents[i] for i in sorted({last * n // max(count - 1, 1) for n in range(count)})]


@click.command(help=__doc__)
@click.option("--seqlen", nargs=2, default=(1, 32768), show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=32768, show_default=True, type=click.IntRange(1))
@click.option("--draws", default=400, show_default=True, type=click.IntRange(1), help="Random sizes of a kind.")
@click.option("--sizes", default=4, show_default=True, type=click.IntRange(1), help="Timed of each kernel.")
@click.option("--seconds", default=0.05, show_default=True, help="Spent on each kernel and size.")
@click.option("--forward-only", is_flag=True)
@click.option("--chip", default=90, show_default=True, help="Of --dry-run.")
@click.option("--dry-run", is_flag=True, help="List kernels and sizes on any machine, time none.")
@click.option("--out", default=None, type=click.Path(dir_okay=False), help="File that rows are added to, JSON lines.")
def main(seqlen, tokens, draws, sizes, seconds, forward_only, chip, dry_run, out) -> None:
    if not dry_run and not torch.cuda.is_available():
        raise click.ClickException("needs a GPU; --dry-run lists what would be timed")
    console, device = Console(width=150, highlight=False), torch.device("cpu" if dry_run else "cuda")
    on = chip_by_number(chip) if dry_run else chip_of(device)
    todo, requests = [], {}
    for kind, is_forward in itertools.product(KINDS, (True, *(() if forward_only else (False,)))):
        spec = spec_of(kind, needs_backward=True)
        kernels = collected(spec, on, seqlen, tokens, draws, is_forward)
        for _, extents in kernels.values() if len(kernels) > 1 else ():
            for extent in _chosen_sizes(extents, sizes):
                plans = alternatives(spec, extent, on, kernels, is_forward)
                todo.append((kind, is_forward, spec, extent, plans))
                directions = [x for plan in plans.values() for x in plan.both()]
                requests |= {x.request().full_key: x.request() for x in directions}
    console.print(f"{len(requests)} kernels, {len(todo)} sizes")
    if dry_run:
        for kind, is_forward, _, extent, plans in todo:
            console.print(kind, "forward" if is_forward else "backward", tuple(extent), " | ".join(plans))
        return
    compile_requests(requests.values(), folder_for(None))
    facts = dict(device=torch.cuda.get_device_name(), commit=machine.commit(), date=f"{datetime.date.today()}")
    table = Table("heads, causal", "direction", "batch, length", "chosen, us", "gain", "others, us")
    random.shuffle(todo)  # what drifts meets all kinds
    rows = []
    for kind, is_forward, spec, extent, plans in todo:
        timings = measure_in_turns(works(spec, extent, plans, is_forward), device, seconds=seconds)
        times = {name: 1000 * timing.median_ms for name, timing in timings.items()}
        (chosen, least), *others = times.items()
        gain = min(time for _, time in others) / least if others else None
        row = dict(zip(("head_dim", "heads_q", "heads_kv", "causal"), kind))
        row |= dict(direction="forward" if is_forward else "backward", batch=extent.batch, seqlen=extent.max_seqlen_q)
        rows.append(row | dict(chosen=chosen, gain=gain, microseconds=times) | facts)
    rows.sort(key=lambda row: [str(row[x]).zfill(6) for x in ("head_dim", "heads_q", "causal", "direction", "seqlen")])
    for row in rows:
        name, (least, *others) = row["chosen"], row["microseconds"].values()
        of_others = ", ".join(f"{x} {row['microseconds'][x]:.1f}" for x in [*row["microseconds"]][1:])
        shape = f"d{row['head_dim']} {row['heads_q']}/{row['heads_kv']} {row['causal']}"
        gain = "" if row["gain"] is None else f"{row['gain']:.3f}"
        table.add_row(
            shape, row["direction"], f"{row['batch']}, {row['seqlen']}", f"{name} {least:.1f}", gain, of_others
        )
        if out:
            with Path(out).open("a") as file:
                file.write(json.dumps(row) + "\n")
    console.print(table)


if __name__ == "__main__":
    main()
