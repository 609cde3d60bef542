"""Latent attention on absorbed queries: results and gradients against its formula in float64, and its errors."""

import itertools

import pytest
import torch

import fa4
from fa4.oracle import cases, reference
from fa4.runtime.spec import AttentionInputs, AttentionSpec, Flags

SCALE = 24**-0.5
WIDTHS = (32, 8)  # of the latent and of the rotated part


def formula(q_nope, q_rope, latent, k_rope, causal):
    """(out, lse) in the dtype of the arguments, of one sequence or of a batch."""
    logits = torch.einsum("...shc,...tc->...hst", q_nope, latent) + torch.einsum("...shc,...tc->...hst", q_rope, k_rope)
    logits = logits * SCALE
    rows, keys = logits.shape[-2:]
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        logits = logits.masked_fill(hidden, -torch.inf)
    return torch.einsum("...hst,...tc->...shc", logits.softmax(-1), latent), logits.logsumexp(-1)


def drawn(seed, batch=2, rows=5, keys=40, heads=4, widths=WIDTHS, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    shapes = [(batch, rows, heads, width) for width in widths] + [(batch, keys, width) for width in widths]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def outcomes(function, tensors, *upstream):
    """out and, with upstream gradients, those of all tensors."""
    if not upstream:
        return [function(*tensors)]
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream[0].to(out.dtype))]


def rounded(tensors, causal, *upstream):
    """`outcomes` of the same-precision reference: attention on joined columns, P from lse as in kernels."""
    is_batch = tensors[0].ndim == 4
    q_nope, q_rope, latent, k_rope = tensors if is_batch else (x[None] for x in tensors)
    v, width = latent.unsqueeze(-2), latent.shape[-1]
    q, k = torch.cat((q_nope, q_rope), -1), torch.cat((latent, k_rope), -1).unsqueeze(-2)
    inputs = AttentionInputs(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
    spec = AttentionSpec.of(inputs, Flags(SCALE, None, 0 if causal else None, 0.0, False))
    out = reference.forward(inputs, spec, precise=False)[0].view(tensors[0].shape)
    if not upstream:
        return [out]
    dq, dk, dv, _ = reference.backward(inputs, spec, upstream[0], precise=False)
    dk = dk.squeeze(-2)
    return [out, dq[..., :width], dq[..., width:], dk[..., :width] + dv.squeeze(-2), dk[..., width:]]


def assert_right(results, tensors, causal, *upstream, draws=()):
    """At most twice the largest error of the same-precision reference, on these tensors and on other draws."""

    def references(x, precise):
        if not precise:
            return rounded(x, causal, *upstream)
        return outcomes(lambda *y: formula(*y, causal)[0], [z.double() for z in x], *upstream)

    names = ("out", "dq_nope", "dq_rope", "dlatent", "dk_rope")
    cases.assert_right(cases.judge_by_draws(dict(zip(names, results)), references, tensors, draws), "latent")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients(causal, dtype, seed):
    tensors = drawn(seed, dtype=dtype)
    upstream = torch.randn_like(tensors[0])
    results = outcomes(lambda *x: fa4.mla_attention(*x, softmax_scale=SCALE, causal=causal), tensors, upstream)
    others = (drawn(seed + i, dtype=dtype) for i in range(1, cases.DRAWS))
    assert_right(results, tensors, causal, upstream, draws=others)
    lse = fa4.mla_attention(*tensors, softmax_scale=SCALE, causal=causal, return_lse=True)[1]
    torch.testing.assert_close(lse, formula(*(x.float() for x in tensors), causal)[1], atol=2e-3, rtol=1e-5)


def test_it_is_attention_before_absorption(seed):
    """Keys and values of each head, from up-projections of the latent: the same numbers by the usual function."""
    torch.manual_seed(seed)
    heads, nope, latent_dim, rope = 3, 16, WIDTHS[0], WIDTHS[1]
    up_k, up_v = (torch.randn(heads, latent_dim, nope, dtype=torch.float64) for _ in range(2))
    q_heads = torch.randn(2, 7, heads, nope, dtype=torch.float64)
    q_rope = torch.randn(2, 7, heads, rope, dtype=torch.float64)
    latent, k_rope = (torch.randn(2, 9, width, dtype=torch.float64) for width in (latent_dim, rope))
    k = torch.cat((torch.einsum("btc,hcn->bthn", latent, up_k), k_rope[:, :, None].expand(-1, -1, heads, -1)), -1)
    v = torch.einsum("btc,hcn->bthn", latent, up_v)
    expected = fa4.flash_attn_func(torch.cat((q_heads, q_rope), -1), k, v, causal=True)
    absorbed = torch.einsum("bshn,hcn->bshc", q_heads, up_k)
    out = fa4.mla_attention(absorbed, q_rope, latent, k_rope, softmax_scale=(nope + rope) ** -0.5, causal=True)
    torch.testing.assert_close(torch.einsum("bshc,hcn->bshn", out, up_v), expected)


def test_packed_sequences_are_each_alone(seed):
    lengths = ((5, 12), (0, 3), (9, 9))
    parts = [[x[0] for x in drawn(seed + i, batch=1, rows=q, keys=k)] for i, (q, k) in enumerate(lengths)]
    bounds = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in zip(*lengths)]
    packed = [torch.cat(x) for x in zip(*parts)]
    options = dict(softmax_scale=SCALE, causal=True)
    out = fa4.mla_attention(*packed, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], max_seqlen_q=9, **options)
    alone = [fa4.mla_attention(*(x[None] for x in part), **options)[0] for part in parts]
    torch.testing.assert_close(out, torch.cat(alone), atol=0.01, rtol=0.01)


def cached(seed, widths=WIDTHS, page=4):
    """Queries, pages, their table and lengths, and new rows; and the dense rows of each sequence that result."""
    q_nope, q_rope, latent, k_rope = drawn(seed, keys=2, widths=widths)
    lengths, pages = torch.tensor([13, 6], dtype=torch.int32), torch.randn(12, page, sum(widths)).bfloat16()
    table = torch.randperm(12)[:8].view(2, 4).int()
    rows = [pages[table[b].long()].flatten(0, 1)[: lengths[b]] for b in range(2)]
    rows = [torch.cat((old, torch.cat((latent[b], k_rope[b]), -1))) for b, old in enumerate(rows)]
    return (q_nope, q_rope), pages, (latent, k_rope), dict(cache_seqlens=lengths, page_table=table), rows


def assert_cached_is_right(out, queries, rows, width):
    for b, keys in enumerate(rows):
        assert_right([out[b]], [*(x[b] for x in queries), keys[:, :width], keys[:, width:]], True)


@pytest.mark.parametrize("head_axis", [False, True])
def test_pages_with_new_rows(head_axis, seed):
    queries, pages, new, where, rows = cached(seed)
    cache = pages.unsqueeze(-2) if head_axis else pages
    out, lse = fa4.mla_attention_with_kvcache(
        *queries, cache, *new, softmax_scale=SCALE, causal=True, return_lse=True, **where
    )
    assert_cached_is_right(out, queries, rows, WIDTHS[0])
    assert lse.shape == (2, 4, 5)
    page = pages[where["page_table"][0].long()].flatten(0, 1)
    assert torch.equal(page[13:15], rows[0][13:])


@pytest.mark.parametrize("chip", ["sm_80", "sm_90a", "sm_100a"])
def test_kernels_take_the_widths_of_deepseek(chip, seed):
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a compiler")
    from fa4.emulator import emulate

    queries, pages, new, where, rows = cached(seed, widths=(512, 64))
    with emulate(chip, sms=4, seed=seed):
        out = fa4.mla_attention_with_kvcache(
            *queries, pages, *new, softmax_scale=SCALE, causal=True, backend="sm80", **where
        )
    assert_cached_is_right(out, queries, rows, 512)


def test_bytes_have_one_factor(seed):
    queries, pages, _, where, _ = cached(seed)
    rounded = pages.to(torch.float8_e4m3fn)
    factor = torch.tensor(0.5)
    out = fa4.mla_attention_with_kvcache(*queries, rounded, softmax_scale=SCALE, kv_descale=factor, **where)
    keys = rounded.float() * 0.5
    for b, length in enumerate(where["cache_seqlens"]):
        part = keys[where["page_table"][b].long()].flatten(0, 1)[:length]
        exact = formula(*(x[b].float() for x in queries), part[:, : WIDTHS[0]], part[:, WIDTHS[0] :], False)[0]
        torch.testing.assert_close(out[b].float(), exact, atol=0.03, rtol=0.03)


WRONG = {
    "scale": (dict(softmax_scale=None), ValueError, "softmax_scale is None, expected a number"),
    "q_rope": (
        dict(q_rope=torch.zeros(2, 6, 4, 8)),
        ValueError,
        r"q_rope has shape \(2, 6, 4, 8\), expected \(2, 5, 4",
    ),
    "latent axes": (
        dict(latent=torch.zeros(2, 40, 1, 32)),
        ValueError,
        r"latent has shape .* \(batch, seqlen_k, latent_",
    ),
    "latent columns": (
        dict(latent=torch.zeros(2, 40, 16)),
        ValueError,
        "latent has 16 columns, expected 32 like q_nope",
    ),
    "k_rope dtype": (dict(k_rope=torch.zeros(2, 40, 8).half()), TypeError, "k_rope has dtype torch.float16, expected"),
    "k_rope type": (dict(k_rope=None), TypeError, "k_rope is a NoneType, expected a torch.Tensor"),
    "one bound": (dict(cu_seqlens_q=torch.zeros(2).int()), ValueError, "cu_seqlens_q is given without cu_seqlens_k"),
    "max_seqlen_q": (dict(max_seqlen_q=5), ValueError, "max_seqlen_q is given without cu_seqlens_q and cu_seqlens_k"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    change, error, text = WRONG[name]
    tensors = dict(zip(("q_nope", "q_rope", "latent", "k_rope"), drawn(0, dtype=torch.float32)))
    with pytest.raises(error, match=text):
        fa4.mla_attention(**(tensors | dict(softmax_scale=SCALE) | change))


ROWS = torch.zeros(12, 4, 656, dtype=torch.uint8)
_QUERIES_OF_ROWS = dict(
    q_nope=torch.zeros(3, 2, 4, 512, dtype=torch.bfloat16), q_rope=torch.zeros(3, 2, 4, 64, dtype=torch.bfloat16)
)
WRONG_CACHED = {
    "scale": (dict(softmax_scale=None), ValueError, "softmax_scale is None"),
    "columns": (
        dict(kv_cache=torch.zeros(12, 4, 32)),
        ValueError,
        r"kv_cache has shape \(12, 4, 32\), expected .* 40\)",
    ),
    "heads": (dict(kv_cache=torch.zeros(12, 4, 2, 40)), ValueError, r"kv_cache has shape \(12, 4, 2, 40\)"),
    "one new": (dict(latent=None), ValueError, "latent and k_rope are not both given"),
    "rotary": (
        dict(rotary_cos=torch.zeros(4, 4)),
        TypeError,
        "rotary_cos is no argument of mla_attention_with_kvcache",
    ),
    "q_descale": (
        dict(q_descale=torch.ones(())),
        TypeError,
        "q_descale is no argument .* q_nope and q_rope of 16 bits",
    ),
    "descale": (dict(v_descale=torch.ones(())), TypeError, "v_descale is no argument .* expected kv_descale"),
    "columns of q": (
        dict(kv_cache=ROWS),
        ValueError,
        "q_nope has 32 columns, expected 512: kv_cache has rows of 656 b",
    ),
    "dtype of q": (
        dict(kv_cache=ROWS, **dict.fromkeys(("q_nope", "q_rope"), torch.zeros(3, 2, 4, 512))),
        TypeError,
        "q_nope has dtype torch.float32, expected torch.bfloat16: kv_cache has rows of 656 bytes",
    ),
    "factors": (
        dict(kv_cache=ROWS, kv_descale=torch.ones(()), **_QUERIES_OF_ROWS),
        ValueError,
        "kv_descale is given, expected None: kv_cache has rows of 656 bytes, with factors of their own",
    ),
}


@pytest.mark.parametrize("name", WRONG_CACHED)
def test_a_wrong_argument_of_a_cached_call_is_named(name):
    change, error, text = WRONG_CACHED[name]
    (q_nope, q_rope), kv_cache, (latent, k_rope), where, _ = cached(0)
    given = dict(q_nope=q_nope, q_rope=q_rope, kv_cache=kv_cache, latent=latent, k_rope=k_rope, softmax_scale=SCALE)
    with pytest.raises(error, match=text):
        fa4.mla_attention_with_kvcache(**(given | where | change))
