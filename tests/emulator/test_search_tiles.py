"""The search over tiles of examples/emulator reads the verdicts of `warpcheck verify`."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/emulator/search_tiles.py"


@pytest.mark.rotates(2)
def test_a_search_prints_every_row_and_keeps_the_fastest(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--keys", "256", "--head-dim", "64", "--columns", "consumers"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    start, *rows, best = capsys.readouterr().out.splitlines()
    assert start.startswith("the table's row: clean, predicted") and len(rows) == 3
    times = [float(line.split()[-2]) for line in [start, *rows] if " clean, predicted " in line]
    assert len(times) > 1 and float(best.split()[-2]) == min(times), [start, *rows, best]
