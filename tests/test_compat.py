"""flash-attn's functions by its names and order: called as its users call them, by position."""

import inspect

import pytest
import torch

import fa4
from fa4.compat import flash_attn
from fa4.oracle.cases import Case, make

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


CACHE = {
    "q": None, "k_cache": None, "v_cache": None, "k": None, "v": None, "rotary_cos": None, "rotary_sin": None,
    "cache_seqlens": None, "cache_batch_idx": None, "cache_leftpad": None, "block_table": None, "softmax_scale": None,
    "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None,
    "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip


def test_order_and_defaults_of_the_cache_are_flash_attns():
    parameters = inspect.signature(flash_attn.flash_attn_with_kvcache).parameters
    assert tuple(parameters) == tuple(CACHE)
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())
    assert all(p.default in (p.empty, CACHE[name]) for name, p in parameters.items())
    assert sum(p.default is p.empty for p in parameters.values()) == 3


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


def on_cache(seed):
    """A cache with new rows and rotation, by flash-attn's names in their order up to block_table."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, heads, 16, generator=draw) for heads in (4, 2, 2))
    caches = [torch.randn(2, 24, 2, 16, generator=draw) for _ in range(2)]
    angle = torch.rand(40, 8, generator=draw)
    lengths, pads = (torch.tensor(x, dtype=torch.int32) for x in ((5, 20), (2, 0)))
    return q, *caches, k, v, angle.cos(), angle.sin(), lengths, None, pads, None


def test_a_cache_takes_flash_attns_positions(seed):
    given = on_cache(seed)
    options = 0.3, True, (7, -1), 5.0, False, None, 2, True
    out, lse = flash_attn.flash_attn_with_kvcache(*given, *options)
    again = on_cache(seed)
    names = (*CACHE,)[5 : len(given)]
    ours = fa4.flash_attn_with_kvcache(
        *again[:5], **dict(zip(names, again[5:])), softmax_scale=0.3, causal=True, window_size=(7, None), softcap=5.0,
        rotary_interleaved=False, num_splits=2, return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, ours[0]) and torch.equal(lse, ours[1])
    assert torch.equal(given[1], again[1]) and torch.equal(given[2], again[2])
    assert not torch.equal(given[1], on_cache(seed + 1)[1])
    only = flash_attn.flash_attn_with_kvcache(*on_cache(seed), *options[:-1])
    assert torch.equal(only, out)


@pytest.mark.parametrize("lengths", ["tensor", "int", "all"])
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_alibi_on_a_cache_is_that_of_its_keys(lengths, per_sequence, paged, seed):
    """The distance counts from the last key of what a sequence uses, with new rows and without left padding."""
    q, k_cache, v_cache, k, v, _, _, own, _, pads, _ = on_cache(seed)
    slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed))
    slopes = slopes if per_sequence else slopes[0]
    own = {"tensor": own, "int": 11, "all": None}[lengths]
    new = (None, None) if own is None else (k, v)
    table = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32) if paged else None
    caches = [x.view(6, 8, 2, 16)[torch.tensor([1, 3, 5, 0, 4, 2])] if paged else x for x in (k_cache, v_cache)]
    if paged:  # page p of sequence b is page 3 b + p of the rows in their order
        caches = [torch.empty_like(x).index_copy_(0, table.flatten().long(), y.view(6, 8, 2, 16))
                  for x, y in zip(caches, (k_cache, v_cache))]  # fmt: skip
    out = flash_attn.flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=own, cache_leftpad=pads, block_table=table, softcap=3.0, alibi_slopes=slopes
    )
    for b in range(2):
        used = 24 if own is None else int(own if lengths == "int" else own[b])
        keys, values = k_cache[b, :used], v_cache[b, :used]
        if new[0] is not None:
            keys, values = torch.cat((keys, k[b])), torch.cat((values, v[b]))
        keys, values = keys[int(pads[b]) :], values[int(pads[b]) :]
        expected = flash_attn.flash_attn_func(
            q[b : b + 1], keys[None], values[None], softcap=3.0, alibi_slopes=slopes[b] if per_sequence else slopes
        )
        assert (out[b : b + 1] - expected).abs().max() < 1e-5


COMPILED = {
    "an argument": lambda q, k, v, s: flash_attn.flash_attn_func(q, k, v, alibi_slopes=s),
    "made inside": lambda q, k, v, s: flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.exp2(-s)),
    "softcap": lambda q, k, v, s: flash_attn.flash_attn_func(q, k, v, softcap=2.5, alibi_slopes=s),
    "packed": lambda q, k, v, s: flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *BOUNDS, 33, 30, alibi_slopes=s
    ),
}
BOUNDS = tuple(torch.tensor(x, dtype=torch.int32) for x in ((0, 7, 40), (0, 30, 60)))


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("call", COMPILED.values(), ids=COMPILED)
def test_alibi_compiles(call, fullgraph, seed):
    """Slopes are data of the compiled code: out and gradients are those of the plain call, and with other slopes."""
    torch._dynamo.reset()
    leaves = [x.clone().requires_grad_() for x in make(DENSE, seed).inputs[:3]]
    slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    compiled = torch.compile(call, fullgraph=fullgraph, backend="aot_eager")
    for given in (slopes, 3 * slopes):
        given.requires_grad_()
        results = []
        for function in (call, compiled):
            out = function(*leaves, given)
            results.append((out, *torch.autograd.grad(out.square().sum(), [*leaves, given])))
        for plain, other in zip(*results):
            torch.testing.assert_close(other, plain, rtol=1e-12, atol=1e-12)
        given = given.detach()


@pytest.mark.parametrize("compiles", [False, True])
def test_alibi_of_jagged_tensors(compiles, seed):
    """As of the packed sequences; also where rows are left out."""
    torch._dynamo.reset()
    i = make(VARLEN, seed).inputs
    slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed))
    nested = torch.nested.nested_tensor_from_jagged
    q, k = nested(i.q, i.cu_seqlens_q.long()), nested(i.k, i.cu_seqlens_k.long())
    v = nested(i.v, k.offsets())
    call = flash_attn.flash_attn_func
    if compiles:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    out = call(q, k, v, alibi_slopes=slopes)
    lengths = i.cu_seqlens_q, i.cu_seqlens_k, i.max_seqlen_q, i.max_seqlen_k
    packed = flash_attn.flash_attn_varlen_func(*i[:3], *lengths, alibi_slopes=slopes)
    assert (out.values() - packed).abs().max() < 1e-12
    if not compiles:
        padded = [torch.nested.to_padded_tensor(x, 0.0) for x in (q, k, v)]
        starts, of_q, of_k = torch.tensor([1, 0]), torch.tensor([9, 5]), torch.tensor([20, 4])
        q, k, v = (torch.nested.narrow(x, 1, starts, n, torch.jagged) for x, n in zip(padded, (of_q, of_k, of_k)))
        v = nested(v.values(), k.offsets(), k.lengths())
        out = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes)
        for b, one in enumerate(out.unbind()):
            rows, keys = (slice(int(starts[b]), int(starts[b] + n[b])) for n in (of_q, of_k))
            own = padded[0][b : b + 1, rows], padded[1][b : b + 1, keys], padded[2][b : b + 1, keys]
            assert (one - flash_attn.flash_attn_func(*own, alibi_slopes=slopes[b])[0]).abs().max() < 1e-12


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
    "softcap_with_slopes": (
        ValueError,
        "softcap is nan, expected a finite number",
        lambda: flash_attn.flash_attn_func(x, x, x, softcap=float("nan"), alibi_slopes=torch.ones(2)),
    ),
    "negative_softcap_with_slopes": (
        ValueError,
        "softcap is -1.0, expected a finite number, 0",
        lambda: flash_attn.flash_attn_varlen_func(
            x[0], x[0], x[0], bounds, bounds, 4, 4, softcap=-1.0, alibi_slopes=torch.ones(2)
        ),
    ),
    "no_softcap_with_slopes": (
        TypeError,
        "softcap is a NoneType, expected a float",
        lambda: flash_attn.flash_attn_with_kvcache(x, x, x, softcap=None, alibi_slopes=torch.ones(2)),
    ),
    "q_with_slopes": (
        TypeError,
        "q is a list, expected a torch.Tensor",
        lambda: flash_attn.flash_attn_func([1.0], x, x, alibi_slopes=torch.ones(2)),
    ),
    "k_with_slopes": (
        ValueError,
        r"k has 3 dimensions, shape \(4, 2, 8\), expected 4",
        lambda: flash_attn.flash_attn_func(x, x[0], x, alibi_slopes=torch.ones(2)),
    ),
    "cu_seqlens_with_slopes": (
        TypeError,
        "cu_seqlens_k is a list, expected an int32 torch.Tensor",
        lambda: flash_attn.flash_attn_varlen_func(x[0], x[0], x[0], bounds, [0, 4], 4, 4, alibi_slopes=torch.ones(2)),
    ),
    "slopes_of_a_cache": (
        ValueError,
        "alibi_slopes is int, expected a tensor",
        lambda: flash_attn.flash_attn_with_kvcache(x, x, x, alibi_slopes=1),
    ),
    "slopes_that_train": (
        NotImplementedError,
        "alibi_slopes requires grad",
        lambda: flash_attn.flash_attn_with_kvcache(x, x, x, alibi_slopes=torch.ones(2, requires_grad=True)),
    ),
    "cache_seqlens_with_slopes": (
        TypeError,
        "cache_seqlens is a str, expected an int",
        lambda: flash_attn.flash_attn_with_kvcache(x, x, x, cache_seqlens="a", alibi_slopes=torch.ones(2)),
    ),
    "block_table_of_a_cache": (
        TypeError,
        "block_table has dtype torch.int64",
        lambda: flash_attn.flash_attn_with_kvcache(x, x, x, cache_seqlens=1, block_table=torch.zeros(1, 1).long()),
    ),
    "return_softmax_lse": (
        TypeError,
        "return_softmax_lse is a str, expected a bool",
        lambda: flash_attn.flash_attn_with_kvcache(x, x, x, return_softmax_lse="x"),
    ),
    "return_attn_probs": (
        TypeError,
        "return_attn_probs is a str, expected a bool",
        lambda: flash_attn.flash_attn_func(x, x, x, return_attn_probs="x"),
    ),
    "deterministic": (
        TypeError,
        "deterministic is a str, expected a bool",
        lambda: flash_attn.flash_attn_func(x, x, x, deterministic=""),
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
