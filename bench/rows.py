"""python -m bench.rows: time every row of tiles that could serve a shape on the Blackwell chip that is here."""

from __future__ import annotations

import dataclasses

import click
import torch
from rich.console import Console
from rich.table import Table

from fa4 import run
from fa4.device import Chip, chip_of
from fa4.sm100.bwd import tiles as backward_tiles
from fa4.sm100.fwd import tiles as forward_tiles
from fa4.sm100.fwd.config import Schedule
from fa4.sm100.plan import Plan
from fa4.spec import AttentionInputs, AttentionSpec, Saved

from .timing import measure


def _forward_rows(spec: AttentionSpec, chip: Chip) -> dict[str, dict]:
    """The table's row first, then others that differ from it in one column."""
    chosen = forward_tiles.tiles_for(spec, chip)
    rows = {"table": chosen}
    rows |= {f"{schedule.name.lower()}": dataclasses.replace(chosen, schedule=schedule) for schedule in Schedule}
    rows |= {f"polynomial {share}": dataclasses.replace(chosen, polynomial=share) for share in (0, 2, 4)}
    rows["sawtooth"] = dataclasses.replace(chosen, sawtooth=True)
    return {name: {"forward_tiles": row} for name, row in rows.items() if name == "table" or row != chosen}


def _backward_rows(spec: AttentionSpec, chip: Chip) -> dict[str, dict]:
    chosen = backward_tiles.tiles_for(spec, chip)
    rows = {"table": chosen, "single": backward_tiles.SINGLE}
    return {name: {"backward_tiles": row} for name, row in rows.items() if name == "table" or row != chosen}


@click.command(help=__doc__)
@click.option("--seqlen", default=8192, show_default=True, type=click.IntRange(min=1))
@click.option("--tokens", default=32768, show_default=True, type=click.IntRange(min=1), help="Of the whole batch.")
@click.option("--heads", default=16, show_default=True, type=click.IntRange(min=1))
@click.option("--head-dim", default=128, show_default=True, type=click.IntRange(min=8, max=128))
@click.option("--causal", is_flag=True)
@click.option("--deterministic", is_flag=True)
@click.option("--seconds", default=0.5, show_default=True, help="Spent on each row.")
def main(
    seqlen: int, tokens: int, heads: int, head_dim: int, causal: bool, deterministic: bool, seconds: float
) -> None:
    device = torch.device("cuda")
    if not torch.cuda.is_available() or chip_of(device).number not in (100, 103):
        raise click.ClickException("needs an sm_100 or sm_103")
    chip = chip_of(device)
    shape = (max(1, tokens // seqlen), seqlen, heads, head_dim)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    inputs = AttentionInputs(q, k, v, max_seqlen_q=seqlen, max_seqlen_k=seqlen)
    spec = AttentionSpec(
        torch.bfloat16, head_dim, head_dim, heads, heads, head_dim**-0.5, window_right=0 if causal else None,
        deterministic=deterministic, needs_backward=True,
    )  # fmt: skip
    flops = 4 * shape[0] * heads * seqlen**2 * head_dim * (0.5 if causal else 1.0)
    table = Table("direction", "row", "ms (quartiles)", "TFLOP/s", title=f"{chip}, {tuple(shape)}")
    for name, tiles in _forward_rows(spec, chip).items():
        plan = Plan(spec, inputs.extent, chip, **tiles)
        timing = measure(lambda plan=plan: run.forward(inputs, spec, plan), device, seconds=seconds)
        table.add_row("forward", name, *_cells(timing, flops))
    out, lse = run.forward(inputs, spec, Plan(spec, inputs.extent, chip))
    saved = Saved(out, lse, dout)
    for name, tiles in _backward_rows(spec, chip).items():
        plan = Plan(spec, inputs.extent, chip, **tiles)
        timing = measure(lambda plan=plan: run.backward(inputs, spec, plan, saved), device, seconds=seconds)
        table.add_row("backward", name, *_cells(timing, 2.5 * flops))
    Console().print(table)


def _cells(timing, flops: float) -> tuple[str, str]:
    return (
        f"{timing.median_ms:.3f} ({timing.q25_ms:.3f} to {timing.q75_ms:.3f})",
        f"{flops / timing.median_ms / 1e9:,.0f}",
    )


if __name__ == "__main__":
    main()
