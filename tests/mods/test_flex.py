"""score_mod, mask_mod and block masks on the torch backend, against torch's flex_attention in float64."""

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import fa4
from fa4 import fallback, masks
from fa4.mods import blocks
from fa4.mods.blocks import lists_of
from fa4.mods.tensors import add_where, evaluation
from fa4.mods.trace import trace_mask, trace_score

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
    lists = lists_of(block_mask, both_sides=True)
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


ON_A_GRID = torch.cat(
    (torch.linspace(-3, 3, 37), torch.tensor([0, 0.5, 1.5, 2.5, -0.5, -1.5, 1e-9, -1e-9, 40, -40, 1e4]))
).double()
COMPOSED = {
    name: getattr(torch, name)
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erfc", "expm1", "log10", "round", "sinh", "tan",
    )
} | {
    "round to a decimal": lambda x: torch.round(x, decimals=1),
    "round to tens": lambda x: torch.round(x * 7, decimals=-1),
    "fmod": lambda x: torch.fmod(x, 1.3),
    "fmod of a negative": lambda x: torch.fmod(x, -0.7),
    "remainder": lambda x: torch.remainder(x, 1.3),
    "remainder of a negative": lambda x: torch.remainder(x, -0.7),
    "both of fmod": lambda x: torch.fmod(x, x * x * 0.1 + 0.3),
    "hypot": lambda x: torch.hypot(x, x * 0.5 + 1.0),
    "hypot of zeros": lambda x: torch.hypot(x, torch.zeros((), dtype=x.dtype)),
    "copysign": lambda x: torch.copysign(x * x, x - 0.25),
    "copysign of a number": lambda x: torch.copysign(x, -2.0),
    "copysign of -0": lambda x: torch.copysign(x, torch.tensor(-0.0, dtype=x.dtype)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSED)
def test_operators_that_are_compositions(name):
    """Values and derivatives to the last digits, where results are small too; erfc has an absolute error alone."""
    function = COMPOSED[name]
    traced = trace_score(lambda score, b, h, q_idx, kv_idx: function(score))
    x = ON_A_GRID.clone().requires_grad_()
    expected = function(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    zero, one = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.float64)
    inputs = {"score": ON_A_GRID, "b": zero, "h": zero, "q_idx": zero, "kv_idx": zero, "grad": one}
    done = evaluation(traced.graph, traced.tensors, traced.numbers, inputs, torch.float64)
    for node, exact in ((traced.graph.result, expected.detach()), (traced.graph.dscore, slope)):
        got = torch.broadcast_to(done.value(node), exact.shape)
        # Whole periods are subtracted at once, and so is what is rounded off them.
        period = 1e-12 if name.startswith(("fmod", "remainder", "both")) else 1e-15
        torch.testing.assert_close(got, exact, rtol=1e-13, atol=period, equal_nan=True)


def test_integers_are_divided_towards_zero_as_by_torch():
    numbers = torch.arange(-9, 10)
    for divisor in (3, -4, 1, -1, 8):

        def mask_mod(b, h, q_idx, kv_idx, divisor=divisor):
            whole = torch.div(q_idx - kv_idx, divisor, rounding_mode="trunc")
            return whole * 100 + torch.fmod(q_idx - kv_idx, divisor) == kv_idx

        traced = trace_mask(mask_mod)
        expected = mask_mod(0, 0, numbers[:, None], numbers)
        zero = torch.zeros((), dtype=torch.int64)
        inputs = {"b": zero, "h": zero, "q_idx": numbers[:, None], "kv_idx": numbers}
        done = evaluation(traced.graph, traced.tensors, traced.numbers, inputs, torch.float64)
        assert torch.equal(done.value(traced.graph.result), expected), divisor


TABLE = [1.0, 5.0, 2.0, -1.0, 4.0, 0.3]


def _table_that_changes(score, b, h, q_idx, kv_idx):
    """An element of a table is what it is when it is read."""
    table = torch.zeros(90)
    table[2] = 7.0
    before = table[kv_idx]
    table[2] = 9.0
    return score * table[kv_idx] + before


def _summed_up(score, b, h, q_idx, kv_idx):
    """Numbers that become what is computed."""
    total, row = torch.zeros((), dtype=score.dtype), torch.ones(3, dtype=score.dtype)
    total += score
    row *= score
    total.mul_(total)
    return total + (row * torch.arange(3)).sum()


# Functions that torch takes, and what they are without a change in place or a table, for gradients.
MADE_OR_CHANGED = {
    "tanh_": (lambda s, b, h, i, j: s.tanh_().mul_(20), lambda s, b, h, i, j: s.tanh() * 20),
    "exp_": (lambda s, b, h, i, j: s.exp_().add_(1), lambda s, b, h, i, j: s.exp() + 1),
    "mul_ by itself": (lambda s, b, h, i, j: s.mul_(s), lambda s, b, h, i, j: s * s),
    "sigmoid_": (lambda s, b, h, i, j: s.sigmoid_().pow_(3), lambda s, b, h, i, j: s.sigmoid() ** 3),
    "detached": (lambda s, b, h, i, j: s.detach() * s.mul_(2), lambda s, b, h, i, j: (s * 2).detach() * s * 2),
    "inplace": (
        lambda s, b, h, i, j: torch.nn.functional.leaky_relu(s.mul_(2), inplace=True),
        lambda s, b, h, i, j: torch.nn.functional.leaky_relu(s * 2),
    ),
    "summed up": (_summed_up, lambda s, b, h, i, j: s * s + 3 * s),
    "heaviside": (
        lambda s, b, h, i, j: s * torch.heaviside(s, torch.ones((), dtype=s.dtype)),
        lambda s, b, h, i, j: torch.where(s < 0, 0.0, s),
    ),
    "linspace": (lambda s, b, h, i, j: s + torch.linspace(0, 44.5, 90)[j], lambda s, b, h, i, j: s + 0.5 * j),
    "range times two": (lambda s, b, h, i, j: s + (torch.arange(90) * 2)[j], lambda s, b, h, i, j: s + 2 * j),
    "from the end": (lambda s, b, h, i, j: s + torch.arange(90)[j - 90], lambda s, b, h, i, j: s + j),
    "slice": (lambda s, b, h, i, j: s + torch.arange(100)[10:][j], lambda s, b, h, i, j: s + j + 10),
    "one number": (lambda s, b, h, i, j: s * torch.full((4, 90), 3.0)[h, j], lambda s, b, h, i, j: s * 3),
    "two axes": (lambda s, b, h, i, j: s + torch.arange(360).view(4, 90)[h, j], lambda s, b, h, i, j: s + 90 * h + j),
    "in part": (lambda s, b, h, i, j: s + torch.arange(360).view(4, 90)[h][j], lambda s, b, h, i, j: s + 90 * h + j),
    "squares": (
        lambda s, b, h, i, j: s * (torch.arange(90, dtype=torch.float64) ** 2)[j] * 0.01,
        lambda s, b, h, i, j: s * j**2 * 0.01,
    ),
    "table": (
        lambda s, b, h, i, j: s * torch.tensor(TABLE, dtype=torch.float64)[j % 6],
        lambda s, b, h, i, j: s * torch.stack([torch.where(j % 6 == n, x, 0.0) for n, x in enumerate(TABLE)]).sum(0),
    ),
    "bools": (
        lambda s, b, h, i, j: torch.where((torch.arange(90) % 3 == 0)[j], s, s * 2),
        lambda s, b, h, i, j: torch.where(j % 3 == 0, s, s * 2),
    ),
    "table that changes": (
        _table_that_changes,
        lambda s, b, h, i, j: s * torch.where(j == 2, 9.0, 0.0) + torch.where(j == 2, 7.0, 0.0),
    ),
    "whole": (lambda s, b, h, i, j: s * torch.arange(6).sum(), lambda s, b, h, i, j: s * 15),
}


@pytest.mark.parametrize("name", MADE_OR_CHANGED)
def test_what_is_changed_in_place_or_made_of_numbers(name, seed):
    leaves, dout = problem(seed)
    written, plain = MADE_OR_CHANGED[name]
    results = []
    for attend, score_mod in (
        (lambda *x: fa4.flex_attention(*x, enable_gqa=True, return_lse=True), written),
        (torchs_answer, plain),
    ):
        out, lse = attend(*leaves, score_mod)
        results.append((out, lse, *gradients(out, lse, leaves, dout)))
    assert_same(*results, f"{name}, seed {seed}")


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
