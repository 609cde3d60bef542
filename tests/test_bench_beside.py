"""Tables of bench.beside; the run itself needs a GPU."""

import pytest
from click.testing import CliRunner

from bench import beside


def test_share_is_of_the_sms_that_are_left():
    def row(provider, held, ms):
        return dict(label="bwd", provider=provider, held=held, sms=132, median_ms=ms)

    rows = [row("a", 0, 10.0), row("a", 66, 20.0), row("b", 0, 10.0), row("b", 66, 40.0)]
    assert [beside.share(rows[i], rows[i + 1]) for i in (0, 2)] == pytest.approx([1.0, 0.5])
    assert list(beside.table([*rows, dict(label="bwd", provider="c", skipped="has none")])) == [
        "| case | provider | ms | 66 SMs held |",
        "|---|---|--:|--:|",
        "| bwd | a | 10.00 | 1.00 |",
        "| bwd | b | 10.00 | 0.50 |",
    ]


def test_it_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(beside.torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(beside.main, [])
    assert result.exit_code == 2 and "needs a GPU" in result.output


def test_the_page_is_that_of_the_rows():
    if beside.rows_by_file("*_beside.jsonl"):
        assert beside.PAGE.read_text() == beside.text()
