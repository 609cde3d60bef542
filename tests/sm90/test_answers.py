"""What an H100 answered, kept in a file, beside what the emulator answers: `make test` needs no chip for it."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from click.testing import CliRunner

from fa4.emulator import answers
from fa4.emulator.answers import CASES, Answers

pytestmark = pytest.mark.rotates(6)

FILE = Path(__file__).parent / "answers_of_an_h100.npz"


@pytest.fixture(scope="module")
def kept() -> Answers:
    return Answers.load(FILE)


@pytest.mark.parametrize("name", CASES)
def test_an_h100_answers_as_the_emulator_does(name: str, kept: Answers) -> None:
    here = answers.emulated(CASES[name], kept.chip, kept.sms)
    if not here.has_sums_of(kept.of[name]):
        pytest.skip(f"since the H100 answered the case got other tiles: {here.tiles}")
    rows = answers.rows(name, kept.of[name].tensors, here.tensors)
    assert not [str(row) for row in rows if not row.agrees]
    if "exact" in name:
        assert rows[0].different == 0, str(rows[0])


def test_kernels_that_sum_in_another_order_are_told_apart(kept: Answers) -> None:
    """The portable ones: as right, and not the same numbers."""
    case = CASES["fwd_d128_full"]
    portable = answers.emulated(case, "sm_80", kept.sms)
    out, lse = answers.rows(case.name, kept.of[case.name].tensors, portable.tensors)
    assert out.different > 0.1 * out.elements and not out.agrees and lse.agrees


def test_a_file_is_compared_by_a_command(kept: Answers, tmp_path: Path) -> None:
    name = "fwd_d64_causal"
    result = CliRunner().invoke(answers.main, ["compare", str(FILE), "--only", name])
    assert result.exit_code == 0 and f"| {name} | out |" in result.output and kept.device in result.output
    tensors, tiles = kept.of[name]
    flawed = answers.Answer(dict(tensors, out=tensors["out"] * 1.25), tiles)
    replace(kept, of={name: flawed}).save(tmp_path / "flawed.npz")
    result = CliRunner().invoke(answers.main, ["compare", str(tmp_path / "flawed.npz")])
    assert result.exit_code == 1 and "differ, by at most" in result.output
    replace(kept, of={name: flawed._replace(tiles="others")}).save(tmp_path / "flawed.npz")
    result = CliRunner().invoke(answers.main, ["compare", str(tmp_path / "flawed.npz")])
    assert result.exit_code == 0 and "not compared: others then" in result.output


def test_a_file_of_other_tensors_is_refused(kept: Answers) -> None:
    tensors = kept.of["fwd_d64_causal"].tensors
    with pytest.raises(ValueError, match="keep it anew"):
        answers.rows("fwd_d64_causal", tensors, {"out": tensors["out"]})
