"""The page of recall against its rows, and the edits that put faults into packages."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from examples.findings.edited_package import Edit, Removal
from tests.emulator.recall.corpus import FAULTS, PROBLEMS
from tests.emulator.recall.page import PAGE, ROWS, found, tables
from tests.emulator.recall.run import installed, read, run_apart

MISSED = PAGE.read_text().partition("## What is missed")[2].partition("\n## ")[0]


def test_the_page_has_the_tables_of_its_rows() -> None:
    assert tables(read(ROWS)) in PAGE.read_text()


def test_every_fault_and_every_problem_has_one_row() -> None:
    keys = [(row["problem"], row["fault"]) for row in read(ROWS)]
    expected = [(fault.problem.name, name) for name, fault in FAULTS.items()]
    assert sorted(keys, key=str) == sorted([*expected, *((name, None) for name in PROBLEMS)], key=str)
    assert not [row for row in read(ROWS) if row["failure"]]


def test_packages_as_they_are_give_right_results() -> None:
    assert not [row["problem"] for row in read(ROWS) if row["fault"] is None and row["wrong"]]


def test_the_page_explains_what_is_missed() -> None:
    missed = [row["fault"] for row in read(ROWS) if row["fault"] and not found(row)]
    assert missed and [name for name in missed if f"**{name}**" not in MISSED] == []
    assert MISSED.count("\n* **") == len(missed)


def test_the_corpus_covers_what_it_should() -> None:
    distributions = [fault.problem.package.distribution for fault in FAULTS.values()]
    assert distributions.count("nvidia-cudnn-frontend") >= 12
    assert {"#2755", "#2756", "#2761", "#981"} <= {fault.source for fault in FAULTS.values()}
    assert len({fault.what + fault.problem.name for fault in FAULTS.values()}) >= len(FAULTS) - 1  # dV and dK are two


@pytest.mark.parametrize("name", FAULTS)
def test_edits_are_well_formed(name) -> None:
    for edit in FAULTS[name].edits:
        assert edit.file.endswith(".py")
        if isinstance(edit, Removal):
            firsts = [lines if isinstance(lines, int) else lines[0] for lines in edit.lines]
            lasts = [lines if isinstance(lines, int) else lines[1] for lines in edit.lines]
            assert edit.word and firsts == sorted(firsts)
            assert all(first <= last for first, last in zip(firsts, lasts))
            assert all(last < first for last, first in zip(lasts, firsts[1:]))
        else:
            assert isinstance(edit, Edit) and edit.old != edit.new and edit.old.strip() and edit.count > 0
            assert edit.apply(edit.old * edit.count, "1.0") == edit.new * edit.count


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", FAULTS)
def test_what_the_rows_say(name) -> None:
    """In the orders in which the fault was found, or in one if it was not."""
    fault = FAULTS[name]
    if not installed(fault.problem):
        pytest.skip(f"{fault.problem.package.distribution} {fault.problem.package.version} is not installed")
    rows = {(row["problem"], row["fault"]): row for row in read(ROWS)}
    known = {error["key"] for error in rows[fault.problem.name, None]["errors"]}
    expected = rows[fault.problem.name, name]
    row = run_apart(fault.problem, fault, expected["orders"] if found(expected) else 1, known, 1400)
    assert not row["failure"] and found(row) == found(expected), row
