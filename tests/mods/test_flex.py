"""score_mod, mask_mod and block masks on the torch backend, against torch's flex_attention in float64."""

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import fa4
from fa4 import fallback, masks
from fa4.mods.frontend import blocks
from fa4.mods.frontend.blocks import block_lists
from fa4.mods.ir.tensors import add_where

from .programs import BATCH, HEADS, KEYS, MASKS, QUERIES, SCORES, normal, torchs_answer


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles and passes even here."""
    monkeypatch.setattr(fallback.tiles, "TILE_M", 24)
    monkeypatch.setattr(fallback.tiles, "TILE_N", 40)
    monkeypatch.setattr(fallback.tiles, "TILE_SCORES", 3 * 24 * 40)


def problem(seed, heads_kv=2, queries=QUERIES, keys=KEYS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    q, k, v = normal(BATCH, HEADS, queries, 16), normal(BATCH, heads_kv, keys, 16), normal(BATCH, heads_kv, keys, 24)
    return [x.requires_grad_() for x in (q, k, v)], normal(BATCH, HEADS, queries, 24)


def gradients(out, lse, leaves, dout):
    dlse = torch.where(lse.isinf(), 0.0, 0.3).to(lse.dtype)
    return torch.autograd.grad((out, lse), leaves, (dout, dlse), allow_unused=True, materialize_grads=True)


def assert_same(got, expected, context):
    for i, (a, b) in enumerate(zip(got, expected)):
        assert a.shape == b.shape, context
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite) and torch.equal(a[~finite], b[~finite]), (context, i)
        a, b = a.detach().masked_fill(~finite, 0.0), b.detach().masked_fill(~finite, 0.0)
        error, size = (a - b).abs().max(), b.abs().max().clamp(min=1.0)
        assert error <= 1e-11 * size, (context, i, float(error))


@pytest.mark.parametrize("name", SCORES)
def test_scores_and_their_gradients(name, seed):
    leaves, dout = problem(seed)
    score_mod, captured = SCORES[name].of(torch.float64)
    results = []
    for attend in (
        lambda: fa4.flex_attention(*leaves, score_mod, enable_gqa=True, return_lse=True),
        lambda: torchs_answer(*leaves, score_mod),
    ):
        out, lse = attend()
        results.append((out, lse, *gradients(out, lse, [*leaves, *captured], dout)))
    assert_same(*results, f"{name}, seed {seed}")


@pytest.mark.parametrize("name", MASKS)
def test_masks_by_blocks_and_by_element(name, seed):
    leaves, dout = problem(seed)
    mask_mod = MASKS[name]
    ours = fa4.create_block_mask(mask_mod, BATCH, HEADS, QUERIES, KEYS, BLOCK_SIZE=(32, 16), device="cpu")
    theirs = torchs.create_block_mask(mask_mod, BATCH, HEADS, QUERIES, KEYS, BLOCK_SIZE=(32, 16), device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    out, lse = torchs_answer(*leaves, mask_mod=mask_mod)
    expected = (out, lse, *gradients(out, lse, leaves, dout))
    for block_mask in (ours, theirs):
        out, lse = fa4.flex_attention(*leaves, None, block_mask, enable_gqa=True, return_lse=True)
        assert_same((out, lse, *gradients(out, lse, leaves, dout)), expected, f"{name}, seed {seed}")
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out, lse = fa4.flash_attn_func(q, k, v, mask_mod=mask_mod, return_lse=True)
    got = (out.transpose(1, 2), lse, *gradients(out.transpose(1, 2), lse, leaves, dout))
    assert_same(got, expected, f"{name} without blocks, seed {seed}")


def test_ranges_of_queries_tell_blocks_without_asking_for_every_pair(monkeypatch, seed):
    """As torch finds them pair by pair; of masks that are put together some that are seen whole or not at all may count
    as partial, and no result changes. A document mask in columns: a key is hidden from queries beyond its document."""
    ends = torch.tensor([30, 47, 48, 90])[torch.bucketize(torch.arange(KEYS), torch.tensor([30, 47, 48]), right=True)]
    forever = torch.full((BATCH, HEADS, KEYS), KEYS)
    in_documents = masks.columns(ends.expand(BATCH, HEADS, KEYS), forever)
    empty = masks.columns(forever - 40, forever - 50)
    exact = {"causal": masks.causal, "window": masks.sliding_window(17), "columns": in_documents, "nothing": empty}
    combined = {"both": masks.both(masks.causal, in_documents), "either": masks.either(masks.sliding_window(3), empty)}
    theirs = {
        name: torchs.create_block_mask(mask, 1, 1, QUERIES, KEYS, BLOCK_SIZE=16, device="cpu")
        for name, mask in (exact | combined).items()
    }
    monkeypatch.setattr(blocks, "evaluation", None)
    leaves, _ = problem(seed)
    for name, mask in (exact | combined).items():
        ours = fa4.create_block_mask(mask, 1, 1, QUERIES, KEYS, "cpu", BLOCK_SIZE=16)
        if name in exact:
            assert torch.equal(ours.full_kv_num_blocks, theirs[name].full_kv_num_blocks), name
            assert torch.equal(ours.to_dense(), theirs[name].to_dense()), name
        got, expected = (fa4.flex_attention(*leaves, None, x, enable_gqa=True) for x in (ours, theirs[name]))
        assert_same([got], [expected], f"{name}, seed {seed}")


def test_score_and_mask_together_with_blocks_for_all_heads(seed):
    leaves, dout = problem(seed)
    score_mod, captured = SCORES["relative_bias"].of(torch.float64)
    block_mask = fa4.create_block_mask(MASKS["sliding_window"], None, None, QUERIES, KEYS, BLOCK_SIZE=16, device="cpu")
    out, lse = torchs_answer(*leaves, score_mod, MASKS["sliding_window"])
    expected = (out, lse, *gradients(out, lse, [*leaves, *captured], dout))
    out, lse = fa4.flex_attention(*leaves, score_mod, block_mask, enable_gqa=True, return_lse=True)
    assert_same((out, lse, *gradients(out, lse, [*leaves, *captured], dout)), expected, f"seed {seed}")


def test_a_block_mask_may_lack_full_blocks_and_the_lists_of_keys(seed):
    leaves, dout = problem(seed)
    whole = fa4.create_block_mask(MASKS["prefix"], BATCH, None, QUERIES, KEYS, BLOCK_SIZE=16, device="cpu")
    met = whole.to_dense()
    lists = torchs._dense_to_ordered(met)
    bare = torchs.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=16, mask_mod=MASKS["prefix"], seq_lengths=(QUERIES, KEYS), compute_q_blocks=False
    )
    results = []
    for block_mask in (whole, bare):
        out, lse = fa4.flex_attention(*leaves, None, block_mask, enable_gqa=True, return_lse=True)
        results.append((out, lse, *gradients(out, lse, leaves, dout)))
    assert_same(*results, f"seed {seed}")


def test_only_blocks_of_the_lists_are_visited(monkeypatch, seed):
    """A window of 16 keys: 2 of 32 blocks a row."""
    products = []
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: products.append(a.shape[1] * b.shape[2]) or real(a, b))
    q, k, v = (torch.randn(1, 512, 1, 8) for _ in range(3))
    block_mask = fa4.create_block_mask(fa4.masks.sliding_window(15), None, None, 512, 512, "cpu", BLOCK_SIZE=16)
    fa4.flash_attn_func(q, k, v, block_mask=block_mask)
    assert sum(products) == (2 * 32 - 1) * 16 * 16


def test_blocks_with_the_longest_lists_come_first(seed):
    """Each once, on both sides; those that are as long in the order of a causal mask."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand(3, 9, 11, generator=generator) < torch.rand(3, 9, 1, generator=generator)
    block_mask = fa4.create_block_mask(
        lambda b, h, q_idx, kv_idx: seen[h, q_idx // 16, kv_idx // 16], None, 3, 9 * 16, 11 * 16, "cpu", BLOCK_SIZE=16
    )
    lists = block_lists(block_mask, both_sides=True)
    for order, lengths, sign in ((lists.query_order, seen.sum(2), -1), (lists.key_order, seen.sum(1), 1)):
        for own, of_head in zip(order[0].tolist(), lengths.tolist()):
            assert own == sorted(range(len(of_head)), key=lambda i: (-of_head[i], sign * i)), f"seed {seed}"


def test_blocks_that_are_seen_whole_are_not_masked(seed):
    """Full blocks are what the lists say: there the mask_mod is not asked."""
    leaves, _ = problem(seed)
    block_mask = fa4.create_block_mask(MASKS["causal"], None, None, QUERIES, KEYS, BLOCK_SIZE=16, device="cpu")
    block_mask.mask_mod = MASKS["nothing"]
    _, lse = fa4.flex_attention(*leaves, None, block_mask, enable_gqa=True, return_lse=True)
    assert (lse[:, :, :16] == -torch.inf).all() and lse[:, :, 16:64].isfinite().all()


def test_mods_go_with_causal_windows_sinks_and_negative_scales(seed):
    leaves, dout = problem(seed)
    q, k, v = (x.transpose(1, 2) for x in leaves)
    score_mod, captured = SCORES["temperature"].of(torch.float64)
    shift = KEYS - QUERIES

    def seen(b, h, q_idx, kv_idx):
        return (kv_idx % 3 != 1) & (kv_idx <= q_idx + shift) & (kv_idx >= q_idx + shift - 30)

    out, lse = torchs_answer(*leaves, score_mod, seen, scale=-0.2)
    expected = (out, lse, *gradients(out, lse, [*leaves, *captured], dout))
    flags = dict(softmax_scale=-0.2, causal=True, window_size=(30, None), return_lse=True)
    out, lse = fa4.flash_attn_func(
        q, k, v, score_mod=score_mod, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 3 != 1, **flags
    )
    out = out.transpose(1, 2)
    assert_same((out, lse, *gradients(out, lse, [*leaves, *captured], dout)), expected, f"seed {seed}")


def test_packed_sequences_count_from_their_own_start(seed):
    """b is the sequence; queries and keys count within it."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (13, 0, 29)
    slopes = torch.randn(3, 2, dtype=torch.float64, generator=generator).requires_grad_()
    q, k, v = (torch.randn(42, 2, 16, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3))
    cu_seqlens = torch.tensor([0, 13, 13, 42], dtype=torch.int32)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[b, h] * (q_idx - kv_idx)

    out = fa4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, score_mod=score_mod, mask_mod=fa4.masks.causal
    )
    dout = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    got = (out, *torch.autograd.grad(out, (q, k, v, slopes), dout))
    parts = []
    for b, (first, length) in enumerate(zip(cu_seqlens.tolist(), lengths)):
        if not length:
            continue
        rows = slice(first, first + length)
        one = [x[None, rows].transpose(1, 2) for x in (q, k, v)]
        of_b = slopes[b]
        parts.append(
            torchs_answer(*one, lambda score, _, h, i, j, of_b=of_b: score + of_b[h] * (i - j), fa4.masks.causal)[0]
            .transpose(1, 2)
            .squeeze(0)
        )
    expected = torch.cat(parts)
    assert_same(got, (expected, *torch.autograd.grad(expected, (q, k, v, slopes), dout)), f"seed {seed}")


def test_gradients_repeat_bit_for_bit(seed):
    leaves, dout = problem(seed, dtype=torch.float32)
    score_mod, captured = SCORES["relative_bias"].of(torch.float32)
    runs = []
    for _ in range(3):
        out = fa4.flex_attention(*leaves, score_mod, enable_gqa=True, deterministic=True)
        runs.append(torch.autograd.grad(out, [*leaves, *captured], dout))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))
    assert not torch.are_deterministic_algorithms_enabled()


def test_rows_are_their_elements(seed):
    """A product of captured rows, which torch's own flex_attention cannot differentiate, is that of wider heads."""
    leaves, dout = problem(seed, heads_kv=HEADS)
    q, k, v = leaves
    of_queries, of_keys = normal(BATCH, HEADS, QUERIES, 4).requires_grad_(), normal(2, KEYS, 4).requires_grad_()

    def score_mod(score, b, h, q_idx, kv_idx):
        row = of_queries[b, h, q_idx]
        near = (row > kv_idx - q_idx).any().to(score.dtype)
        return score + torch.dot(row, of_keys[h // 2, kv_idx]) * 0.5 + near + (row * 2).sum(-1)

    out, lse = fa4.flex_attention(*leaves, score_mod, return_lse=True)
    distance = torch.arange(KEYS) - torch.arange(QUERIES)[:, None]
    near = (of_queries[..., None, :] > distance[..., None]).any(-1)
    products = of_queries @ of_keys.repeat_interleave(2, 0).transpose(1, 2)
    scores = q @ k.transpose(2, 3) / 4 + products * 0.5 + near + (of_queries * 2).sum(-1, keepdim=True)
    expected = scores.softmax(3) @ v, scores.logsumexp(3)
    captured = of_queries, of_keys
    got, wanted = ((*pair, *gradients(*pair, [*leaves, *captured], dout)) for pair in ((out, lse), expected))
    assert_same(got, wanted, f"seed {seed}")


def test_captured_tensors_alone_may_be_trained(seed):
    leaves, dout = problem(seed)
    q, k, v = (x.detach() for x in leaves)
    score_mod, captured = SCORES["alibi"].of(torch.float64)
    got = torch.autograd.grad(fa4.flex_attention(q, k, v, score_mod, enable_gqa=True), captured, dout)
    expected = torch.autograd.grad(torchs_answer(q, k, v, score_mod)[0], captured, dout)
    assert_same(got, expected, f"seed {seed}")


def test_explain_tells_mods_and_sparsity():
    q = torch.empty(1, 512, 2, 64, dtype=torch.bfloat16, device="meta")
    explanation = fa4.explain(q, q, q, score_mod=fa4.scores.softcap(3.0))
    assert explanation.chosen == "torch" and explanation.spec.mods.score is not None
    q = torch.empty(1, 512, 2, 64)
    block_mask = fa4.create_block_mask(fa4.masks.sliding_window(15), None, None, 512, 512, "cpu", BLOCK_SIZE=16)
    alibi = fa4.scores.alibi(torch.rand(2, requires_grad=True))
    explanation = fa4.explain(q, q, q, score_mod=alibi, block_mask=block_mask, dropout_p=0.5)
    assert explanation.visited == (2 * 32 - 1) / 32**2
    assert str(explanation.spec.mods) == (
        "score_mod of 5 operators and 1 captured tensors (1 with gradients), "
        "mask_mod of 4 operators and 0 captured tensors, block_mask of 16 x 16, dropout"
    )
    assert "; 6.2% of the blocks are visited" in str(explanation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_additions_to_one_element_are_in_one_order(dtype, seed):
    """Many to each, as threads would make them in any order; indices may count from the end."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randint(-n, n, (400, 1000), generator=generator) for n in (3, 5))
    value = torch.randn(400, 1000, dtype=dtype, generator=generator)
    sums = []
    for _ in range(4):
        sums.append(torch.zeros(3, 5, dtype=dtype))
        add_where(sums[-1], [rows, columns], value)
    assert all(torch.equal(sums[0], other) for other in sums[1:]), f"seed {seed}"
    expected = torch.zeros(3, 5, dtype=torch.float64).index_put_((rows, columns), value.double(), accumulate=True)
    assert (sums[0] - expected).abs().max() <= (1e-9 if dtype == torch.float64 else 1e-2), f"seed {seed}"
    with pytest.raises(IndexError, match=r"shape \(3, 5\) is indexed by -5 to 5"):
        add_where(sums[0], [rows, torch.where(columns == 4, 5, columns)], value)
