"""The clock's laws of copies, additions and device memory against the microbenchmarks of an H200 that gave them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import Checks
from warpcheck.machine.record import EVENTS, KINDS
from warpcheck.timing.chips import GPUS
from warpcheck.timing.code import assembler

from bench import held_out
from bench.calibrate import replayed, run, tiles, working_set
from fa4.emulator import emulate
from fa4.runtime.device import chip_by_number

needs_machine_code = pytest.mark.skipif(assembler() is None, reason="the clock is tested with ptxas")
RESULTS = Path(__file__).parents[2] / "bench" / "results"
ROWS = [json.loads(line) for line in (RESULTS / "2026-11-28_nvidia-h200_calibrate.jsonl").read_text().splitlines()[1:]]
MEASURED = {(row["bench"], row["section"]): row for row in ROWS}
H200 = GPUS["H200"]

# Benchmark -> by what share the clock may err: of sections of these names, or of all.
REPLAYED = {
    "TMA tiles of 128 rows of 144 bytes, 4 in flight, one SM": 0.08,
    "TMA tiles of 128 rows of 160 bytes, 4 in flight, one SM": 0.08,
    "TMA tiles of 128 rows of 192 bytes, 4 in flight, one SM": 0.08,
    "TMA tiles of 128 rows of 192 bytes in boxes of 64 bytes, 4 in flight, one SM": 0.08,
    "TMA tiles of 128 rows of 160 bytes, 4 in flight, all SMs": 0.05,
    "TMA tiles of 128 rows of 256 bytes, 4 in flight, all SMs": 0.05,
    "TMA stores of tiles of 128 rows of 144 bytes, one SM": 0.08,
    "TMA stores of tiles of 128 rows of 160 bytes, one SM": 0.03,
    "TMA stores of tiles of 128 rows of 192 bytes, one SM": 0.03,
    "cp.async tiles of 128 rows of 192 bytes, 64 side by side, one SM": 0.05,
    "ldmatrix.x4 beside cp.async": 0.15,
    "ldmatrix.x4 beside additions of 4 bytes": 0.25,
    "mma.sync m16n8k16 beside stores of 4 bytes": 0.2,
}
_NOT = {"warps 4 to 7, additions of 4 bytes beside the other"}  # 50 % too slow: the unit is shared, not given to them


@needs_machine_code
@pytest.mark.parametrize("name", REPLAYED)
def test_the_clock_takes_what_the_microbenchmark_took(name, tmp_path):
    (bench,) = (bench for bench in run.BENCHES if bench.name == name)
    for section, clocks in replayed.sections(bench, H200, tmp_path).items():
        if section not in _NOT:
            measured = MEASURED[name, section]["median"]
            assert clocks == pytest.approx(measured, rel=REPLAYED[name]), section


@pytest.mark.parametrize(("columns", "boxes"), [
    # of a row of 144 bytes, in the first head and in the second, which begins in the middle of a sector
    (72, [(128, 0, 0, 4, 128, 0), (128, 1, 1, 4, 16, 1), (128, 0, 0, 5, 128, 2), (128, 1, 1, 5, 16, 1)]),
    (80, [(128, 0, 0, 4, 128, 0), (128, 1, 0, 4, 32, 0)] * 2),
])  # fmt: skip
def test_boxes_are_recorded_by_rows_and_sectors(columns, boxes):
    """boxes: rows, and of each: whether it is cut, and within a sector, its sectors, bytes, and partial sectors."""
    bench = tiles.tma_tiles(columns, 128, "all SMs")
    with emulate("sm_90a", sms=2, timing=True, checks=Checks(races=False, poison=False)) as gpu:
        run.launch_bench(bench, chip_by_number(90), torch.device("cpu"), 2)
    found = []
    for warp in gpu.launches[-1].record.warps:
        of_kind = warp.events[warp.events[:, 1] == KINDS["box"]][:, 2:]
        found += [tuple(map(int, row)) for row in of_kind[:2]]
    assert EVENTS[KINDS["box"]][1:] == ("rows", "cut", "cut_sectors", "sectors", "bytes", "partial")
    assert found == [(rows, *(rows * x for x in each)) for rows, *each in boxes]


@pytest.mark.parametrize("loads", working_set.LOADS)
def test_l2_loses_a_working_set_as_measured(loads):
    bench = working_set.reads(loads, together=False)
    missing = H200.l2_misses(working_set.SIZE * loads * H200.sms)
    rates = H200.values()
    clocks = 1024 * ((1 - missing) / rates["l2_own_bytes"] + missing / rates["dram_bytes"])
    assert clocks == pytest.approx(MEASURED[bench.name, "stream"]["median"], rel=0.13)


def traffic(columns):
    """Bytes inside and beside the boxes of a row, and sectors that a store writes in part: means of two heads."""
    row, boxes = 2 * columns, -(-2 * columns // 128)
    sectors, partial = [], []
    for head in range(2):
        begin = row * head
        spans = [(begin + 128 * i, begin + 128 * (i + 1)) for i in range(boxes)]
        sectors.append(sum((to - 1) // 32 - start // 32 + 1 for start, to in spans))
        ends = [(start, min(to, begin + row)) for start, to in spans]
        partial.append(sum((start % 32 != 0) + (to % 32 != 0) if start // 32 != (to - 1) // 32 else to - start < 32
                           for start, to in ends))  # fmt: skip
    return row, 32 * np.mean(sectors) - row, np.mean(partial)


@pytest.mark.parametrize("columns", tiles.WIDTHS)
def test_device_memory_takes_what_tiles_of_rows_took(columns):
    """The share of other rows' sectors is a mean of two runs, of which the rows hold the slower one. Stores of rows of
    192 bytes take 25 % longer than their bytes."""
    inside, outside, partial = (128 * x for x in traffic(columns))
    loads = H200.device_memory(inside, outside, 0, 0, 0)
    name = f"TMA tiles of 128 rows of {2 * columns} bytes, 4 in flight, all SMs, from DRAM"
    assert loads == pytest.approx(MEASURED[name, "stream"]["median"], rel=0.15)
    stores = H200.device_memory(0, 0, inside, 0, partial)
    name = f"TMA stores of tiles of 128 rows of {2 * columns} bytes, all SMs"
    assert stores == pytest.approx(MEASURED[name, "stream"]["median"], rel=0.21)


def test_additions_to_more_than_l2_take_what_was_measured():
    bench = working_set.adds(working_set.LOADS[-1])
    row = MEASURED[bench.name, "stream"]
    assert H200.device_memory(0, 0, 0, 1024, 0) == pytest.approx(row["median"], rel=0.05)


def test_two_warps_of_a_scheduler_share_a_pipe_evenly():
    """Measured; the clock's scheduler prefers the warp that issued last."""
    for name in ("ex2", "max", "fma"):
        halves = [MEASURED[f"{name} beside {name}", f"warps {who}, {name} beside the other"]["median"]
                  for who in ("0 to 3", "4 to 7")]  # fmt: skip
        assert halves[0] == pytest.approx(halves[1], rel=0.1)


def test_what_lies_between_events_is_what_was_measured():
    lines = (RESULTS / "2026-11-28_nvidia-h200_harness.jsonl").read_text().splitlines()[1:]
    empty = [row for row in map(json.loads, lines) if row["bench"] == "nothing" and row["after"] != "itself"]
    for row in empty:
        assert row["event_us"] - row["kernel_us"] == pytest.approx(held_out.EVENTS_US, abs=0.3)


def test_rows_are_drawn_by_a_seed_and_measured_times_are_joined(tmp_path, monkeypatch):
    labels = [case.label for case in held_out.SUITES["vision"]]
    rows = [{"suite": "vision", "label": label, "provider": "fa4", "median_ms": 1.0 + i, "machine": {"device": "GPU"}}
            for i, label in enumerate(labels)]  # fmt: skip
    measured, into = tmp_path / "measured.jsonl", tmp_path / "rows.jsonl"
    measured.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(held_out, "predicted", lambda suite, case, *rest: {
        "suite": suite, "label": case.label, "direction": case.direction, "gpu": "H200", "predicted_ms": 1.0,
        "clock_ghz": 1.5,
    })  # fmt: skip

    def call(*args):
        done = CliRunner().invoke(held_out.main, [*map(str, args)])
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in into.read_text().splitlines()]

    options = ("--gpu", "H200", "--draw", 3, "--seed", 7, "--into", into)
    first = call("predict", measured, *options)
    assert len(first) == 3 and first == call("predict", measured, *options), "rows that are there come once"
    into.unlink()
    assert call("predict", measured, *options) == first
    into.unlink()
    ahead = call("ahead", "--suite", "vision", "--gpu", "H200", "--into", into)
    assert len(ahead) == len(labels) and "measured_ms" not in ahead[0]
    joined = call("join", into, measured)
    assert [row["measured_ms"] for row in joined] == [row["median_ms"] for row in rows]
    measured.write_text(json.dumps(rows[0]) + "\n")
    refused = CliRunner().invoke(held_out.main, ["join", str(into), str(measured)])
    assert refused.exit_code and "was not measured" in refused.output
