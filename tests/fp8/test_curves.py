"""`bench.curves` on a few steps: rows, and the page of them."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from bench import curves, curves_page
from fa4.cli import demo


@pytest.fixture
def tiny(monkeypatch):
    model = demo.ModelConfig(layers=1, heads_q=2, heads_kv=1, head_dim=32)
    training = demo.TrainConfig(steps=3, batch=2, seqlen=40, evaluate_every=2)
    monkeypatch.setitem(curves.SIZES, "small", curves.Size(model, training))


def invoke(command, *arguments):
    result = CliRunner().invoke(command, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def test_rows_and_page(tiny, tmp_path):
    rows, page = tmp_path / "x_curves-small.jsonl", tmp_path / "page.md"
    invoke(curves.main, "--seeds", 2, "--device", "cpu", "--output", rows)
    invoke(curves_page.main, "--rows", tmp_path, "--page", page)
    found = {(row["provider"], row["seed"]): row for row in map(json.loads, rows.read_text().splitlines())}
    assert found.keys() == {(name, seed) for name in curves.ATTENTION for seed in (0, 1)}
    for (name, seed), row in found.items():
        assert row["steps_done"] == [0, 2, 3] and len(row["training_losses"]) == 2
        base = found["bfloat16", seed]["held_out_losses"]
        assert all(abs(x - y) < 0.1 for x, y in zip(row["held_out_losses"], base)), "another model or text"
        assert (row["held_out_losses"] != base) == (name != "bfloat16"), "the attention is the same"
    text = page.read_text()
    assert all(f"| {name} | " in text for name in curves.ATTENTION) and rows.name in text
    assert rows.with_suffix(".png").stat().st_size > 10_000


def test_a_row_is_the_training_of_its_seed(tiny):
    size = curves.SIZES["small"]
    device = curves.device_named("cpu")
    twice = [curves.trained("fp8", size, 1, device) for _ in range(2)]
    assert twice[0] == twice[1] != curves.trained("fp8", size, 0, device)
    more = size._replace(training=replace(size.training, evaluate_every=0))
    assert curves.trained("fp8", more, 1, device)["held_out_losses"] == twice[0]["held_out_losses"][::2]


def test_the_page_compares_equal_seeds(tmp_path):
    """Numbers that a reader can check; the seed that mxfp8 lacks is left out."""
    losses = {("bfloat16", 0): 2.0, ("bfloat16", 1): 3.0, ("fp8", 0): 2.5, ("fp8", 1): 3.25, ("fp8", 2): 9.0}
    file = tmp_path / "x_curves-small.jsonl"
    with file.open("w") as rows:
        for (name, seed), loss in (losses | {("bfloat16", 2): 9.0, ("mxfp8", 0): 2.0, ("mxfp8", 1): 3.0}).items():
            row = {"machine": {}, "settings": {}, "provider": name, "label": f"seed {seed}", "seed": seed}
            rows.write(json.dumps({**row, "held_out_losses": [5.0, loss]}) + "\n")
    text = curves_page.table(curves_page.runs_of(file), curves_page.held_out)
    assert "| bfloat16 | 2.5000 (2.0000 to 3.0000) | - | spread: 0.7071 |" in text
    assert "| fp8 | 2.8750 (2.5000 to 3.2500) | +0.3750 ± 0.1250 (+0.2500 to +0.5000) | +0.53 |" in text
    assert "| mxfp8 | 2.5000 (2.0000 to 3.0000) | +0.0000 ± 0.0000 (+0.0000 to +0.0000) | +0.00 |" in text
