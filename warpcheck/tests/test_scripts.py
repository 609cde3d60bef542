"""`warpcheck run` and the pytest plug-in on unmodified scripts and tests, and the repair of a script in the docs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.cli import main
from warpcheck_cases.printed import command_of, comparable, shown

ROOT = Path(__file__).parents[2]
TESTS_FOLDER = Path(__file__).parent  # where `warpcheck_cases` can be imported
FOLDER = "examples/emulator/"
EXAMPLE = ROOT / FOLDER / "scale.py"
DOCS = (ROOT / "docs" / "results" / "emulator-findings.md").read_text()
PIPELINE = """\
import sys
import torch
from cutlass.cute.runtime import from_dlpack
from warpcheck_cases.planted import COLUMNS, ROWS, run_pipeline
assert __name__ == "__main__" and torch.cuda.is_available()
source = torch.randn(ROWS, COLUMNS, device="cuda")
result = torch.zeros_like(source)
run_pipeline(from_dlpack(source), from_dlpack(result), sys.argv[1])
print("arguments:", sys.argv[1:])
torch.testing.assert_close(result, 2 * source)
"""


def command(*words: str):
    return CliRunner().invoke(main, words)


def run(*arguments: str):
    return command("run", *arguments)


@pytest.mark.parametrize("state", ["mistake", "repaired"])
def test_the_road_of_the_docs(state: str, tmp_path) -> None:
    lines = re.search(r"```diff\n(.*?)```", DOCS[DOCS.index("## From a script to a repair") :], re.S)[1].splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines)
    text = EXAMPLE.read_text()
    assert text.count(before) == 1
    script = tmp_path / "examples" / "emulator" / EXAMPLE.name
    script.parent.mkdir(parents=True)
    script.write_text(text if state == "mistake" else text.replace(before, after))
    result = run("--chip", "sm_100a", "--seeds", "10", "--", str(script), "--rows", "128")
    _, told = command_of(shown(DOCS, f"road: {state}", "text"))
    print(result.output)
    assert comparable(told, FOLDER, "py") == comparable(result.output, FOLDER, "py")
    assert result.exit_code == (1 if state == "mistake" else 0)


def test_a_script_runs_as_from_the_shell_and_its_findings_are_written(tmp_path) -> None:
    script = tmp_path / "pipeline.py"
    script.write_text(PIPELINE)
    found, sarif = tmp_path / "found.json", tmp_path / "found.sarif"
    result = run("--json", str(found), "--sarif", str(sarif), "--seeds", "2", "--", str(script), "early release")
    assert "arguments: ['early release']" in result.output and result.exit_code == 1, result.output
    told = json.loads(found.read_text())
    assert told and {finding["kind"] for finding in told} == {"race"}
    assert {Path(finding["place"]["file"]).name for finding in told} == {"planted.py"}
    assert json.loads(sarif.read_text())["runs"][0]["results"]
    clean = run("--off", "race", "--off", "uninitialized", "--", str(script), "early release")
    assert clean.exit_code == 0 and "no finding" in clean.output, clean.output


def test_the_scripts_own_failure_is_the_exit_code(tmp_path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit(7)")
    result = run("--", str(script))
    assert result.exit_code == 7 and "launched no kernel" in result.output
    assert run("--", str(tmp_path / "none.py")).exit_code == 2
    script.write_text("")
    assert run("--", str(script)).exit_code == 1


TESTS = """
import pytest
import torch
from cutlass.cute.runtime import from_dlpack
from warpcheck_cases.planted import COLUMNS, ROWS, run_pipeline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

@pytest.mark.parametrize("mistake", ["none", "early release"])
def test_pipeline(mistake):
    source, result = torch.randn(ROWS, COLUMNS).cuda(), torch.zeros(ROWS, COLUMNS).cuda()
    run_pipeline(from_dlpack(source), from_dlpack(result), mistake)

def test_no_kernel():
    assert torch.cuda.get_device_capability() == (9, 0)
"""


def test_the_plug_in_runs_gpu_tests_of_others(tmp_path) -> None:
    (tmp_path / "test_theirs.py").write_text(TESTS)
    sarif = tmp_path / "found.sarif"
    command = [sys.executable, "-m", "pytest", "-p", "warpcheck_pytest", "-p", "no:cacheprovider", "-q"]
    options = ["--emulate", "sm_90a", "--emulate-seeds", "3", "--emulate-sarif", str(sarif), "-rA"]
    done = subprocess.run([*command, *options, f"--rootdir={tmp_path}", str(tmp_path)], capture_output=True, text=True,
                          cwd=TESTS_FOLDER)  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.returncode == 1 and "1 failed, 2 passed" in done.stdout
    assert "FAILED" in done.stdout and "test_pipeline[early release]" in done.stdout
    assert "findings of the emulator (sm_90a)" in done.stdout and "[race]" in done.stdout
    assert json.loads(sarif.read_text())["runs"][0]["results"]


def test_a_chip_that_is_unknown_is_refused_by_the_plug_in(tmp_path) -> None:
    (tmp_path / "test_theirs.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "warpcheck_pytest", "-p", "no:cacheprovider", "-q"]
    command += ["--emulate", "sm_7"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", str(tmp_path)], capture_output=True, text=True, cwd=TESTS_FOLDER
    )
    assert done.returncode == 4 and "--emulate: " in done.stderr and "sm_7" in done.stderr, done.stderr


def test_launches_are_predicted_beside_the_findings(tmp_path) -> None:
    """At the clock of a power limit; a script that asks for the chip sees all multiprocessors of the GPU."""
    script = tmp_path / "script.py"
    script.write_text(PIPELINE + "print(torch.cuda.get_device_properties(0).multi_processor_count, 'multiprocessors')")
    done = command(
        "run",
        "--chip",
        "sm_90a",
        "--seeds",
        "1",
        "--timing",
        "--gpu",
        "H200",
        "--power",
        "400",
        "--",
        str(script),
        "none",
    )
    assert done.exit_code == 0 and "132 multiprocessors" in done.output, done.output
    assert "no finding" in done.output and "cycles of H200" in done.output and " at 1.817 GHz" in done.output
    alone = command("timing", "--gpu", "H200", "--clock", "1.5", "--", str(script), "none")
    assert alone.exit_code == 0 and " at 1.5 GHz, from 1 of 1 clusters" in alone.output, alone.output
    few = command("timing", "--chip", "sm_90a", "--sms", "4", "--sample", "0", "--", str(script), "none")
    assert few.exit_code == 0 and "of H100" in few.output and "on 1 SM\n" in few.output, few.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "--gpu", "H200"), "they need --timing"),
        (("timing", "--gpu", "B200", "--chip", "sm_90a"), "B200 has chip sm_100a, and --chip is sm_90a"),
        (("timing", "--gpu", "H100", "--clock", "1.5", "--power", "700"), "expected one"),
        (("timing", "--gpu", "B200", "--power", "700"), "power of the B200 is unknown, expected H100, H200"),
        (("run", "--timing", "--chip", "sm_80"), "the clock has no table of sm_80"),
    ],
)
def test_what_contradicts_a_prediction_is_refused(words, told, tmp_path) -> None:
    (tmp_path / "script.py").write_text("")
    done = command(*words, "--", str(tmp_path / "script.py"))
    assert done.exit_code == 2 and told in " ".join(done.output.split()), done.output
