"""The page of race checkers is that of its rows, and warpcheck's rows are those of its standing test."""

from pathlib import Path

from warpcheck_cases.pairs import pairs
from warpcheck_cases.pairs.table import OURS, SANITIZER, VALUES, found, read, reports, tables

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "bench/results/2026-11-28_nvidia-h100-80gb-hbm3_race-checkers.jsonl"
PAGE = ROOT / "docs/results/race-checkers.md"


def test_the_page_has_the_tables_of_its_rows() -> None:
    assert tables(read(ROWS)) in PAGE.read_text()


def test_every_pair_has_a_row_of_every_tool() -> None:
    rows = read(ROWS)
    assert {(row["pair"], row["tool"]) for row in rows} == {
        (pair.id, tool) for pair in pairs() for tool in (OURS, *SANITIZER, VALUES)
    }
    assert len(rows) == len({(row["pair"], row["tool"]) for row in rows})


def test_the_page_names_what_warpcheck_misses() -> None:
    missed = [row["pair"] for row in read(ROWS) if row["tool"] == OURS and not found(row)]
    text = PAGE.read_text().split("## What each tool cannot see")[1].split("* **racecheck**")[0]
    assert missed and all(f"`{pair.split('.')[1]}`" in text for pair in missed)


OUTPUT = """========= COMPUTE-SANITIZER
CASE area.first 1234
========= Error: Race reported between Write access at second+0xe0 in area.cu:9
=========     and Read access at second+0xf0 in area.cu:11 [256 hazards]
CASE area.second 1234
CASE area.third 1234
========= Program hit CUDA_ERROR_UNSUPPORTED_PTX_VERSION (error 222) due to "..." on CUDA API call
========= Barrier error detected. Missing wait.
========= ERROR SUMMARY: 2 errors
"""


def test_reports_belong_to_the_launch_whose_line_follows() -> None:
    ids = ["area.first", "area.second", "area.third"]
    assert reports(OUTPUT, ids) == {
        "area.first": [], "area.second": ["Race reported"], "area.third": ["Barrier error detected. Missing wait"],
    }  # fmt: skip
