"""Sawtooth order of key blocks beside the same order in all waves, predicted for a GPU with a small L2.

python -m bench.l2_order --gpu GB10 --out FILE appends rows. python -m bench.l2_order FILE prints the table of
docs/results/predicted-consumer.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from warpcheck.timing.chips import GPUS

from fa4.emulator.attention import Problem, own_plan
from fa4.emulator.l2_reuse import KeyTraffic
from fa4.emulator.predict import predict
from fa4.emulator.tile_schedule import tile_schedule_of
from fa4.runtime.device import chip_by_target

from .predicted_pages import page_command
from .suites import BenchCase

PIECE = 128  # keys that the simulation reads at a time
AHEAD = 2  # pieces that a CTA has in flight
HEADS = 2  # one after the other
CASES = tuple(
    BenchCase("fwd", 1, seqlen, seqlen, HEADS, HEADS, head_dim, head_dim, False)
    for head_dim in (64, 128)
    for seqlen in (32768, 65536, 98304, 131072)
)
ORDERS = {"same order": False, "sawtooth": True}


def rows_of(gpu: str) -> Iterator[dict]:
    """Predict bfloat16 forwards without a mask of one head after another, in each order."""
    table = GPUS[gpu]
    chip = chip_by_target(table.chip, sms=table.sms)
    for case in CASES:
        head_dim, seqlen = case.head_dim, case.seqlen_q
        problem = Problem("fwd", 1, seqlen, HEADS, head_dim, head_dim, False)
        found = predict(problem, table.chip, table=table, backend="sm80")
        rows = tile_schedule_of(own_plan(problem, chip, seqlen, seqlen, None, "sm80"), "fwd").rows
        traffic = KeyTraffic(
            heads=HEADS, tiles=math.ceil(seqlen / rows), blocks=seqlen // PIECE, block_bytes=4 * PIECE * head_dim,
            ctas=table.sms * found.resident, step=4 * rows * PIECE * head_dim / found.cost.rate,  # a rate of a CTA
            ahead=AHEAD, l2_bytes=chip.l2, dram_bytes=table.numbers["dram_bytes"].value * table.sms,
        )  # fmt: skip
        machine = {"device": f"{gpu}, predicted", "chip": table.chip, "clock_ghz": found.clock}
        for order, is_sawtooth in ORDERS.items():
            result = traffic.simulate(is_sawtooth)
            yield {
                **dataclasses.asdict(traffic), "machine": machine, "gpu": gpu, "provider": order, "label": case.label,
                "predicted": True, "bytes_of_head": 4 * seqlen * head_dim, "cycles": result.cycles,
                "tflops": case.flops * found.clock / result.cycles / 1e3, "bytes_from_dram": result.nbytes,
                "share_of_dram": result.nbytes / result.cycles / traffic.dram_bytes,
            }  # fmt: skip


def tables(rows: list[dict]) -> str:
    """Return the table of docs/results/predicted-consumer.md."""
    lines = [
        "| case | K and V of a head | from device memory, same order | sawtooth | of the bandwidth | time, sawtooth |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    found = {(row["label"], row["provider"]): row for row in rows}
    for case in CASES:
        same, sawtooth = (found[case.label, order] for order in ORDERS)
        fewer = sawtooth["bytes_from_dram"] / same["bytes_from_dram"] - 1
        cells = (
            case.label.removesuffix(" bfloat16"), f"{same['bytes_of_head'] >> 20} MiB",
            f"{same['bytes_from_dram'] >> 20} MiB", f"{sawtooth['bytes_from_dram'] >> 20} MiB ({fewer:+.0%})",
            f"{same['share_of_dram']:.1%}", f"{sawtooth['cycles'] / same['cycles'] - 1:+.1%}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


main = page_command(GPUS, rows_of, tables)

if __name__ == "__main__":
    main(prog_name="python -m bench.l2_order")
