"""`bench.accuracy` on few keys: rows, and the page of them."""

import itertools
import json

from click.testing import CliRunner

from bench import accuracy


def test_rows_and_page(tmp_path):
    rows, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    arguments = ["--lengths", "96", "--device", "cpu", "--output", str(rows), "--page", str(page)]
    result = CliRunner().invoke(accuracy.main, arguments)
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    every = set(itertools.product(accuracy.KINDS, accuracy.RECIPES))
    assert {(row["kind"], row["provider"]) for row in found} == every
    for row in found:
        is_wide = row["provider"] == "bfloat16"
        recipe = accuracy.RECIPES[row["provider"]]
        # Half a step of e4m3; of e2m1, also the weights of 15 keys beside one that has nearly all, which become 0.
        of_p = (0.4 if recipe.recipe else 2**-4) if recipe.multiplied else 0
        assert 0 < row["out"]["error"] < (0.01 if is_wide else 0.5) and row["out"]["error_on_rounded"] < 0.02 + of_p
        of_all = ("out",) if recipe.recipe and recipe.multiplied else ("out", "dq", "dk", "dv")
        assert all(row[of]["cosine"] > (0.999 if is_wide else 0.9) for of in of_all)
    assert "| long-tailed | 96 |" in page.read_text()
    again = tmp_path / "again.md"
    assert CliRunner().invoke(accuracy.main, ["--rows", str(rows), "--page", str(again)]).exit_code == 0
    assert again.read_text() == page.read_text()
