"""The first day's steps name tests and commands that exist, and its report is complete; no GPU is needed."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.runtime import dispatch
from tests.gpu import first_day
from tests.gpu.first_day import Step

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("step", first_day.STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("dry", [False, True], ids=["on_a_gpu", "dry"])
def test_a_step_can_be_run(step, dry):
    command = step.dry_command() if dry else step.command
    if not command:
        no_dry_form = ("warpcheck", "bench.tune", "bench.overhead", "bench.fp8")
        assert step.command[1] in no_dry_form
        return
    module = command[command.index("-m") + 1]
    assert importlib.util.find_spec(module), module
    assert step.backend in ("", *dispatch.backend_names())
    for word in command:
        if word.startswith("tests/"):
            path, _, name = word.partition("::")
            text = (ROOT / path).read_text()
            assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), word


@pytest.mark.rotates(2)
@pytest.mark.parametrize("step", [step for step in first_day.STEPS if "-k" in step.command], ids=lambda step: step.name)
def test_a_choice_of_tests_is_not_empty(step):
    command = [sys.executable, *step.command, "--collect-only"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def call(*arguments: str) -> Result:
    return CliRunner().invoke(first_day.main, arguments)


def test_the_list_is_shown_where_there_is_no_chip():
    result = call("--list")
    assert result.exit_code == 0 and result.output.index("environment") < result.output.index("times")


@pytest.mark.parametrize(
    "chip, suite, has, lacks",
    [
        ("sm_100a", "sm100", "tests/gpu/test_sm100_tiles.py", "tests.covering"),
        ("sm_120a", "consumer", "tests.covering --device cuda", "tests/gpu/test_sm100_tiles.py"),
        ("121", "consumer", "--array eight-bits-scaled", "bench.tune"),
        ("90", "sm100", "bench.overhead", "tests.covering"),
    ],
)
def test_steps_are_those_of_a_chip(chip, suite, has, lacks):
    result = call("--list", "--chip", chip)
    assert result.exit_code == 0 and f"--suite {suite}\n" in result.output
    assert has in result.output and lacks not in result.output
    assert "(needs a GPU with 6 GiB)" in result.output and "{suite}" not in result.output


@pytest.mark.parametrize("arguments", [("--chip", "sm_120a"), ("--list", "--chip", "77"), ("--list", "--chip", "x")])
def test_a_chip_is_one_that_exists_and_not_for_a_run(arguments):
    result = call(*arguments)
    assert result.exit_code == 2 and "--chip" in result.output


def test_a_step_too_large_for_the_gpu_is_left_out_with_the_reason(monkeypatch, tmp_path):
    properties = SimpleNamespace(total_memory=4 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    report = first_day.new_report(tmp_path / "report", dry=True)
    for gib in (6, 4):
        first_day.take(Step("large", "", ("-c", "pass"), gib=gib), 1, report, dry=False)
    reason = "left out: needs a GPU with 6 GiB of memory, and this one has 4.0"
    assert [row["result"] for row in report.results] == [reason, "ok"]


def test_a_machine_without_a_gpu_is_refused_with_a_hint(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    result = call()
    assert result.exit_code == 1 and not list(tmp_path.iterdir())
    assert "needs an NVIDIA GPU of compute capability 8.0 or newer" in result.output and "--dry-run" in result.output


def test_a_report_has_the_environment_logs_and_what_came_of_each_step(monkeypatch, tmp_path):
    say = ("-c", "print('said by a step')")
    make = ("-c", "import sys; open(sys.argv[1], 'w')", "{report}/plots/times.png")
    monkeypatch.setattr(
        first_day,
        "STEPS",
        (
            Step("good", "prints", say, dry=say),
            Step("bad", "fails", say, dry=("-c", "raise SystemExit(3)")),
            Step("chip only", "has no dry form", say),
            Step("drawn", "writes a file", make, dry=make),
        ),
    )
    folder = tmp_path / "report"
    result = call("--dry-run", "--report", str(folder))
    assert result.exit_code == 1 and str(folder) in result.output
    assert {path.name for path in folder.iterdir()} == {
        "environment.json", "logs", "plots", "report.md", "rows", "steps.json",
    }  # fmt: skip
    steps = json.loads((folder / "steps.json").read_text())
    assert [row["result"] for row in steps] == ["ok", "FAILED (3)", "left out of a dry run", "ok"]
    assert "said by a step" in (folder / steps[0]["log"]).read_text()
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["commit"] and environment["backends"] and environment["machine"]["device"]
    text = (folder / "report.md").read_text()
    assert "| bad | fails | FAILED (3) |" in text and "![times.png](plots/times.png)" in text
    assert call("--dry-run", "--report", str(folder)).exit_code == 2  # no report is written over


def test_a_report_is_sent_to_the_address_of_pyproject(monkeypatch, tmp_path):
    """On a chip, with its tools missing: the last lines say what to send, and where."""
    say = ("-c", "pass")
    monkeypatch.setattr(first_day, "STEPS", (Step("watched", "", say, under=("no-such-tool",)), Step("plain", "", say)))
    monkeypatch.setattr(first_day, "refusal", lambda: "")
    report = first_day.new_report(tmp_path / "report", dry=True)
    monkeypatch.setattr(first_day, "new_report", lambda folder, dry: report)
    result = call()
    assert result.exit_code == 0
    assert [row["result"] for row in report.results] == ["left out: no-such-tool is not installed", "ok"]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert f"Send {report.folder}.zip to {urls['Issues']}" in result.output
    assert Path(f"{report.folder}.zip").exists()


@pytest.mark.rotates(2)
def test_a_dry_run_measures_and_draws(tmp_path):
    folder = tmp_path / "report"
    result = call("--dry-run", "--only", "times", "--only", "plots", "--only", "summary", "--report", str(folder))
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (folder / "rows" / "times.jsonl").read_text().splitlines()]
    assert {row["provider"] for row in rows} == {"fa4", "sdpa"} and all("median_ms" in row for row in rows)
    assert (folder / "plots" / "times.png").stat().st_size > 1000
    assert "| case | fa4 | sdpa |" in (folder / "logs" / "03-summary.txt").read_text()
