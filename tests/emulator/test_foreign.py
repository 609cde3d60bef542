"""The runner of foreign examples, on scripts that live here; and the list of examples against the docs."""

import re
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES
from warpcheck.tools.examples import COMMIT, EXAMPLES, EXAMPLES_ROOT, Example

from tests.emulator.foreign import Outcome, run_example, table_row

ROOT = Path(__file__).parents[2]
HEAD = """\
import torch
from cutlass.cute.runtime import from_dlpack
from warpcheck_cases.planted import COLUMNS, ROWS, run_pipeline, run_sum
torch.manual_seed(1)
"""
PIPELINE = """
source, result = torch.randn(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
run_pipeline(from_dlpack(source), from_dlpack(result), {mistake!r})
"""
SUM = """
source, result = torch.randn(8, COLUMNS), torch.zeros(1)
run_sum(from_dlpack(source), from_dlpack(result))
print("difference:", (result - source.double().sum()).abs().item())
assert (result - source.double().sum()).abs().item() < 1e-3
"""
COMPARED = "torch.testing.assert_close(result, 2 * source)"


def run(folder: Path, script: str, seed: int, printed_error: str = "") -> Outcome:
    example = Example("own", "sm_100a", "own.py", (), printed_error)
    path = folder / EXAMPLES_ROOT / example.script
    path.parent.mkdir(parents=True)
    path.write_text(HEAD + script)
    outcome = run_example(example, folder, seeds=2, inputs=seed % 1000)
    print(table_row(outcome, example))
    return outcome


def test_a_right_kernel_leaves_the_same_bits_in_every_order(tmp_path, seed: int) -> None:
    outcome = run(tmp_path, PIPELINE.format(mistake="none") + COMPARED, seed)
    assert not outcome.failure and not outcome.repeated
    assert outcome.runs == 2 * len(SCHEDULES) and outcome.comparisons == 1 and outcome.error == 0.0
    assert outcome.instructions > 0


def test_sums_by_atomics_are_checked_again_in_every_order(tmp_path) -> None:
    """Of fixed numbers, whose sum tells these orders apart; of drawn ones it does not in 1 of some 500 cases."""
    outcome = run(tmp_path, SUM, 0, printed_error=r"difference: (\S+)")
    assert not outcome.failure and outcome.repeated
    assert outcome.runs == 2 * len(SCHEDULES) and outcome.absolute and outcome.error < 1e-3


def test_a_mistake_fails_with_its_text(tmp_path, seed: int) -> None:
    outcome = run(tmp_path, PIPELINE.format(mistake="early release") + COMPARED, seed)
    assert outcome.failure.startswith("DataRace: ") and "planted.py" in outcome.failure


def test_an_example_that_compares_nothing_fails(tmp_path, seed: int) -> None:
    outcome = run(tmp_path, PIPELINE.format(mistake="none"), seed)
    assert "compared nothing" in outcome.failure


def test_a_wrong_result_fails(tmp_path, seed: int) -> None:
    outcome = run(tmp_path, PIPELINE.format(mistake="none") + COMPARED.replace("2 *", "3 *"), seed)
    assert outcome.failure.startswith("AssertionError")


def test_the_docs_show_every_example() -> None:
    documentation = (ROOT / "docs" / "results" / "cutlass-examples.md").read_text()
    rows = re.findall(r"^\| (.+?) \| sm_\w+ \| .* \| right[^|]*\|$", documentation, re.M)
    assert rows == [example.name for example in EXAMPLES]
    assert COMMIT in documentation
