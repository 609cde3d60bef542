"""flash-attn's functions by its names and order: called as its users call them, by position."""

import inspect

import pytest
import torch

import fa4
from fa4.cases import Case, make
from fa4.compat import flash_attn

COMMON = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# Of flash-attn 2.8: what stands before the common arguments, and behind return_attn_probs.
SIGNATURES = {
    "flash_attn_func": (("q", "k", "v"), ()),
    "flash_attn_kvpacked_func": (("q", "kv"), ()),
    "flash_attn_qkvpacked_func": (("qkv",), ()),
    "flash_attn_varlen_func": (("q", "k", "v", *LENGTHS), ("block_table",)),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *LENGTHS), ()),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), ()),
}
DEFAULTS = (0.0, None, False, (-1, -1), 0.0, None, False, False)
DENSE = Case("dense", batch=2, seqlen_q=20, seqlen_k=30, heads_q=4, heads_kv=4, head_dim=16, dtype=torch.float64)
VARLEN = Case("varlen", lengths=((20, 30), (7, 7)), heads_q=4, heads_kv=4, head_dim=16, dtype=torch.float64)


@pytest.mark.parametrize("name", SIGNATURES)
def test_order_and_defaults_are_flash_attns(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    before, behind = SIGNATURES[name]
    assert tuple(parameters) == (*before, *COMMON, "return_attn_probs", *behind)
    defaults = [p.default for p in parameters.values() if p.default is not inspect.Parameter.empty]
    assert tuple(defaults) == DEFAULTS + (None,) * len(behind)


def test_dense_functions_agree_with_fa4s(seed):
    q, k, v = make(DENSE, seed).inputs[:3]
    given = (0.0, 0.3, True, (5, -1), 7.0, None, True, True)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, *given)
    ours = fa4.flash_attn_func(
        q, k, v, softmax_scale=0.3, causal=True, window_size=(5, None), softcap=7.0, deterministic=True, return_lse=True
    )
    assert torch.equal(out, ours[0]) and torch.equal(lse, ours[1]) and probabilities is None
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), *given[:-1]), out)
    qkv = torch.stack((k, k, v), 2).requires_grad_()
    out = flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, None, True)
    assert torch.equal(out, fa4.flash_attn_func(k, k, v, causal=True))
    assert torch.autograd.grad(out.sum(), qkv)[0].shape == qkv.shape


def test_varlen_functions_agree_with_fa4s(seed):
    problem = make(VARLEN, seed)
    i = problem.inputs
    lengths = i.cu_seqlens_q, i.cu_seqlens_k, i.max_seqlen_q, i.max_seqlen_k
    out, lse, _ = flash_attn.flash_attn_varlen_func(*i[:3], *lengths, 0.0, None, True, return_attn_probs=True)
    ours = problem.call(causal=True)
    assert torch.equal(out, ours[0]) and torch.equal(lse, ours[1])
    kv = torch.stack((i.k, i.v), 1)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(i.q, kv, *lengths, 0.0, None, True), out)
    qkv = torch.stack((i.k, i.k, i.v), 1)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, i.cu_seqlens_k, 30)
    assert torch.equal(out, flash_attn.flash_attn_varlen_func(*qkv.unbind(1), *lengths[1:2] * 2, 30, 30))


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi_is_flash_attns(per_sequence, softcap, seed):
    """-slope |i + seqlen_k - seqlen_q - j|, behind the softcap, dense and in packed sequences of other shifts."""
    problem = make(VARLEN, seed)
    i = problem.inputs
    slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed))
    slopes = slopes if per_sequence else slopes[0]
    lengths = i.cu_seqlens_q, i.cu_seqlens_k, i.max_seqlen_q, i.max_seqlen_k
    packed = flash_attn.flash_attn_varlen_func(*i[:3], *lengths, softcap=softcap, alibi_slopes=slopes)
    for b, (rows, keys) in enumerate(VARLEN.lengths):
        q, k, v = (x[s : s + n] for x, s, n in zip(i[:3], (0, 0, 0) if b == 0 else (20, 30, 30), (rows, keys, keys)))
        of_b = slopes[b] if per_sequence else slopes
        dense = flash_attn.flash_attn_func(q[None], k[None], v[None], softcap=softcap, alibi_slopes=of_b)
        scores = torch.einsum("ihd,jhd->hij", q, k) * 16**-0.5
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
        scores = scores - of_b.double()[:, None, None] * distance.abs()
        exact = torch.einsum("hij,jhd->ihd", scores.softmax(2), v)
        start = 20 * b
        assert (packed[start : start + rows] - exact).abs().max() < 1e-6
        assert (dense[0] - exact).abs().max() < 1e-6


def test_dropout_draws_from_the_generator():
    q, k, v = torch.randn(3, 1, 9, 2, 8).unbind()
    torch.manual_seed(1)
    out = flash_attn.flash_attn_func(q, k, v, 0.3)
    torch.manual_seed(1)
    assert torch.equal(out, fa4.flash_attn_func(q, k, v, dropout_p=0.3))


x, bounds = torch.zeros(1, 4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
REFUSALS = {
    "dropout": (ValueError, "dropout_p is 1.5", lambda: flash_attn.flash_attn_func(x, x, x, 1.5)),
    "block_table": (
        NotImplementedError,
        "block_table is given",
        lambda: flash_attn.flash_attn_varlen_func(x[0], x[0], x[0], bounds, bounds, 4, 4, block_table=bounds),
    ),
    "slopes": (
        ValueError,
        r"alibi_slopes is \(3,\), expected a tensor of shape \(2,\) or \(1, 2\)",
        lambda: flash_attn.flash_attn_func(x, x, x, alibi_slopes=torch.ones(3)),
    ),
    "kv": (
        ValueError,
        r"kv is \(1, 4, 2, 8\), expected a tensor of shape \(batch, seqlen, 2, heads, head_dim\)",
        lambda: flash_attn.flash_attn_kvpacked_func(x, x),
    ),
}


@pytest.mark.parametrize("error, message, call", REFUSALS.values(), ids=REFUSALS)
def test_what_fa4_lacks_is_refused_by_name(error, message, call):
    with pytest.raises(error, match=message):
        call()
