"""The lightning indexer on a GPU: scores against float64, exact top-k against sorting, on the GPU's own kernels."""

from dataclasses import replace

import pytest
import torch

import fa4
from fa4.indexer import run
from fa4.oracle import indexer as oracle
from fa4.oracle import reference
from fa4.oracle.indexer import E4M3, Case
from fa4.runtime.device import chip_of
from tests.gpu.offered import needs_gpu

pytestmark = needs_gpu

CASES = (
    Case("e4m3", (300, 300), (1000, 1000), 64, 128, E4M3, causal=True, scales=True),
    Case("bf16_packed", (70, 0, 300, 1), (2000, 9, 1300, 0), 16, 64, torch.bfloat16, "packed", causal=True),
    Case("fp16", (40, 40), (30, 30), 40, 128, torch.float16, causal=True),
    Case("used", (90, 90, 90), (1400, 1400, 1400), 32, 64, E4M3, used=(1400, 0, 17), causal=True, scales=True),
    Case("pages", (30, 30), (3000, 129), 64, 128, E4M3, "pages", True, 64, True),
    Case("small_pages", (3, 90, 1), (300, 129, 5), 128, 64, E4M3, "pages", True, 16, packed_pages=True),
)
named = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def is_hopper():
    return chip_of(torch.device("cuda")).number == 90


def error(result, expected):
    assert torch.equal(result.isinf(), expected.isinf())
    result, expected = (x.double().masked_fill(expected.isinf(), 0.0) for x in (result, expected))
    return float((result - expected).abs().max() / expected.abs().max())


@named
def test_scores(case, seed):
    problem = oracle.make(case, seed, "cuda")
    bits = {"sum_bits": 14} if case.dtype == E4M3 else {}
    result = problem.flat(fa4.indexer_scores(problem.q, problem.k, problem.weights, **problem.options))
    exact = oracle.scores(problem)

    def products(a, b):
        return reference.tensor_core_products(a, b, case.dtype, **bits)

    allowed = 2 * error(oracle.scores(problem, torch.float32, products), exact)
    assert error(result, exact) <= allowed, f"{case}, seed {seed}"
    if is_hopper():
        again = fa4.indexer_scores(problem.q, problem.k, problem.weights, backend="sm90", **problem.options)
        assert torch.equal(problem.flat(again), result)


@named
@pytest.mark.parametrize("integers", [False, True], ids=["random", "equal_scores"])
def test_topk(case, integers, seed, monkeypatch):
    """In chunks of 7 rows: the indices that sorting gives of the scores of the whole call."""
    if not (integers or is_hopper()):
        pytest.skip("torch's products of chunks are rounded in another way than those of a whole call")
    problem = oracle.make(replace(case, integers=integers, scales=case.scales and not integers), seed, "cuda")
    backend = "sm90" if is_hopper() else "auto"
    scores = fa4.indexer_scores(problem.q, problem.k, problem.weights, backend=backend, **problem.options)
    monkeypatch.setattr(run, "CHUNK_BYTES", 4 * 7 * -(-scores.shape[-1] // 4) * 4)
    call = dict(return_scores=True, backend=backend, **problem.options)
    indices, values = fa4.indexer_topk(problem.q, problem.k, problem.weights, 100, **call)
    flat, scores, values = (problem.flat(x).cpu() for x in (indices, scores, values))
    for t, (_, count) in enumerate(problem.rows):
        expected = oracle.topk(scores[t], count, 100)
        assert flat[t].tolist() == expected, f"row {t}, seed {seed}"
        assert values[t].tolist() == [scores[t, i].item() if i >= 0 else -torch.inf for i in expected]


@pytest.mark.parametrize("kind", ["normal", "zeros", "relu"])
def test_long_rows(kind, seed):
    """100000 keys a row, also where nearly all scores are equal."""
    generator = torch.Generator("cuda").manual_seed(seed)
    k = torch.randn(1, 100_000, 64, generator=generator, device="cuda")
    q = torch.randn(1, 40, 16, 64, generator=generator, device="cuda")
    weights = torch.randn(1, 40, 16, generator=generator, device="cuda")
    if kind == "zeros":
        k.zero_()
    if kind == "relu":  # few heads, so most scores are zeros of both signs
        q, weights = q[:, :, :8].clone(), weights[:, :, :8].clone()
        q[:, :, 1:] = 0
        q[:, :, 0, 1:] = 0
        k[..., 0] = torch.where(k[..., 0] > 2.3, k[..., 0], -k[..., 0].abs())
    tensors = q.bfloat16(), k.bfloat16(), weights
    scores = fa4.indexer_scores(*tensors, causal=True)[0]
    indices = fa4.indexer_topk(*tensors, 2048, causal=True)[0]
    order = (scores + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, :2048].sort(-1).values
    assert torch.equal(indices.long(), order), f"seed {seed}"
    assert torch.equal(indices, fa4.indexer_topk(*tensors, 2048, causal=True)[0])


def test_loss_repeats_and_is_that_of_a_cpu(seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, weights = (torch.randn(shape, generator=generator) for shape in ((1, 70, 8, 32), (1, 90, 32), (1, 70, 8)))
    attn_q, attn_k = torch.randn(1, 70, 4, 16, generator=generator), torch.randn(1, 90, 2, 16, generator=generator)
    _, lse = fa4.flash_attn_func(attn_q, attn_k, attn_k, causal=True, return_lse=True)
    indices = fa4.indexer_topk(q, k, weights, 20, causal=True)
    results = []
    for device in ("cpu", "cuda", "cuda"):
        leaves = [x.to(device).detach().requires_grad_() for x in (q, k, weights)]
        given = [x.to(device) for x in (attn_q, attn_k, lse)]
        loss = fa4.indexer_loss(*leaves, *given, indices=indices.to(device), causal=True)
        results.append([x.detach().cpu() for x in (loss, *torch.autograd.grad(loss, leaves))])
    on_cpu, first, second = results
    for x, y, z in zip(on_cpu, first, second):
        torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-6)
        assert torch.equal(y, z), f"seed {seed}"
