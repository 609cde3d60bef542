"""fa4 behind vLLM on a GPU: one CUDA graph serves batches of other lengths, pages and numbers of tokens.

vLLM is stubs made from its contract; the kernels, the graphs and the buffers are real.
"""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.integrations.vllm_stubs import install

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, HEADS_KV, HEAD_DIM, PAGES, WIDTH, BATCH = 8, 2, 128, 64, 12, 4
SCALE = HEAD_DIM**-0.5


def write_pages(key, value, k_cache, v_cache, slots, kv_cache_dtype, k_scale, v_scale):
    """vLLM's kernel of this name, by torch, without a copy to the host. Padding goes to page 0, which is nobody's."""
    slots, page = slots.clamp(min=0), k_cache.shape[1]
    for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        if kv_cache_dtype.startswith("fp8"):
            cache, x = cache.view(torch.float8_e4m3fn), (x.float() / scale).to(torch.float8_e4m3fn)
            cache.view(torch.uint8)[slots // page, slots % page] = x.view(torch.uint8)
        else:
            cache[slots // page, slots % page] = x


@pytest.fixture
def module(monkeypatch):
    found = install("contract", monkeypatch)
    monkeypatch.setattr(sys.modules["vllm._custom_ops"], "reshape_and_cache_flash", write_pages)
    return found


def formula(q, k, v, window, scale=(1.0, 1.0), rounds=False):
    """float64; the queries are the last rows. rounds: keys and values are those that an fp8 cache holds."""
    if rounds:
        k, v = ((x.float() / s).to(torch.float8_e4m3fn).double() * s for x, s in zip((k, v), scale))
    k, v = (x.double().repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    distance = (
        torch.arange(len(k), device=q.device) - (torch.arange(len(q), device=q.device) + len(k) - len(q))[:, None]
    )
    seen = (distance <= 0) & (distance > -(window or math.inf))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(2), v)


class Engine:
    """Buffers of an engine, as large as its largest batch, and requests whose pages they name."""

    def __init__(self, module, seed, page, tokens, longest, kind, window):
        self.module, self.page, self.tokens, self.longest, self.kind = module, page, tokens, longest, kind
        self.window, self.rounds = window, kind == "fp8"
        self.draw = torch.Generator("cuda").manual_seed(seed)
        dtype = torch.uint8 if self.rounds else torch.bfloat16
        # As vLLM lays it out: one layer of two, pages, heads, rows of keys and values.
        self.cache = torch.zeros(PAGES, 2, HEADS_KV, page, 2 * HEAD_DIM, dtype=dtype, device="cuda")[:, 1]
        self.scales = (0.02, 0.03) if self.rounds else (1.0, 1.0)
        k_scale, v_scale = (torch.tensor(x, device="cuda") for x in self.scales)
        self.layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
        self.impl = module.Attention(HEADS, HEAD_DIM, SCALE, HEADS_KV, sliding_window=window, kv_cache_dtype=kind)
        self.builder = module.MetadataBuilder(None, ["layer"], None, torch.device("cuda"))
        as_int = dict(dtype=torch.int32, device="cuda")
        self.starts, self.lengths = torch.zeros(BATCH + 1, **as_int), torch.zeros(BATCH, **as_int)
        self.table, self.slots = (
            torch.zeros(BATCH, WIDTH, **as_int),
            torch.zeros(tokens, dtype=torch.long, device="cuda"),
        )
        self.q = torch.zeros(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.k, self.v = (torch.zeros(tokens, HEADS_KV, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        self.output = torch.zeros_like(self.q)
        self.free, self.requests = list(range(1, PAGES)), {}
        self.graph = None

    def run(self):
        """What a model's layer does with a batch; the metadata is built once, when the graph is captured."""
        common = SimpleNamespace(
            num_actual_tokens=self.tokens, num_reqs=BATCH, query_start_loc=self.starts, seq_lens=self.lengths,
            block_table_tensor=self.table, slot_mapping=self.slots, max_query_len=self.longest,
            max_seq_len=WIDTH * self.page, causal=True,
        )  # fmt: skip
        metadata = self.builder.build(0, common)
        self.impl.do_kv_cache_update(self.layer, self.k, self.v, self.cache, metadata.slot_mapping)
        self.impl.forward(self.layer, self.q, self.k, self.v, self.cache, metadata, self.output)

    def step(self, new):
        """Append new[name] tokens to each request, by the graph. Largest error, relative to the largest result."""
        slots, counts, parts = [], [], []
        for name, count in new.items():
            pages, rows = self.requests.setdefault(name, ([], [torch.zeros(0, HEADS_KV, HEAD_DIM, device="cuda")] * 2))
            first = len(rows[0])
            fresh = [
                torch.randn(count, HEADS_KV, HEAD_DIM, generator=self.draw, device="cuda").bfloat16() for _ in "kv"
            ]
            rows = [torch.cat([a, b.to(a.dtype)]) for a, b in zip(rows, fresh)]
            while len(pages) * self.page < len(rows[0]):
                pages.append(self.free.pop())
            self.requests[name] = pages, rows
            slots += [pages[i // self.page] * self.page + i % self.page for i in range(first, len(rows[0]))]
            counts.append(count)
            parts.append(fresh)
        total, idle = sum(counts), BATCH - len(new)
        self.starts.copy_(torch.tensor([0, *counts, *[0] * idle]).cumsum(0))
        self.lengths.copy_(torch.tensor([len(self.requests[name][1][0]) for name in new] + [0] * idle))
        self.table.fill_(PAGES - 1)
        for row, name in zip(self.table, new):
            row[: len(self.requests[name][0])] = torch.tensor(self.requests[name][0])
        self.slots.copy_(torch.tensor(slots + [-1] * (self.tokens - total)))
        self.q.copy_(torch.randn(self.q.shape, generator=self.draw, device="cuda"))
        for buffer, x in zip((self.k, self.v), zip(*parts)):
            buffer[:total] = torch.cat(x)
        self.output.fill_(math.nan)
        if self.graph is None:
            self.run()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run()
            self.output.fill_(math.nan)
        self.graph.replay()
        expected, first = [], 0
        for name, count in new.items():
            rows = self.requests[name][1]
            expected.append(formula(self.q[first : first + count], *rows, self.window, self.scales, self.rounds))
            first += count
        expected = torch.cat(expected)
        return float((self.output[:total] - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("page", [16, 64, 128, 256])
@pytest.mark.parametrize(("kind", "window"), [("auto", None), ("fp8", None), ("auto", 40)], ids=["16", "fp8", "window"])
def test_a_graph_of_tokens(module, page, kind, window, seed):
    engine = Engine(module, seed, page, BATCH, 1, kind, window)
    for new in (dict(a=1, b=1, c=1, d=1), dict(a=1), dict(b=1, a=1, d=1), *[dict(c=1, a=1)] * 20, dict(e=1, c=1)):
        assert engine.step(new) < 0.02


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_a_graph_of_speculative_decoding(module, count, seed):
    """Uniform batches, as graphs of verification are captured, and then fewer rows for some requests."""
    engine = Engine(module, seed, 16, BATCH * count, count, "auto", None)
    full = dict.fromkeys("abcd", count)
    for new in (full, full, dict(a=count, b=1, c=count), dict(d=count), dict(b=count, d=2, a=1)):
        assert engine.step(new) < 0.02


@pytest.mark.parametrize("page", [16, 128])
def test_a_graph_of_any_batch(module, page, seed):
    """`AttentionCGSupport.ALWAYS`: captured for 64 tokens of a request at most, replayed with prompts beside tokens."""
    engine = Engine(module, seed, page, 64, 64, "auto", None)
    for new in (dict(a=64), dict(a=1, b=40, c=1), dict(b=1, c=30, a=2, d=31), dict(a=1, b=1, c=1, d=1), dict(d=60)):
        assert engine.step(new) < 0.02
