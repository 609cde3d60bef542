"""docs/ptx-coverage.md says which instructions of PTX run: it is what the emulator does with each of their forms."""

import re
from pathlib import Path

import pytest
from warpcheck.machine.lowering.lower import HANDLERS
from warpcheck.machine.ptx import parse
from warpcheck_cases import coverage
from warpcheck_cases.opcodes import CASES

PAGE = (Path(__file__).parents[3] / "docs" / "ptx-coverage.md").read_text()
ROOTS = {instruction.name.split(".")[0] for instruction in coverage.instructions()}


def test_the_page_is_what_the_emulator_does():
    assert coverage.page() in PAGE, "PYTHONPATH=warpcheck/tests python -m warpcheck_cases.coverage prints the table"


def test_the_table_has_every_chapter_and_all_that_the_emulator_knows():
    chapters = {instruction.section.split(".")[2] for instruction in coverage.instructions()}
    assert chapters == {str(chapter) for chapter in range(1, 20)}
    assert set(HANDLERS) <= ROOTS
    used = {i.opcode.split(".")[0] for case in CASES for k in parse(case.ptx).kernels.values() for i in k.instructions}
    assert used <= ROOTS


def test_forms_are_expanded_and_written():
    assert list(coverage.expanded("a.[x|y] R,[|Z]")) == ["a.x R,", "a.x R,Z", "a.y R,", "a.y R,Z"]
    assert coverage.statement("ld.global.v2.b32 R2,(D)") == "ld.global.v2.b32 {%r0, %r1},[%d2];"
    assert coverage.statement("elect.sync _|P,R") == "elect.sync _|%p0,%r1;"


@pytest.mark.parametrize(
    "form, why",
    {"add.s32 R,R,R": "", "add.s33 R,R,R": "unknown instruction", "nothing R": "unknown instruction"}.items(),
)
def test_what_is_no_instruction_is_refused(form, why):
    assert coverage.why_refused(form).startswith(why) and bool(coverage.why_refused(form)) == bool(why)


def test_what_is_refused_is_refused_for_itself():
    """Not because the sample is no PTX: the reason names the instruction, a modifier of it, or what it would need."""
    for instruction in coverage.instructions():
        for form, why in instruction.refused.items():
            assert re.match(r"unknown (instruction|operand form)", why), (form, why)
