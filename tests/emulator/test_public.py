"""Public packages' kernels: the runner of their rows on kernels that live here, and the page against its data."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from cutlass.cute.runtime import from_dlpack
from warpcheck.findings import KINDS
from warpcheck.machine import interleavings
from warpcheck_cases.planted import COLUMNS, ROWS, run_pipeline

from tests.emulator.public import page, run
from tests.emulator.public.rows import Outcome, Row, by_formula, draw, run_row

ROOT = Path(__file__).parents[2]


def row(mistake: str = "none", factor: float = 2.0) -> Row:
    def call(seed: int):
        (source,) = draw(seed, (ROWS, COLUMNS), dtype=torch.float32)
        result = torch.zeros_like(source)
        run_pipeline(from_dlpack(source), from_dlpack(result), mistake)
        return by_formula(["doubled"], [result], lambda x: factor * x, source)

    return Row("torch", f"pipeline, {mistake}", "sm_90a", call)


def test_a_right_row_is_judged_in_every_order() -> None:
    outcome = run_row(row(), interleavings(0, 3))
    assert outcome.right and outcome.runs == 3 and outcome.launches == 1 and not outcome.findings
    assert outcome.version == torch.__version__ and outcome.instructions > 0


def test_what_is_found_is_told_by_file_and_line() -> None:
    outcome = run_row(row("early release"), interleavings(0, 1))
    assert {finding["kind"] for finding in outcome.findings} == {"race"}
    assert all(finding["place"].startswith("warpcheck_cases/planted.py:") for finding in outcome.findings)


def test_wrong_values_and_exceptions_are_told() -> None:
    wrong = run_row(row(factor=3.0), interleavings(0, 1))
    assert wrong.wrong and not wrong.right and wrong.ratio > 1
    failed = run_row(Row("torch", "raises", "sm_90a", lambda seed: 1 / 0), interleavings(0, 2))
    assert failed.failure == "ZeroDivisionError: division by zero" and not failed.runs
    empty = run_row(Row("torch", "nothing", "sm_90a", lambda seed: []), interleavings(0, 1))
    assert empty.failure == "nothing was compared"


def test_packages_that_are_not_installed_are_left_out() -> None:
    rows = [row(), dataclasses.replace(row(), package="not-a-package")]
    assert run.installed(rows) == (rows[:1], ["not-a-package"])


def test_rows_have_names_of_their_own() -> None:
    keys = [one.key for one in run.all_rows()]
    assert len(keys) == len(set(keys)) and len(keys) > 50


def test_a_process_that_dies_is_one_rows_failure(tmp_path, monkeypatch) -> None:
    """The rows after it run in a process of their own."""
    monkeypatch.setattr(run.sys, "executable", str(tmp_path / "dies"))
    (tmp_path / "dies").write_text("#!/bin/sh\necho broken >&2\nexit 7\n")
    (tmp_path / "dies").chmod(0o755)
    told: list[Outcome] = []
    run.run_rows([row(), row("late")], 1, 60.0, told.append)
    assert [outcome.failure for outcome in told] == ["the process ended with 7: broken"] * 2


def test_the_page_is_made_from_its_data() -> None:
    folder = ROOT / "docs" / "results"
    outcomes = page.load(folder)
    assert outcomes and page.page(outcomes, run.SHOWN) == (folder / page.PAGE).read_text()
    for outcome in outcomes:
        assert {finding["kind"] for finding in outcome.findings} <= set(KINDS)


def test_rows_that_are_not_run_again_stay(tmp_path) -> None:
    first, second = (Outcome("torch", name, "sm_90a", runs=1) for name in ("a", "b"))
    page.write(tmp_path, [first, second], {})
    page.write(tmp_path, [dataclasses.replace(first, runs=2)], {})
    assert [fields["runs"] for fields in json.loads((tmp_path / page.DATA).read_text())] == [2, 1]
