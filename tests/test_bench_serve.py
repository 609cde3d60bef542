"""`bench.serve`: attention of the peers in the server of the example."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench import serve, summary
from fa4.cli.demo import ModelConfig, Transformer

ROOT = Path(__file__).parents[1]
SIZES = dict(layers=2, heads="4,2", head_dim=32, requests=4, front=64, rest=21, new=8, page=16, rows=128)
SMALL = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]


def test_sdpa_chooses_the_tokens_of_fa4(tmp_path, seed):
    """The same text, request by request: rows to pages, rotation, padding and masks are right."""
    torch.manual_seed(seed)
    config = ModelConfig(layers=2, heads_q=4, heads_kv=2, head_dim=16)
    model = Transformer(config)
    torch.nn.init.normal_(model.embed.weight, std=0.5)
    module, texts = serve.example(), []
    for attention in (module.Fa4Attention, serve.Sdpa):
        server = module.Server(model, config, pages=40, size=8, rows=30, attention=attention)
        requests = [server.submit(bytes(range(b, b + n)), 9) for b, n in ((0, 37), (3, 1), (90, 20), (0, 35))]
        while server.running or server.waiting:
            server.step()
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1]


def test_a_row_for_each_attention(tmp_path):
    out = tmp_path / "rows.jsonl"
    names = ("--attention", "fa4", "--attention", "sdpa", "--attention", "flash-attn-4")
    result = CliRunner().invoke(serve.main, [*names, *SMALL, "--no-graphs", "--out", str(out)])
    assert result.exit_code == 0, result.output
    fa4_row, sdpa, peer = map(json.loads, out.read_text().splitlines())
    assert [row["attention"] for row in (fa4_row, sdpa, peer)] == ["fa4", "sdpa", "flash-attn-4"]
    assert fa4_row["tokens_per_s"] > 0 and fa4_row["shared"] == 3 * 64 == sdpa["shared"]
    assert sdpa["same_first_tokens"] == 1.0 and fa4_row["steps"] == sdpa["steps"]
    if importlib.util.find_spec("flash_attn") is None:
        assert "ModuleNotFoundError" in peer["error"]


def test_the_page_of_the_server_has_the_rows():
    page = (ROOT / "docs/results/serving-h200.md").read_text()
    (file,) = re.findall(r"<!-- `python -m bench.serve --show (\S+)`; a test compares -->", page)
    assert CliRunner().invoke(serve.main, ["--show", str(ROOT / file)]).output.strip() in page


@pytest.mark.parametrize("suite", ["diffusion", "vision"])
def test_the_page_of_shapes_has_the_rows(suite):
    page = (ROOT / "docs/results/vision-diffusion-h200.md").read_text()
    file = f"bench/results/2026-11-28_nvidia-h200_{suite}.jsonl"
    assert f"python -m bench.summary {file}" in page
    assert CliRunner().invoke(summary.main, [str(ROOT / file)]).output.strip() in page
