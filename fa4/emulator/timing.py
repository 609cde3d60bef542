"""python -m fa4.emulator.timing: how long would it take on a chip?"""

from __future__ import annotations

import click
from warpcheck.options import COUNT, NEW_FILE
from warpcheck.timing import timeline as drawing
from warpcheck.timing.chips import GPUS, TABLES

from fa4.emulator.attention import PACKAGES, Problem
from fa4.emulator.predict import Prediction, predict

_SHOWN = 8


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("direction", type=click.Choice(["fwd", "bwd"]))
@click.option("--chip", type=click.Choice(list(TABLES)), default="sm_100a", show_default=True)
@click.option("--gpu", type=click.Choice(list(GPUS)), help="[default: of the chip, the first listed]")
@click.option("--seqlen", type=COUNT, default=8192, show_default=True)
@click.option("--keys", type=COUNT, help="[default: the seqlen]")
@click.option("--batch", type=COUNT, help="Sequences [default: 32k tokens].")
@click.option("--heads", type=COUNT, help="[default: 2048 / head dim]")
@click.option("--head-dim", type=COUNT, default=128, show_default=True)
@click.option("--head-dim-v", type=COUNT, help="[default: the head dim]")
@click.option("--causal", is_flag=True)
@click.option("--deterministic", is_flag=True)
@click.option("--package", type=click.Choice(list(PACKAGES)), default="fa4", show_default=True)
@click.option("--backend", default="auto", show_default=True, help="Of fa4, on sm_120a and sm_121a.")
@click.option("--clock", type=click.FloatRange(min=0.1), help="GHz [default: the chip table's].")
@click.option("--timeline", type=NEW_FILE, help="Write the replays as a Chrome trace with real time.")
def main(
    direction: str, chip: str, gpu: str | None, seqlen: int, keys: int | None, batch: int | None, heads: int | None,
    head_dim: int, head_dim_v: int | None, causal: bool, deterministic: bool, package: str, backend: str,
    clock: float | None, timeline: str | None,
) -> None:  # fmt: skip
    """Predict attention on a whole chip: cycles, TFLOP/s at a clock, and what bounds it. Nothing is measured."""
    batch = batch or max(1, 32768 // seqlen)
    heads = heads or max(1, 2048 // head_dim)
    sizes = batch, seqlen, heads, head_dim, head_dim_v or head_dim
    problem = Problem(direction, *sizes, causal, deterministic, keys=keys)
    table = GPUS[gpu] if gpu else TABLES[chip]
    try:
        found = predict(
            problem, table.chip, package, clock, timeline=timeline is not None, table=table, backend=backend
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    mask = "causal" if causal else "full"
    lengths = f"{seqlen}x{keys}" if keys else seqlen
    where = f"{gpu}, {table.chip}" if gpu else chip
    click.echo(f"{package} {direction} d{head_dim} {mask} b{batch} h{heads} {lengths} on {where}, predicted")
    click.echo(text(found, table.sms))
    if timeline is not None:
        click.echo(f"{drawing.write(timeline, found.times)} slices in {timeline}")


def text(found: Prediction, sms: int) -> str:
    """A prediction as lines."""
    tile = found.flops / found.tiles
    lines = [
        f"  {found.cycles:,.0f} cycles, {found.milliseconds:.3f} ms, {found.tflops:,.0f} TFLOP/s at {found.clock} GHz",
        f"  {found.tiles} tiles of {tile / 1e9:.2f} GFLOP (mean) over {sms} SMs of {found.resident} CTA(s), scheduler: "
        f"{found.scheduler.value}",
    ]
    for i, part in enumerate(found.parts or (found,)):
        cost = part.cost
        kernel = f"kernel {i + 1}, {part.cycles:,.0f} cycles: " if found.parts else ""
        lines.append(
            f"  {kernel}a CTA: {cost.start:,.0f} cycles, {cost.tile:,.0f} a tile, {cost.rate:,.0f} FLOPs a cycle and "
            "SM in between"
        )
    lines += [
        f"  kernels before and after: {found.auxiliary:,.0f} cycles" if found.auxiliary else "  one kernel",
        "  busy in between: " + ", ".join(f"{name} {share:.0%}" for name, share in list(found.busy.items())[:_SHOWN]),
    ]
    times = found.times[0]
    lines.append(f"  issue model from {times.source}; untied events, instructions: {times.untied}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(prog_name="python -m fa4.emulator.timing")
