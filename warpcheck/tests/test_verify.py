"""`warpcheck verify` judges the candidates of a directory, each in a process of its own."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from warpcheck.cli import main

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

# The pipeline of `warpcheck_cases.planted`, with a mistake or none, beside a reference.
PIPELINE = """\
import sys
sys.path.insert(0, {folder!r})
import torch
from cutlass.cute.runtime import from_dlpack
from warpcheck_cases.planted import COLUMNS, ROWS, run_pipeline
source = torch.randn(ROWS, COLUMNS, device="cuda")
result = torch.zeros_like(source)
run_pipeline(from_dlpack(source), from_dlpack(result), {mistake!r})
torch.testing.assert_close(result, {factor} * source)
"""


def written(folder, name: str, mistake: str = "", factor: int = 2) -> None:
    text = PIPELINE.format(folder=str(Path(__file__).parent), mistake=mistake, factor=factor)
    (folder / f"{name}.py").write_text(text)


def verify(folder, *words: str) -> tuple[int, dict, str]:
    """The exit code, the JSON and what was printed."""
    out = folder / "out.json"
    done = CliRunner().invoke(main, ["verify", str(folder), "--chip", "sm_90a", "--json", str(out), *words])
    assert out.exists(), done.output
    return done.exit_code, json.loads(out.read_text()), done.output


@pytest.mark.rotates(2)
def test_verdicts_of_candidates(tmp_path):
    written(tmp_path, "clean")
    written(tmp_path, "racy", "early release")
    written(tmp_path, "wrong", factor=3)
    (tmp_path / "crashed.py").write_text("import os; os._exit(0)")
    (tmp_path / "empty.py").write_text("print('nothing')")
    (tmp_path / "_shared.py").write_text("raise SystemExit('no candidate')")
    code, whole, printed = verify(tmp_path, "--mutants", "3")
    rows = {row["candidate"]: row for row in whole["candidates"]}
    assert code == 1 and whole["best"] == "clean.py" and "best: clean.py" in printed
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "clean.py": "clean", "racy.py": "findings", "wrong.py": "failed", "crashed.py": "crashed",
        "empty.py": "no launch",
    }  # fmt: skip
    assert "race" in {finding["kind"] for finding in rows["racy.py"]["findings"]}
    assert "predicted" not in rows["racy.py"] and "mutants" not in rows["racy.py"]
    assert any("AssertionError" in line for line in rows["wrong.py"]["output"])
    clean = rows["clean.py"]
    assert clean["predicted"]["microseconds"] > 0 and clean["predicted"]["sms"] == 4
    assert clean["mutants"]["judged"] == 3 and clean["mutants"]["killed"] + len(clean["mutants"]["survivors"]) == 3


@pytest.mark.rotates(2)
def test_findings_of_other_severities_may_be_what_counts(tmp_path):
    written(tmp_path, "racy", "early release")
    _, whole, _ = verify(tmp_path, "--fail-on", "leftover")
    (row,) = whole["candidates"]
    assert row["verdict"] != "findings" and "race" in {finding["kind"] for finding in row["findings"]}


@pytest.mark.rotates(2)
def test_a_candidate_that_does_not_end_is_stopped(tmp_path):
    (tmp_path / "endless.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)")
    code, whole, _ = verify(tmp_path, "--limit", "8")
    (row,) = whole["candidates"]
    assert code == 1 and row["verdict"] == "timed out" and row["output"] == ["begun"] and row["seconds"] < 60


DOUBLE = """\
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def double(x: cute.Tensor):
    i = cute.arch.thread_idx()[0]
    x[i] = x[i] * 2


@cute.jit
def launch(x: cute.Tensor):
    double(x).launch(grid=(1, 1, 1), block=(32, 1, 1))


x = torch.ones(32, device="cuda")
launch(from_dlpack(x))
assert (x == 2).all()
"""


def test_a_chip_without_a_clock_has_no_time(tmp_path):
    (tmp_path / "double.py").write_text(DOUBLE)
    code, whole, printed = verify(tmp_path, "--chip", "sm_80")
    assert code == 0 and whole["best"] is None
    assert "the clock has no table" in whole["candidates"][0]["predicted"]["reason"] and "no table" in printed


def test_a_directory_without_scripts_is_refused(tmp_path):
    done = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert done.exit_code == 2 and "no script" in done.output
