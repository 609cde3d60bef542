"""Calls predicted from a part of each grid, and measured rows beside them."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from warpcheck.errors import EmulationError
from warpcheck.machine import Checks
from warpcheck.timing.chips import GPUS
from warpcheck.timing.code import assembler

from bench import cudnn_published, held_out
from bench.predicted import predicted_row
from bench.row_pages import rows_of
from bench.sampled import predict_sampled
from bench.suites import BenchCase, square
from fa4.emulator import emulate
from fa4.runtime.device import chip_of

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
needs_machine_code = pytest.mark.skipif(assembler() is None, reason="the clock is tested with ptxas")
ROOT = Path(__file__).parents[2]


@pytest.mark.rotates(3)
@needs_machine_code
@pytest.mark.parametrize("gpu", ["H100", "B200", "B300"])
def test_shared_heads_and_windows_are_predicted(gpu):
    """4 query heads on one of keys take about what 4 on 4 take; a window of an eighth of the keys takes much less. On
    Blackwell a place takes 14 of 2048 tiles of many lengths, whose mean errs by 10 %."""
    shared = BenchCase("fwd", 4, 4096, 4096, 32, 8, 128, 128, True)
    own = BenchCase("fwd", 4, 4096, 4096, 32, 32, 128, 128, True)
    window = BenchCase("fwd", 4, 4096, 4096, 32, 8, 128, 128, True, window=511)
    of_shared, of_own, of_window = (
        predict_sampled(c, "fa4", GPUS[gpu], 8).timing.cycles for c in (shared, own, window)
    )
    assert of_shared == pytest.approx(of_own, rel=0.2)
    assert of_window < 0.5 * of_shared


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plans_know_that_a_part_of_a_grid_runs(device):
    for sample in (None, 4):
        with emulate("sm_90a", timing=True, sample=sample, checks=Checks(races=False, poison=False)):
            assert chip_of(torch.device(device)).sampled == (sample is not None)


@pytest.mark.rotates(3)
@needs_machine_code
def test_a_part_and_the_tiles_of_the_schedule_agree():
    """The other prediction distributes replays of small problems by the schedule that fa4's plan names."""
    case = square("fwd", 4096, 128, False)
    by_schedule = predicted_row(case, "sm_100a")
    assert "from_part" not in by_schedule
    assert predict_sampled(case, "fa4", GPUS["B200"]).timing.cycles == pytest.approx(by_schedule["cycles"], rel=0.06)


@pytest.mark.rotates(3)
def test_a_grid_whose_clusters_wait_for_others_says_so():
    """A deterministic backward adds in an order of all its CTAs."""
    row = predicted_row(square("bwd", 2048, 128, False, tokens=2048), "sm_90a", "fa4-deterministic")
    assert "wait" in row["skipped"] or "deadlock" in row["skipped"].lower(), row
    with pytest.raises(EmulationError):
        predict_sampled(square("bwd", 2048, 128, False, tokens=2048), "fa4-deterministic", GPUS["H100"])


def test_the_page_of_held_out_rows_is_made_from_them():
    rows = rows_of(ROOT / "bench" / "results" / "2026-11-28_predicted_h200-held-out.jsonl")
    assert len(rows) >= 24 and len({row["label"] + row["suite"] for row in rows}) == len(rows)
    assert held_out.page(rows) in (ROOT / "docs" / "results" / "clock.md").read_text()
    for name in ("h200-drawn", "h100-power-fit"):
        others = rows_of(ROOT / "bench" / "results" / f"2026-11-28_predicted_{name}.jsonl")
        assert held_out.page(others) in (ROOT / "docs" / "results" / "clock.md").read_text(), name


def test_the_table_of_published_rows_of_cudnn_is_made_from_its_rows():
    rows = rows_of(ROOT / "bench" / "results" / "2026-11-28_predicted_sm_100a_cudnn-published.jsonl")
    assert [row["tflops"] for row in rows] == [row.tflops for row in cudnn_published.PUBLISHED]
    assert cudnn_published.page(rows) in (ROOT / "docs" / "results" / "predicted-times.md").read_text()


def test_rows_that_are_there_are_not_predicted_again(tmp_path):
    row = {"suite": "vision", "label": "fwd d64 full b16 h16 577 bfloat16", "direction": "fwd", "gpu": "H200",
           "measured_ms": 0.5, "predicted_ms": 0.6, "clock_ghz": 1.5, "provider": "fa4", "median_ms": 0.5}  # fmt: skip
    measured, into = tmp_path / "measured.jsonl", tmp_path / "rows.jsonl"
    for path in (measured, into):
        path.write_text(json.dumps(row) + "\n")
    done = CliRunner().invoke(
        held_out.main, ["predict", str(measured), "--gpu", "H200", "--least", "0.1", "--into", str(into)]
    )
    assert done.exit_code == 0 and into.read_text() == measured.read_text(), done.output
    assert "mean absolute error 20.0%" in held_out.page([row]) and "| +20.0% |" in held_out.page([row])
