"""The indexer by torch: scores, exact top-k and loss against their formulas in float64, on ragged cases."""

import math
from dataclasses import replace

import pytest
import torch

import fa4
from fa4.indexer import loss, products, run
from fa4.indexer.selection import select
from fa4.oracle import indexer as oracle
from fa4.oracle.indexer import E4M3, Case

CASES = [
    Case("padded"),
    Case("causal", queries=(7, 7), keys=(7, 7), causal=True),
    Case("causal_fewer_keys", queries=(9, 9), keys=(4, 4), causal=True),
    Case("bf16_packed", queries=(3, 0, 11, 1), keys=(8, 5, 17, 0), dtype=torch.bfloat16, form="packed"),
    Case("packed_causal_used", queries=(6, 4), keys=(9, 13), used=(7, 0), form="packed", causal=True),
    Case("padded_used", queries=(4, 4, 4), keys=(8, 8, 8), used=(8, 0, 3), causal=True),
    Case("e4m3_scales", queries=(5, 5), keys=(12, 12), dtype=E4M3, scales=True, heads=6, head_dim=32),
    Case("e4m3_packed", queries=(5, 2), keys=(12, 3), dtype=E4M3, scales=True, form="packed", causal=True),
    Case("pages", queries=(3, 3), keys=(14, 5), form="pages", page_size=4, causal=True, dtype=torch.float16),
    Case("packed_pages", queries=(3, 6), keys=(14, 5), form="pages", packed_pages=True, dtype=E4M3, scales=True),
    Case("single_rows", queries=(1, 1), keys=(6, 9), form="pages", page_size=1),
    Case("double", dtype=torch.float64, queries=(4, 4), keys=(6, 6)),
    Case("no_keys", queries=(2, 2), keys=(0, 0), causal=True),
]
named = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(params=[False, True], ids=["large_tiles", "small_tiles"])
def tiles(request, monkeypatch):
    """Tiles and chunks that hold all of a case, and ones of a few rows and keys."""
    if request.param:
        monkeypatch.setattr(products, "TILE_ROWS", 3)
        monkeypatch.setattr(products, "TILE_PRODUCTS", 48)
        monkeypatch.setattr(run, "CHUNK_BYTES", 100)
        monkeypatch.setattr(loss, "GATHERED", 150)


DRAWS = 6  # problems whose references' largest error counts


def error(result, expected):
    """The largest error in units of the largest number."""
    assert torch.equal(result.isinf(), expected.isinf())
    result, expected = (x.double().masked_fill(expected.isinf(), 0.0) for x in (result, expected))
    return ((result - expected).abs().max() / expected.abs().max()).nan_to_num(0.0) if result.numel() else 0.0


@named
def test_scores(case, tiles, seed):
    problem = oracle.make(case, seed)
    result = fa4.indexer_scores(problem.q, problem.k, problem.weights, **problem.options)
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    assert result.dtype == dtype and result.shape == (*problem.q.shape[:-2], problem.columns)
    draws = [oracle.make(case, seed + i) for i in range(DRAWS)]
    allowed = 2 * max(error(oracle.scores(x, dtype), oracle.scores(x)) for x in draws)
    assert error(problem.flat(result), oracle.scores(problem)) <= allowed, f"{case}, seed {seed}"


@named
@pytest.mark.parametrize("topk", [0, 1, 4, 30])
def test_topk_of_exact_scores(case, topk, tiles, seed):
    """With sums of small integers every device and order of sums has the same scores, many of them equal."""
    problem = oracle.make(replace(case, integers=True, scales=False), seed)
    result, values = fa4.indexer_topk(
        problem.q, problem.k, problem.weights, topk, return_scores=True, **problem.options
    )
    assert result.dtype == torch.int32 and result.shape == (*problem.q.shape[:-2], topk) == values.shape
    scores = oracle.scores(problem)
    flat, flat_values = problem.flat(result), problem.flat(values)
    for t, (_, count) in enumerate(problem.rows):
        expected = oracle.topk(scores[t], count, topk)
        assert flat[t].tolist() == expected, f"row {t}, seed {seed}"
        assert flat_values[t].tolist() == [scores[t, i].item() if i >= 0 else -math.inf for i in expected]


@named
def test_topk_of_random_scores(case, seed):
    """The chosen keys are those of the scores that `indexer_scores` returns."""
    problem = oracle.make(case, seed)
    scores = problem.flat(fa4.indexer_scores(problem.q, problem.k, problem.weights, **problem.options))
    result = problem.flat(fa4.indexer_topk(problem.q, problem.k, problem.weights, 4, **problem.options))
    for t, (_, count) in enumerate(problem.rows):
        assert result[t].tolist() == oracle.topk(scores[t], count, 4), f"row {t}, seed {seed}"


SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 3.4e38]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selection_of_special_values(dtype, seed):
    """-0.0 ties with 0.0, NaN of either sign comes first, a visible -inf is chosen before nothing."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(SPECIAL, dtype=dtype)
    scores = values[torch.randint(len(values), (40, 23), generator=generator)]
    counts = torch.randint(0, 24, (40,), generator=generator).int()
    for topk in (1, 5, 23, 25):
        result = torch.empty(40, topk, dtype=torch.int32)
        select(scores, counts, result)
        for t in range(40):
            assert result[t].tolist() == oracle.topk(scores[t], int(counts[t]), topk), f"row {t}, seed {seed}"


def test_strided_tensors(seed):
    """Rows and heads with other strides than those of a contiguous tensor."""
    problem = oracle.make(Case("strided", queries=(5, 5), keys=(9, 9), causal=True), seed)
    q = problem.q.transpose(1, 2).contiguous().transpose(1, 2)
    k = torch.cat((problem.k, problem.k + torch.nan), -1)[..., : problem.k.shape[-1]]
    weights = problem.weights.transpose(1, 2).contiguous().transpose(1, 2)
    result = fa4.indexer_scores(q, k, weights, **problem.options)
    assert torch.equal(result, fa4.indexer_scores(problem.q, problem.k, problem.weights, **problem.options))


def test_scales_of_one_element(seed):
    problem = oracle.make(Case("one", dtype=E4M3), seed)
    q_descale, k_descale = torch.tensor([0.25]), torch.tensor(4.0)
    result = fa4.indexer_scores(problem.q, problem.k, problem.weights, q_descale=q_descale, k_descale=k_descale)
    assert torch.equal(result, fa4.indexer_scores(problem.q, problem.k, problem.weights))


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=lambda case: case.name)
def test_gradients_of_scores(case, tiles, seed):
    problem = oracle.make(replace(case, dtype=torch.float64), seed)
    k = problem.k.nan_to_num(0.0)
    leaves = [x.double().requires_grad_() for x in (problem.q, k, problem.weights)]

    def visible_scores(*tensors):
        scores = fa4.indexer_scores(*tensors, **problem.options)
        return scores.masked_fill(scores.isinf(), 0.0)

    assert torch.autograd.gradcheck(visible_scores, leaves), f"seed {seed}"


def attention(problem, seed, dtype=torch.float64, heads=4, heads_kv=2, dim=8):
    """Attention beside a problem: q, k as the caller passes them, k of each sequence, lse (rows, heads), scale."""
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(*problem.q.shape[:-2], heads, dim, generator=generator, dtype=torch.float64).to(dtype)
    k = torch.randn(*problem.k.shape[:-1], heads_kv, dim, generator=generator, dtype=torch.float64).to(dtype)
    flat_k = k if "cu_seqlens_k" in problem.options else k.flatten(0, 1)
    keys, flat_q, lse = [flat_k[x] for x in problem.positions], problem.flat(q), []
    for t, (sequence, count) in enumerate(problem.rows):
        own = keys[sequence][:count].repeat_interleave(heads // heads_kv, dim=1).double()
        lse.append(torch.einsum("hd,shd->hs", flat_q[t].double(), own).mul(dim**-0.5).logsumexp(-1))
    return q, k, keys, torch.stack(lse).to(dtype), dim**-0.5


def lse_of_caller(problem, lse):
    return lse.T.contiguous() if "cu_seqlens_q" in problem.options else lse.unflatten(0, problem.q.shape[:2]).mT


LOSS_CASES = [CASES[0], CASES[1], CASES[2], CASES[3], CASES[4], CASES[12]]


@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("selects", [False, True], ids=["all_keys", "indices"])
def test_loss_and_gradients(case, selects, tiles, seed):
    """float64: the loss and its gradients are those of autograd through the formula."""
    problem = oracle.make(replace(case, dtype=torch.float64), seed)
    attn_q, attn_k, keys, lse, scale = attention(problem, seed)
    leaves = [x.double().requires_grad_() for x in (problem.q, problem.k, problem.weights)]
    indices = None
    if selects:
        indices = fa4.indexer_topk(problem.q, problem.k, problem.weights, 3, **problem.options)
    arguments = *leaves, attn_q, attn_k, lse_of_caller(problem, lse)
    losses = fa4.indexer_loss(*arguments, indices=indices, reduction="none", **problem.options)
    flat_k = leaves[1] if case.form == "packed" else leaves[1].flatten(0, 1)
    q, k, weights = leaves
    leaf_problem = replace(problem, q=q, k=k, weights=weights, keys=[flat_k[x] for x in problem.positions])
    flat_indices = None if indices is None else problem.flat(indices)
    expected = oracle.loss(leaf_problem, problem.flat(attn_q), keys, lse, scale, flat_indices)
    torch.testing.assert_close(losses.flatten(), expected, rtol=1e-10, atol=1e-12)
    seen = sum(count > 0 for _, count in problem.rows)
    for reduction, value in (("sum", expected.sum()), ("mean", expected.sum() / max(seen, 1))):
        reduced = fa4.indexer_loss(*arguments, indices=indices, reduction=reduction, **problem.options)
        torch.testing.assert_close(reduced, value, rtol=1e-10, atol=1e-12)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 2))
    if not seen:
        return
    grads = torch.autograd.grad(losses.flatten(), leaves, upstream)
    exact = torch.autograd.grad(expected, leaves, upstream)
    for name, x, y in zip(("q", "k", "weights"), grads, exact):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}, {seed}")


def test_gradcheck_of_the_loss(seed):
    problem = oracle.make(Case("check", dtype=torch.float64, queries=(4, 4), keys=(6, 6), causal=True), seed)
    attn_q, attn_k, _, lse, _ = attention(problem, seed)
    leaves = [x.double().requires_grad_() for x in (problem.q, problem.k, problem.weights)]

    def of(*tensors):
        return fa4.indexer_loss(*tensors, attn_q, attn_k, lse_of_caller(problem, lse), **problem.options)

    assert torch.autograd.gradcheck(of, leaves), f"seed {seed}"


def test_a_loss_of_sparse_attention_does_not_depend_on_a_common_shift_of_lse(seed):
    """p is normalised over the chosen keys: a lse over all keys and one over these give the same loss for one head."""
    problem = oracle.make(Case("shift", dtype=torch.float64), seed)
    attn_q, attn_k, _, lse, _ = attention(problem, seed, heads=2, heads_kv=1)
    indices = fa4.indexer_topk(problem.q, problem.k, problem.weights, 4, **problem.options)
    first, other = (
        fa4.indexer_loss(
            problem.q, problem.k, problem.weights, attn_q, attn_k, lse_of_caller(problem, x), indices=indices
        )
        for x in (lse, lse + 3.0)
    )
    torch.testing.assert_close(first, other, rtol=1e-12, atol=1e-12)


BF16 = Case("bf16", dtype=torch.bfloat16, queries=(20, 20), keys=(40, 40), causal=True)


def by_formula(seed, dtype):
    """The losses of a bfloat16 problem and the gradients of their mean, from operations in `dtype`."""
    problem = oracle.make(BF16, seed)
    attn_q, _, keys, lse, scale = attention(problem, seed, dtype=torch.float32)
    q, k, weights = (x.to(dtype).requires_grad_() for x in (problem.q, problem.k, problem.weights))
    flat_k = k.flatten(0, 1)
    wide = replace(problem, q=q, k=k, weights=weights, keys=[flat_k[x] for x in problem.positions])
    value = oracle.loss(wide, problem.flat(attn_q).to(dtype), [x.to(dtype) for x in keys], lse.to(dtype), scale)
    return value.detach(), *torch.autograd.grad(value.mean(), (q, k, weights))


def test_a_bf16_loss_is_as_exact_as_float32_arithmetic(seed):
    """Gradients of bfloat16 tensors are those of the same numbers in float32, rounded."""
    problem = oracle.make(BF16, seed)
    attn_q, attn_k, _, lse, _ = attention(problem, seed, dtype=torch.float32)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.requires_grad_() for x in (problem.q.to(dtype), problem.k.to(dtype), problem.weights.clone())]
        arguments = *leaves, attn_q, attn_k, lse_of_caller(problem, lse)
        losses = fa4.indexer_loss(*arguments, reduction="none", **problem.options)
        results.append((losses.flatten().detach(), *torch.autograd.grad(losses.mean(), leaves)))
    narrow, wide = results
    assert [x.dtype for x in narrow] == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    exact = [by_formula(seed + i, torch.float64) for i in range(DRAWS)]
    rounded = [by_formula(seed + i, torch.float32) for i in range(DRAWS)]
    for i, name in enumerate(("loss", "q", "k", "weights")):
        assert torch.equal(narrow[i], wide[i].to(narrow[i].dtype)), f"{name}, seed {seed}"
        allowed = 2 * max(error(x[i], y[i]) for x, y in zip(rounded, exact))
        assert error(wide[i], exact[0][i]) <= allowed, f"{name}, seed {seed}"
