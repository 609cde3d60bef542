"""Sawtooth order of key blocks beside the same order in all waves, predicted for a GPU with a small L2.

python -m bench.l2_order --gpu GB10 --out FILE appends rows. python -m bench.l2_order FILE prints the table of
docs/results/predicted-consumer.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import click
from warpcheck.timing.chips import GPUS

from fa4.emulator.attention import Problem, own_plan
from fa4.emulator.l2_reuse import KeyTraffic
from fa4.emulator.predict import predict
from fa4.emulator.tile_schedule import tile_schedule_of
from fa4.runtime.device import chip_by_number

PIECE = 128  # keys that the simulation reads at a time
AHEAD = 2  # pieces that a CTA has in flight
CASES = [(head_dim, seqlen) for head_dim in (64, 128) for seqlen in (32768, 65536, 98304, 131072)]


def rows_of(gpu: str) -> Iterator[dict]:
    """Predict bfloat16 forwards without a mask of one head after another."""
    table = GPUS[gpu]
    chip = chip_by_number(int(table.chip.removeprefix("sm_").removesuffix("a")), sms=table.sms)
    for head_dim, seqlen in CASES:
        problem = Problem("fwd", 1, seqlen, 8, head_dim, head_dim, False)
        found = predict(problem, table.chip, table=table, backend="sm80")
        rows = tile_schedule_of(own_plan(problem, chip, seqlen, seqlen, None, "sm80"), "fwd").rows
        step = 4 * rows * PIECE * head_dim / found.cost.rate * found.resident
        traffic = KeyTraffic(
            heads=2, tiles=math.ceil(seqlen / rows), blocks=seqlen // PIECE, block_bytes=4 * PIECE * head_dim,
            ctas=table.sms * found.resident, step=step, ahead=AHEAD, l2_bytes=chip.l2,
            dram_bytes=table.numbers["dram_bytes"].value * table.sms,
        )  # fmt: skip
        for order in ("same", "sawtooth"):
            result = traffic.simulate(order == "sawtooth")
            yield {
                **dataclasses.asdict(traffic), "gpu": gpu, "predicted": True, "order": order, "head_dim": head_dim,
                "seqlen": seqlen, "bytes_of_head": 4 * seqlen * head_dim, "cycles": result.cycles,
                "bytes_from_dram": result.nbytes, "share_of_dram": result.nbytes / result.cycles / traffic.dram_bytes,
            }  # fmt: skip


def table_of(rows: list[dict]) -> str:
    """Return the table of docs/results/predicted-consumer.md."""
    lines = [
        "| case | K and V of a head | from device memory, same order | sawtooth | of the bandwidth | time, sawtooth |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    found = {(row["head_dim"], row["seqlen"], row["order"]): row for row in rows}
    for head_dim, seqlen in CASES:
        same, sawtooth = (found[head_dim, seqlen, order] for order in ("same", "sawtooth"))
        fewer = sawtooth["bytes_from_dram"] / same["bytes_from_dram"] - 1
        cells = (
            f"fwd d{head_dim} full {seqlen}", f"{same['bytes_of_head'] >> 20} MiB",
            f"{same['bytes_from_dram'] >> 20} MiB", f"{sawtooth['bytes_from_dram'] >> 20} MiB ({fewer:+.0%})",
            f"{same['share_of_dram']:.1%}", f"{sawtooth['cycles'] / same['cycles'] - 1:+.1%}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@click.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gpu", type=click.Choice(sorted(GPUS)), help="Predict its rows.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File that the rows are appended to.")
def main(file: Path | None, gpu: str | None, out: Path | None) -> None:
    """Print the table of FILE, or append the rows of a GPU to a file. Nothing is measured."""
    if gpu and out:
        with out.open("a") as output:
            for row in rows_of(gpu):
                output.write(json.dumps(row) + "\n")
    elif file:
        click.echo(table_of([json.loads(line) for line in file.read_text().splitlines()]), nl=False)
    else:
        raise click.UsageError("give a file, or --gpu and --out")


if __name__ == "__main__":
    main(prog_name="python -m bench.l2_order")
