"""Pictures of rows: `bench.plot`."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import plot
from bench.suites import BenchCase, square
from tests.test_bench import TINY, invoke

ROOT = Path(__file__).parents[1]
COMMITTED = sorted((ROOT / "bench" / "results").glob("*.jsonl"))


def rows_of(cases, providers, **facts):
    """Timed rows as `bench.run` writes them; a provider's time is its number in the list, in ms."""
    common = dict(suite="smoke", time="2026-01-01T00:00:00+00:00", machine={"device": "a chip"}) | facts
    return [
        {**common, "provider": name, "label": case.label, "median_ms": float(i), "tflops": case.flops / i / 1e9}
        | dataclasses.asdict(case)
        for case in cases
        for i, name in enumerate(providers, start=1)
    ]


def plotted(monkeypatch, path, rows, *arguments):
    """The figure that `bench.plot` makes of rows."""
    import matplotlib.pyplot as plt

    figures = []
    monkeypatch.setattr(plt.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    invoke(plot.main, path, *arguments)
    return figures[0], [axis for axis in figures[0].axes if axis.get_visible()]


def test_plot_gives_a_provider_one_color_in_all_panels(tmp_path, monkeypatch):
    """Also where another one, that is drawn before it, has no row of a panel; the legend names all."""
    cases = [square(way, length, 64, False) for way in ("bwd", "fwd") for length in (1024, 2048)]
    rows = [
        row
        for row in rows_of(cases, ["fa4", "only forwards", "sdpa"])
        if row["direction"] == "fwd" or row["provider"] != "only forwards"
    ]
    figure, (forward, backward) = plotted(monkeypatch, tmp_path / "rows.jsonl", rows)
    assert forward.get_title().startswith("forward") and backward.get_title().startswith("backward")
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["fa4", "only forwards", "sdpa"]
    colors = {tuple(line.get_ydata()): line.get_color() for axis in (forward, backward) for line in axis.lines}
    for name in names:
        mine = [row for row in rows if row["provider"] == name]
        ways = [tuple(row["tflops"] for row in mine if row["direction"] == way) for way in ("fwd", "bwd")]
        assert {colors[rates] for rates in ways if rates} == {f"C{names.index(name)}"}


def test_plot_gives_head_configurations_and_masks_panels_of_their_own(tmp_path, monkeypatch):
    lengths = (2048, 4096)
    cases = [
        square(way, length, 128, causal, heads_kv=heads_kv)
        for way in ("bwd", "fwd")
        for heads_kv in (16, 4)
        for causal in (False, True)
        for length in lengths
    ]
    _, axes = plotted(monkeypatch, tmp_path / "rows.jsonl", rows_of(cases, ["fa4"]))
    kinds = ["full, 16/4 heads", "causal, 16/4 heads", "full, 16 heads", "causal, 16 heads"]
    expected = [f"{way}, head_dim 128\n{kind}" for way in ("forward", "backward") for kind in kinds]
    assert [axis.get_title() for axis in axes] == expected


def test_plot_draws_decode_as_bars_of_bytes(tmp_path, monkeypatch):
    cases = [BenchCase("fwd", batch, 1, 1024, 32, 8, 128, 128, True) for batch in (1, 16)]
    _, (axis,) = plotted(monkeypatch, tmp_path / "rows.jsonl", rows_of(cases, ["fa4", "fa2"]))
    assert axis.get_ylabel() == "GB/s" and axis.get_xlabel() == "batch"
    heights = [bar.get_height() for bar in axis.patches]
    assert heights == pytest.approx([case.nbytes / ms / 1e6 for ms in (1, 2) for case in cases])


def test_plot_refuses_what_is_not_one_run(tmp_path):
    rows = [row for device in ("one", "two") for row in rows_of(TINY, ["fa4"], machine={"device": device})]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "2 machines" in invoke(plot.main, tmp_path / "rows.jsonl", code=1)
    assert "matches 'd512'" in invoke(plot.main, tmp_path / "rows.jsonl", "--filter", "d512", code=1)
    assert "no regular expression" in invoke(plot.main, tmp_path / "rows.jsonl", "--filter", "[", code=2)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_plot_draws_a_committed_file_or_says_why_not(path, tmp_path):
    result = CliRunner().invoke(plot.main, [str(path), "--output", str(tmp_path / "rows.png")])
    if result.exit_code == 0:
        assert (tmp_path / "rows.png").stat().st_size > 10_000
    else:
        assert not isinstance(result.exception, Exception), result.exception
        assert re.fullmatch(
            r"Error: .* (is not a result file|has rows of bench.tune|has no timed|has 3 machines).*\n", result.output
        )


def test_plot_of_the_readme_is_what_its_command_draws(tmp_path):
    """The committed picture names the rows that were drawn; the command draws the same ones."""
    from PIL import Image

    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"python -m bench\.plot (.*) -->", readme)
    file, *arguments = shlex.split(command)
    picture = arguments[arguments.index("--output") + 1]
    assert f"]({picture})" in readme
    arguments[arguments.index("--output") + 1] = str(tmp_path / "rows.png")
    invoke(plot.main, ROOT / file, *arguments)
    drawn, committed = (Image.open(path).text for path in (tmp_path / "rows.png", ROOT / picture))
    assert [drawn[key] for key in ("Source", "Description", "Comment")] == [
        committed[key] for key in ("Source", "Description", "Comment")
    ]
