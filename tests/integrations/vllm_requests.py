"""Requests on a paged cache, given to fa4's backend as vLLM does it, and what is right."""

import math
from types import SimpleNamespace

import torch

HEADS, HEADS_KV, HEAD_DIM, PAGE = 4, 2, 16, 16
SCALE = 0.3  # not the usual one for HEAD_DIM
CPU = torch.device("cpu")


def formula(q, k, v, window=None, softcap=0.0, slopes=None, sink=None, causal=True):
    """(queries, heads, head_dim) in float64 of one sequence, whose last keys are the queries' own."""
    k, v = (x.double().repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    distance = torch.arange(len(k)) - (torch.arange(len(q)) + len(k) - len(q))[:, None]
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if slopes is None else scores + torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
    reach = window or math.inf
    seen = (distance <= 0) & (distance > -reach) if causal else distance.abs() < reach
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(HEADS, len(q), 1)], 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., : len(k)], v)


def builder(backend, config=None, spec=None):
    return backend.get_builder_cls()(spec, ["layer"], config, CPU)


def common_of(new, lengths, table, slots, causal=True, **more):
    """What vLLM tells of a batch: new tokens and lengths of each sequence."""
    starts = torch.tensor([0, *new]).cumsum(0).int()
    return SimpleNamespace(
        num_actual_tokens=int(starts[-1]), num_reqs=len(new), query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table_tensor=table, slot_mapping=slots,
        max_query_len=max(new), max_seq_len=table.shape[1] * PAGE if table.ndim == 2 else 64, causal=causal,
        seq_lens_cpu_upper_bound=torch.tensor(lengths), **more,
    )  # fmt: skip


LAYERS = {
    "plain": ({}, {}),
    "window": (dict(sliding_window=5), dict(window=5)),
    "softcap": (dict(logits_soft_cap=2.0), dict(softcap=2.0)),
    "alibi": (dict(alibi_slopes=[0.5, 0.25, 0.1, 0.05]), dict(slopes=[0.5, 0.25, 0.1, 0.05])),
    "sink": (dict(sinks=torch.linspace(-1, 1, HEADS)), dict(sink=torch.linspace(-1, 1, HEADS))),
}


def whole(page, dtype=torch.float32):
    """A cache of vLLM before 0.33: keys and values are two halves of it."""
    return torch.full((2, 8, page, HEADS_KV, HEAD_DIM), math.nan).to(dtype)


def joined(page, dtype=torch.float32, rows_first=False):
    """A cache of vLLM 0.33, one layer of two: a row has its keys, then its values. rows_first: in memory rows come
    before heads."""
    shape = (8, 2, page, HEADS_KV, 2 * HEAD_DIM) if rows_first else (8, 2, HEADS_KV, page, 2 * HEAD_DIM)
    cache = torch.full(shape, 255 if dtype is torch.uint8 else math.nan, dtype=dtype)[:, 1]  # (a byte of 255 is NaN)
    return cache.transpose(1, 2) if rows_first else cache


class Requests:
    """Two requests on a paged cache, each step with other numbers of new tokens, pages in no order, and padding."""

    def __init__(self, backend, seed, cache, page=PAGE, scales=(1.0, 1.0), config=None, **options):
        self.draw = torch.Generator().manual_seed(seed)
        self.cache, self.page, self.done = cache, page, [0, 0]
        heads = (HEADS, HEADS_KV, HEADS_KV)
        self.rows = [[torch.randn(4 * page, h, HEAD_DIM, generator=self.draw) for h in heads] for _ in range(2)]
        self.table = torch.randperm(8, generator=self.draw).view(2, 4).int()
        self.layer = SimpleNamespace(_k_scale=torch.tensor(scales[0]), _v_scale=torch.tensor(scales[1]))
        self.attention = backend.get_impl_cls()(HEADS, HEAD_DIM, SCALE, HEADS_KV, **options)
        self.builder = builder(backend, config)

    def common(self, new, causal=True):
        before, self.done = self.done, [a + b for a, b in zip(self.done, new)]
        slots = [
            int(self.table[b, p // self.page]) * self.page + p % self.page
            for b in range(2)
            for p in range(before[b], self.done[b])
        ]
        common = common_of(new, self.done, self.table, torch.tensor([*slots, -1, -1]), causal)
        common.max_seq_len = 4 * self.page
        return before, common

    def inputs(self, before):
        parts = [torch.cat([r[i][a:b] for r, a, b in zip(self.rows, before, self.done)]) for i in range(3)]
        return [torch.cat([x, x.new_full((2, *x.shape[1:]), 7.0)]) for x in parts]

    def step(self, new, causal=True, prefix=0, **meaning):
        """Error of a step, by vLLM's order of calls."""
        before, common = self.common(new, causal)
        q, k, v = self.inputs(before)
        metadata = self.builder.build(prefix, common)
        self.attention.do_kv_cache_update(self.layer, k, v, self.cache, metadata.slot_mapping)
        output = torch.full_like(q, 5.0)
        got = self.attention.forward(self.layer, q, k, v, self.cache, metadata, output)
        assert got is output and (output[sum(new) :] == 5.0).all()
        expected = [
            formula(r[0][a:b], r[1][:b], r[2][:b], causal=causal, **meaning)
            for r, a, b in zip(self.rows, before, self.done)
        ]
        return (output[: sum(new)] - torch.cat(expected)).abs().max()
