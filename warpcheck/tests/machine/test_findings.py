"""Findings as records: every kind has a section in the docs, and an example that shows it and whose repair ends it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from warpcheck.emulated import Emulated
from warpcheck.errors import EmulationError
from warpcheck.findings import FINAL, KINDS, Finding, Findings, Severity
from warpcheck.machine import Checks, EmulationOptions, Machine, load_core
from warpcheck_cases.handwritten import data_and_map, entry, launch, pointers

DOCS = Path(__file__).parents[3] / "docs"


def sections(page: str) -> dict[str, str]:
    return dict(re.findall(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.M | re.S))


MEANINGS, SECTIONS = sections("findings.md"), sections("finding-examples.md")
EARLY = "griddepcontrol.launch_dependents; st.global.b32 [%a0], 1;"


def options_of(section: str) -> dict[str, str]:
    words = re.search(r"<!-- (.*?) -->", section)
    return {name: value for name, _, value in (word.partition("=") for word in (words[1].split() if words else ()))}


def example(section: str, sign: str) -> str:
    """The lines of the example that are common, and those with the sign."""
    lines = re.search(r"```diff\n(.*?)```", section, re.S)[1].splitlines()
    return "\n".join(line[1:] for line in lines if line[0] in (" ", sign))


def run(section: str, sign: str, *, on_finding: str = "collect", off=(), seed: int = 0, schedule: str = "round_robin"):
    """Findings of the example of a section, with its mistake ("-") or its repair ("+")."""
    asked = options_of(section)
    checks = Checks(
        letter="letter" in asked, leftovers="leftovers" in asked, order=asked.get("order", "practice"), off=off
    )
    target = asked.get("target", "sm_100a")
    resident = int(asked["resident"]) if "resident" in asked else None
    options = EmulationOptions(
        seed=seed, schedule=schedule, checks=checks, on_finding=on_finding, resident=resident,
        max_instructions=int(asked.get("max_instructions", 10**6)),
    )  # fmt: skip
    if "outputs" in asked:
        gpu = Emulated(target, checks=checks, on_finding=on_finding, seed=seed, schedule=schedule)
        arrays = [np.zeros(128, np.uint32) for _ in range(2)]
        gpu.launch(entry(example(section, sign), 2, target), grid=1, block=32, smem_bytes=64, args=arrays, outputs=[0])
        return gpu.findings
    machine = Machine(target, options)
    arrays = data_and_map() if "map" in asked else [np.zeros(128, np.uint32) for _ in range(2)]
    bodies = [EARLY] * ("programmatic" in asked) + [example(section, sign)]
    for number, body in enumerate(bodies):
        report = machine.launch(
            entry(body, 2, target), "test",
            **{name: (int(asked.get(name, default)), 1, 1) for name, default in (("grid", 1), ("cluster", 1))},
            block=(int(asked.get("block", 32)), 1, 1), smem_bytes=int(asked.get("smem", 4096)),
            **pointers(arrays), programmatic=number > 0,
        )  # fmt: skip
    return report.findings


def test_the_docs_have_every_kind_and_no_other() -> None:
    assert list(MEANINGS) == list(SECTIONS) == list(KINDS) == list(load_core().CHECKS)
    for name, section in MEANINGS.items():
        assert section.startswith(f"{KINDS[name].severity.value}, ISA {KINDS[name].isa}. "), name
        assert "\n**Repair**: " in section, name


EVERY_KIND = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unknown-instruction"])


@EVERY_KIND
def test_the_example_shows_the_kind_and_the_repair_ends_it(kind: str) -> None:
    found = run(SECTIONS[kind], "-")
    assert kind in {finding.kind for finding in found}, f"{kind}: {found}"
    assert {finding.kind for finding in found} <= {kind, "uninitialized", "race", "deadlock"}, str(found)
    first = next(finding for finding in found if finding.kind == kind)
    assert first.severity is KINDS[kind].severity and first.chip and first.kernel == "test"
    assert first.location is None or first.location.ptx_line > 0
    assert not run(SECTIONS[kind], "+"), kind


@EVERY_KIND
def test_every_kind_is_raised_unless_it_is_off(kind: str) -> None:
    with pytest.raises(EmulationError) as caught:
        run(SECTIONS[kind], "-", on_finding="raise")
    assert isinstance(caught.value, KINDS[caught.value.finding.kind].error)
    if kind in FINAL:
        with pytest.raises(ValueError, match=f"off has '{kind}', which cannot be switched off"):
            Checks(off={kind})
    else:
        left = {finding.kind for finding in run(SECTIONS[kind], "-", off=kind)}
        assert kind not in left, left


def test_an_instruction_that_is_not_modelled_raises_whatever_is_asked() -> None:
    section = SECTIONS["unknown-instruction"]
    with pytest.raises(EmulationError, match=r"add\.sideways"):
        run(section, "-")
    assert not run(section, "+")


OWN_AND_OTHER = "shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; xor.b32 %r5, %r4, 128; st.shared.b32 [%r4], %r0; "
ONE_RACE = f"{OWN_AND_OTHER} bar.sync 0; ld.shared.b32 %r6, [%r5]; st.shared.b32 [%r4], %r6;"
TWO_RACES = f"""{OWN_AND_OTHER} bar.sync 0; ld.shared.b32 %r6, [%r5];
    add.u32 %r6, %r6, 1; st.shared.b32 [%r4], %r6; bar.sync 0; ld.shared.b32 %r7, [%r5];
    st.shared.b32 [%r4], 0; mul.wide.u32 %d0, %r0, 4; add.s64 %d1, %a0, %d0; st.global.b32 [%d1], %r7;"""


def collect(body: str, *arrays: np.ndarray, **options) -> Findings:
    return launch(body, arrays or [np.zeros(128, np.uint32)], on_finding="collect", **options).findings


def test_a_run_goes_on_behind_what_it_found_with_the_values_it_has() -> None:
    out = np.zeros(64, np.uint32)
    found = collect(TWO_RACES, out, block=64)
    # In the order of this seed one warp reads and writes before the other one reads, each time.
    np.testing.assert_array_equal(out, [*range(1, 33), *[0] * 32])
    assert [finding.kind for finding in found] == ["race", "race"]
    assert all(finding.count == 64 for finding in found), found
    assert all({f.location.warp, f.others[0][1].warp} == {0, 1} for f in found)
    assert found[0].repair.startswith("between the two warps an mbarrier")


GOES_ON = {
    "out-of-bounds": "ld.global.b32 %r3, [%a0+4096]; ",
    "misaligned": "ld.shared.b32 %r3, [%r2+2]; ",
    "uninitialized": "ld.shared.b32 %r3, [%r2]; setp.eq.u32 %p1, %r3, 0; @%p1 nanosleep.u32 5; ",
    "barrier-misuse": "mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0; ",
    "tmem-misuse": "mov.b32 %r3, 64; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 64; ",
}


@pytest.mark.parametrize("kind", GOES_ON)
def test_what_cannot_be_done_is_left_out(kind: str) -> None:
    out = np.zeros(128, np.uint32)
    found = collect(GOES_ON[kind] + "setp.eq.u32 %p0, %r0, 0; @%p0 st.global.b32 [%a0], 42;", out)
    assert [finding.kind for finding in found] == [kind] and out[0] == 42


def test_a_wait_at_no_barrier_ends() -> None:
    assert "barrier-misuse" in {
        f.kind for f in collect("W: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra W;")
    }


WRITERS = """setp.ne.u32 %p0, %r0, 0; add.u32 %r3, %r1, VALUE; setp.eq.u32 %p1, %r1, 2; selp.b32 %r3, %r3, 7, %p1;
    @!%p0 st.global.b32 [%a0], %r3;"""


@pytest.mark.parametrize("value, kind", [(5, "equal-writes"), (6, "race")])
def test_writes_of_equal_bytes_are_redundant_until_one_differs(value: int, kind: str) -> None:
    """CTA 2 writes 7 as the others do, or 8; it comes last, after pairs that were equal."""
    (found,) = collect(WRITERS.replace("VALUE", str(value)), grid=3)
    assert (found.kind, found.count) == (kind, 2)
    assert found.severity is (Severity.REDUNDANT if kind == "equal-writes" else Severity.ERROR)


def finding(**changes) -> Finding:
    (found,) = collect(ONE_RACE, block=64)
    return Finding(**{**vars(found), **changes})


def test_the_same_finding_of_several_runs_is_one() -> None:
    merged = Findings.merged([finding(seed=1), finding(seed=2, count=5), finding(seed=3, kernel="other")])
    assert [(f.seed, f.count) for f in merged] == [(1, 69), (3, 64)]
    equal, other = finding(kind="equal-writes", severity=Severity.REDUNDANT), finding(seed=9)
    assert [(f.kind, f.seed) for f in Findings.merged([equal, other])] == [("race", 9)]
    assert merged.of("error") == merged and not merged.of(Severity.LETTER, "leftover")


def test_findings_as_json_and_sarif() -> None:
    found = finding()
    (told,) = json.loads(Findings([found]).to_json())
    assert told["kind"] == "race" and told["severity"] == "error" and told["count"] == 64
    assert {told["place"]["warp"], told["others"][0]["place"]["warp"]} == {0, 1}
    here = Path(__file__)
    place = found.location.__class__(**{**vars(found.location), "file": str(here), "line": 12})
    sarif = json.loads(Findings([finding(location=place)]).to_sarif(root=here.parents[1]))
    assert sarif["version"] == "2.1.0"
    (run_,) = sarif["runs"]
    assert [rule["id"] for rule in run_["tool"]["driver"]["rules"]] == ["race"]
    (result,) = run_["results"]
    where = result["locations"][0]["physicalLocation"]
    assert where == {"artifactLocation": {"uri": "machine/test_findings.py"}, "region": {"startLine": 12}}
    assert result["level"] == "error" and result["relatedLocations"] and result["properties"]["seed"] == 0


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="off has 'rice', expected some of "):
        Checks(off={"rice"})
