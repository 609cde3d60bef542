"""Caches in tiled torch: every named case against the oracle, every dtype, and results that the batch cannot change."""

import itertools
from dataclasses import replace

import pytest
import torch

import fa4
from fa4.oracle import reference

from .named import CASES
from .problem import build, shared_front


@pytest.mark.parametrize("name", CASES)
def test_named_case(name, seed):
    built = build(CASES[name], seed)
    if built.case.shared:
        shared_front(built)
    built.assert_right(built.call(backend="torch"), f"seed {seed}")


@pytest.mark.parametrize("drawn", [630, 1233])
def test_a_head_of_zeros_has_no_nan(drawn):
    """Seeds by which one of the head's values, or keys, is exactly 0 before it is divided by a descale of 0."""
    built = build(CASES["fp8_zeros"], drawn)
    inputs = built.problem.inputs
    assert inputs.k.isfinite().all() and inputs.v.isfinite().all()
    built.assert_right(built.call(backend="torch"), f"seed {drawn}")


def test_float32(seed):
    built = build(replace(CASES["append_and_rotate_in_pages"], dtype=torch.float32), seed)
    built.assert_right(built.call(), f"seed {seed}")


def test_float64(seed):
    built = build(replace(CASES["append_and_rotate_in_pages"], dtype=torch.float64), seed)
    for got, expected in zip(built.call(), reference.forward(built.problem.inputs, built.problem.spec)):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["pages_of_16", "dense_ragged", "packed_queries"])
def test_a_sequence_alone_gives_the_same_bits(name, seed):
    """batch_invariant: whatever else is in the batch."""
    built = build(CASES[name], seed)
    a = built.arguments
    out, lse = built.call(batch_invariant=True)
    starts = built.problem.inputs.cu_seqlens_q.tolist()
    for b, (first, stop) in enumerate(itertools.pairwise(starts)):
        one = {"cache_seqlens": a["cache_seqlens"][b : b + 1]}
        if "page_table" in a:
            one["page_table"] = a["page_table"][b : b + 1]
        else:
            one |= {name: a[name][b : b + 1] for name in ("k_cache", "v_cache")}
        if "cu_seqlens_q" in a:
            one |= {"q": a["q"][first:stop], "cu_seqlens_q": torch.tensor([0, stop - first], dtype=torch.int32)}
            one["max_seqlen_q"] = max(stop - first, 1)
        else:
            one["q"] = a["q"][b : b + 1]
        alone = built.call(batch_invariant=True, **one)
        assert torch.equal(alone[0], out[first:stop]) and torch.equal(alone[1], lse[:, first:stop]), f"seed {seed}"


def test_no_rows_given_means_all(seed):
    built = build(replace(CASES["dense_ragged"], lengths=(160, 160)), seed)
    built.assert_right(built.call(cache_seqlens=None), f"seed {seed}")
    built.assert_right(built.call(cache_seqlens=160), f"seed {seed}")


def test_block_table_is_another_name(seed):
    built = build(CASES["pages_of_16"], seed)
    expected = built.call()
    got = built.call(page_table=None, block_table=built.arguments["page_table"])
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_a_tree_of_drafts(seed):
    """Speculative decoding: the last queries are drafts that branch, each seeing its own branch of the new keys."""
    parents = [-1, 0, 0, 1]
    ancestors = torch.eye(4, dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            ancestors[i] |= ancestors[parent]
    before = 37

    def tree(b, h, q_idx, kv_idx):
        return (kv_idx < before) | ancestors[q_idx, (kv_idx - before).clamp(min=0)]

    case = replace(CASES["append_at_page_borders"], lengths=(before,), new=4, queries=4, causal=False)
    built = build(case, seed)
    out, lse = built.call(mask_mod=tree)
    i = built.problem.inputs
    for row, branch in enumerate(ancestors):
        keys = torch.cat((torch.arange(before), before + branch.nonzero().flatten()))
        one, one_lse = fa4.flash_attn_func(i.q[None, row : row + 1], i.k[None, keys], i.v[None, keys], return_lse=True)
        torch.testing.assert_close(out[row], one[0, 0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[:, row], one_lse[0, :, 0], rtol=1e-5, atol=1e-5)
