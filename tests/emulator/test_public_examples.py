"""Every error that was found in a public kernel, in a few lines: what is found in them, where, and that the repair that
they show leaves nothing to find."""

import re
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import interleavings
from warpcheck.scripts import run_script

from tests.emulator.public import page, run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "emulator"
KINDS_OF = {
    "two_register_counts.py": {"setmaxnreg-count"},
    "unpublished_barrier.py": {"barrier-init-fence"},
    "exchange_in_a_loop.py": {"race"},
    "relaxed_hand_back.py": {"relaxed-arrival"},
    "unset_rows.py": {"uninitialized"},
    "cluster_arrive_twice.py": {"barrier-misuse", "race", "barrier-init-fence"},
}


def marked(script: str) -> set[int]:
    lines = (FOLDER / script).read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if re.search("# (found|and) here", line)}


@pytest.mark.parametrize("script", KINDS_OF)
def test_what_is_found_and_its_repair(script: str, capsys) -> None:
    found = run_script([str(FOLDER / script)], "sm_100a", interleavings(0, 3))
    print(found.findings)
    assert found.exit_code == 0 and capsys.readouterr().out.startswith("right"), "the mistake does not show in values"
    assert {finding.kind for finding in found.findings} == KINDS_OF[script]
    for finding in found.findings:
        places = [finding.location, *(place for _, place in finding.others)]
        assert {place.line for place in places if place} <= marked(script)
    repaired = run_script([str(FOLDER / script), "--repaired"], "sm_100a", interleavings(0, 3))
    assert repaired.exit_code == 0 and not repaired.findings, str(repaired.findings)


def test_every_error_of_the_catalogue_has_a_script_or_is_explained() -> None:
    errors = {
        page.example_key(finding): outcome.key
        for outcome in page.load(ROOT / "docs" / "results")
        for finding in outcome.findings
        if finding["severity"] == "error"
    }
    unknown = {key: call for key, call in errors.items() if run.EXAMPLES.get(key) not in KINDS_OF}
    assert not {key: call for key, call in unknown.items() if key not in run.EXPLAINED}
    for shown in run.EXPLAINED.values():
        name, _, section = shown.partition("#")
        text = (ROOT / "docs" / "results" / (name or page.PAGE)).read_text()
        assert section in {re.sub(r"[^a-z -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in
                           text.splitlines() if line.startswith("#")}  # fmt: skip
    assert set(run.EXAMPLES.values()) <= set(KINDS_OF)
    for key, script in run.EXAMPLES.items():
        assert key.split()[0] in KINDS_OF[script]
