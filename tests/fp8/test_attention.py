"""Attention on e4m3 tensors with scales: results against the float64 oracle on the dequantised numbers, and errors."""

import timeit

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fa4
from fa4.api import dense
from fa4.oracle.cases import CASES, Case, assert_right, judge_forward, make
from fa4.torch_ops import low_precision

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
RECIPES = ("tensor", "head", "block128", "mxfp8")
NAMES = ("q_descale", "k_descale", "v_descale")


def rounded(problem, recipe):
    """The problem on the numbers that 8-bit tensors stand for, and the arguments that make its call one on these."""
    i, mx = problem.inputs, recipe == "mxfp8"
    exact, arguments = [], {}
    for name, x, bounds in zip("qkv", i[:3], (i.cu_seqlens_q, i.cu_seqlens_k, i.cu_seqlens_k)):
        axis = "tokens" if mx and name == "v" else "head_dim"
        heads = problem.spec.heads_kv if recipe == "head" else None
        data, scales = fa4.quantize(x, recipe, axis=axis, heads=heads, cu_seqlens=bounds)
        exact.append(fa4.dequantize(data, scales, torch.float32, cu_seqlens=bounds))
        arguments |= {name: data, f"{name}_descale": scales}
    inputs = type(i)(*exact, *i[3:])
    return type(problem)(problem.case, inputs, problem.spec, problem.dout, problem.dlse), arguments


EDGES = ("no_keys", "no_queries", "no_batch", "one_by_one", "causal_fewer_keys_masks_rows", "head_dim_40_padded")
BROAD = ("gqa", "window_both_sides", "softcap", "sink_gqa_window", "varlen_with_empty", "seqused", "scale", "decode")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", (*BROAD, *EDGES, "packed_rows_past_the_end", "head_dim_v_smaller", "large_logits"))
def test_case_is_right(name, recipe, seed):
    if recipe == "mxfp8" and CASES[name].head_dim % 32:
        pytest.skip("blocks of 32 columns")
    problem, arguments = rounded(make(CASES[name], seed), recipe)
    out, lse = problem.call(**arguments)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert_right(judge_forward(problem, out, lse), f"{name}, {recipe}, seed {seed}")


@pytest.mark.parametrize("times", range(8))
def test_any_shape_is_right(times, seed):
    """Random lengths, heads and masks; each tensor with a recipe of its own."""
    draw = torch.Generator().manual_seed(seed + times)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    lengths = [tuple(torch.randint(300, (2,), generator=draw).tolist()) for _ in range(pick(1, 2, 5))]
    shape = (
        dict(lengths=lengths) if pick(True, False) else dict(zip(("seqlen_q", "seqlen_k"), lengths[0])) | dict(batch=2)
    )
    options = dict(
        heads_q=pick(2, 4, 6), head_dim=pick(32, 64, 96), head_dim_v=pick(None, 24, 64), causal=pick(True, False),
        window_size=pick((None, None), (50, 3)), softcap=pick(0.0, 10.0), sink=pick(True, False),
    )  # fmt: skip
    case = Case("drawn", **options, **shape)
    problem = make(case, seed + times)
    choices = [rounded(problem, pick(*RECIPES)) for _ in range(3)]
    arguments = {n: x for i, (_, a) in enumerate(choices) for n, x in a.items() if n[0] == "qkv"[i]}
    exact = type(problem.inputs)(*(choices[i][0].inputs[i] for i in range(3)), *problem.inputs[3:])
    problem = type(problem)(case, exact, problem.spec, problem.dout, problem.dlse)
    assert_right(judge_forward(problem, *problem.call(**arguments)), f"{case}, seed {seed + times}")


def eight(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(E4M3)


Q, K, V = eight(2, 20, 4, 32), eight(2, 50, 2, 32, seed=1), eight(2, 50, 2, 16, seed=2)
EXACT = [x.bfloat16() for x in (Q, K, V)]


def test_no_scale_means_one_and_strides_change_nothing():
    expected = fa4.flash_attn_func(*EXACT, causal=True)
    ones = dict.fromkeys(NAMES, torch.ones(1))
    views = [x.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3) for x in (Q, K, V)]
    for tensors, scales in (((Q, K, V), {}), ((Q, K, V), ones), (views, {}), (views, dict(k_descale=torch.ones(2, 2)))):
        assert torch.equal(fa4.flash_attn_func(*tensors, causal=True, **scales), expected)


def test_a_query_head_may_have_a_factor_of_its_own():
    factors = torch.tensor([[1.0, 2, 4, 8], [0.5, 1, 2, 1]])
    expected = fa4.flash_attn_func(EXACT[0] * factors.bfloat16()[:, None, :, None], *EXACT[1:])
    assert torch.equal(fa4.flash_attn_func(Q, K, V, q_descale=factors), expected)


def test_an_expanded_head_and_zeros_and_nan():
    k, v = (x[:, :, :1].expand(-1, -1, 2, -1) for x in (K, V))
    q = torch.where(torch.arange(20)[:, None, None] == 3, torch.nan, EXACT[0]).to(E4M3)
    out = fa4.flash_attn_func(q, k, v)
    is_nan = out.isnan().flatten(2).any(2)
    assert is_nan[:, 3].all() and is_nan.sum() == 2
    assert not fa4.flash_attn_func(Q, K, torch.zeros_like(V), v_descale=torch.zeros(())).any()


FUNCTIONS = {
    "score_mod": dict(score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j).abs()),
    "mask_mod": dict(mask_mod=lambda b, h, i, j: (i + j) % 3 > 0),
    "block_mask": dict(block_mask=fa4.create_block_mask(lambda b, h, i, j: j <= i + 5, None, None, 20, 50)),
    "dropout": dict(dropout_p=0.4, dropout_seed=7),
    "seqused": dict(seqused_k=torch.tensor([50, 11], dtype=torch.int32)),
    "backend": dict(backend="torch", deterministic=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_16_bit_calls_take_is_taken(name):
    got, expected = (fa4.flash_attn_func(*x, **FUNCTIONS[name], return_lse=True) for x in ((Q, K, V), EXACT))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_sinks_and_captured_tensors_get_gradients():
    sink, slope = torch.randn(4, requires_grad=True), torch.rand(4, requires_grad=True)
    results = []
    for tensors in ((Q, K, V), EXACT):
        out = fa4.flash_attn_func(*tensors, learnable_sink=sink, score_mod=lambda s, b, h, i, j: s + slope[h] * (i - j))
        results.append(torch.autograd.grad(out.float().sin().sum(), (sink, slope)))
    assert all(torch.equal(a, b) for a, b in zip(*results)) and results[0][0].any()


def test_autocast_leaves_8_bits_alone():
    with torch.autocast("cpu", torch.float16):
        out = fa4.flash_attn_func(Q, K, V)
    assert torch.equal(out, fa4.flash_attn_func(Q, K, V))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_code_has_no_break(recipe, backend):
    def call(q, k, v):
        (q, a), (k, b), (v, c) = (
            fa4.quantize(x, recipe, axis="tokens" if recipe == "mxfp8" and x is v else "head_dim") for x in (q, k, v)
        )
        return fa4.flash_attn_func(q, k, v, q_descale=a, k_descale=b, v_descale=c, causal=True)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, fullgraph=True, backend=backend)(*EXACT), call(*EXACT))


def test_nothing_reads_a_number_on_the_host():
    """Tensors without values, on which a synchronisation raises."""
    with FakeTensorMode():
        x = torch.empty(90, 4, 32, dtype=torch.bfloat16, device="cpu")
        cu = torch.empty(4, dtype=torch.int32, device="cpu")
        for recipe, axis in (("tensor", "head_dim"), ("block128", "head_dim"), ("mxfp8", "tokens")):
            data, scales = fa4.quantize(x, recipe, axis=axis, cu_seqlens=cu, smooth=True, rotate=True)
            assert fa4.dequantize(data, scales, cu_seqlens=cu).shape == x.shape
            out = fa4.flash_attn_varlen_func(data, data, data, cu_seqlens_q=cu, cu_seqlens_k=cu, v_descale=scales)
            assert out.shape == x.shape and out.dtype == torch.bfloat16


def test_operations_are_counted():
    counts = []
    for tensors in ((Q, K, V), EXACT):
        with FlopCounterMode(display=False) as counter:
            fa4.flash_attn_func(*tensors, causal=True)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_explain_takes_the_same_arguments():
    text = str(fa4.explain(Q, K, V, causal=True, q_descale=torch.ones(2, 2)))
    assert text == str(fa4.explain(*EXACT, causal=True, precision="fp8"))
    with pytest.raises(ValueError, match=r"q_descale has shape \(2, 3\)"):
        fa4.explain(Q, K, V, q_descale=torch.ones(2, 3))


def test_a_native_kernel_is_preferred(monkeypatch):
    results = torch.ones(2, 20, 4, 16), torch.zeros(2, 4, 20)
    monkeypatch.setattr(low_precision, "native", lambda *_: results)
    out, lse = fa4.flash_attn_func(Q, K, V, return_lse=True)
    assert torch.equal(out, results[0].bfloat16()) and torch.equal(lse, results[1])


def test_16_bit_calls_pay_under_a_fifth_of_a_microsecond(monkeypatch):
    """What they do more: compare two names with None, and look up a dtype. On however slow a machine, within 1 us."""
    monkeypatch.setattr(low_precision, "attend", None)
    assert fa4.flash_attn_func(*EXACT).dtype == torch.bfloat16
    monkeypatch.setattr(dense.calls, "attend", lambda *_: (None, None))
    q, times = EXACT[0], 2000
    whole = min(timeit.repeat(lambda: fa4.flash_attn_func(q, q, q), number=times, repeat=20)) / times
    assert whole < 5e-6


def packed(**change):
    bounds = torch.tensor([0, 20, 40], dtype=torch.int32), torch.tensor([0, 50, 100], dtype=torch.int32)
    tensors = dict(zip("qkv", (x.flatten(0, 1) for x in (Q, K, V))))
    return fa4.flash_attn_varlen_func(**(tensors | dict(cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1]) | change))


WRONG = {
    "k": (dict(k=EXACT[1]), TypeError, "k has dtype torch.bfloat16, expected torch.float8_e4m3fn like q"),
    "q": (dict(q=EXACT[0]), TypeError, "k has dtype torch.float8_e4m3fn, expected float16, bfloat16, "),
    "descale of 16 bits": (
        dict(zip("qkv", EXACT), v_descale=torch.ones(())),
        TypeError,
        "q has dtype torch.bfloat16, expected torch.float8_e4m3fn to go with v_descale",
    ),
    "e5m2": (dict(q=Q.to(torch.float8_e5m2)), TypeError, "q has dtype torch.float8_e5m2, expected torch.float8_e4m3"),
    "e5m2 of v": (dict(v=V.to(torch.float8_e5m2)), TypeError, "v has dtype torch.float8_e5m2, .* like q"),
    "no tensor": (dict(v=3), TypeError, "v is a int, expected a torch.Tensor"),
    "grad": (dict(k=EXACT[1].clone().requires_grad_().to(E4M3)), NotImplementedError, "k requires grad"),
    "grad of a scale": (
        dict(k_descale=torch.ones((), requires_grad=True)), NotImplementedError, "k_descale requires grad, and scales",
    ),
    "scale dtype": (dict(q_descale=torch.ones(()).double()), TypeError, "q_descale has dtype torch.float64, expected"),
    "scale type": (dict(q_descale=1.0), TypeError, "q_descale is a float, expected a torch.Tensor"),
    "scale device": (dict(q_descale=torch.ones((), device="meta")), ValueError, "q_descale is on meta, expected"),
    "scale shape": (
        dict(k_descale=torch.ones(2, 4)), ValueError,
        r"k_descale has shape \(2, 4\), expected one of \(\), \(1,\), \(2, 2\), \(2, 1, 2\) for torch",
    ),
    "e8m0 shape": (
        dict(v_descale=torch.ones(2, 2).to(E8M0)), ValueError, r"v_descale has shape \(2, 2\), expected one of",
    ),
    "axes": (dict(q=Q[0]), ValueError, r"q has 3 dimensions, shape \(20, 4, 32\), expected 4"),
    "head_dim": (dict(k=K[..., :16]), ValueError, r"k has shape \(2, 50, 2, 16\), expected \(2, \*, \*, 32\)"),
    "last axis": (dict(q=eight(2, 20, 4, 64)[..., ::2]), ValueError, "q has stride 2 on its last axis, expected 1"),
    "precision": (
        dict(precision="fp4"), ValueError, "precision is 'fp4', expected None or one of 'fp8', 'fp8-forward', 'mxfp8'"
    ),
    "precision of 8 bits": (
        dict(precision="fp8"), TypeError,
        "q has dtype torch.float8_e4m3fn, expected torch.float16 or torch.bfloat16 for precision 'fp8'",
    ),
    "precision and scale": (
        dict(zip("qkv", EXACT), precision="fp8", k_descale=torch.ones(())), ValueError,
        "k_descale is given with precision 'fp8', expected None",
    ),
    "float32": (
        dict(zip("qkv", (x.float() for x in EXACT)), precision="mxfp8"), TypeError,
        "q has dtype torch.float32, expected torch.float16 or torch.bfloat16 for precision 'mxfp8'",
    ),
    "columns": (
        dict(q=EXACT[0][..., :24], k=EXACT[1][..., :24], v=EXACT[2], precision="mxfp8"), ValueError,
        "q has head_dim 24, expected a multiple of 32 for precision 'mxfp8'",
    ),
    "backend": (dict(backend="nope"), ValueError, "backend is 'nope'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    change, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        fa4.flash_attn_func(**(dict(q=Q, k=K, v=V) | change))


@pytest.mark.parametrize(
    "change, text",
    [
        (
            dict(q_descale=torch.ones(3, 4)),
            r"q_descale has shape \(3, 4\), .*, \(2, 2\), \(2, 4",
        ),
        (dict(q=Q), r"q has 4 dimensions"),
        (dict(cu_seqlens_k=torch.tensor([0, 50, 200], dtype=torch.int32)), r"cu_seqlens_k is \[0, 50, 200\]"),
    ],
)
def test_a_wrong_argument_of_a_packed_call_is_named(change, text):
    assert packed().shape == (40, 4, 16)
    with pytest.raises(ValueError, match=text):
        packed(**change)


def test_transforms_and_nested_tensors_are_refused():
    with pytest.raises(NotImplementedError, match="precision and 8-bit q, k and v do not work inside transforms"):
        torch.func.vmap(fa4.flash_attn_func)(Q[None], K[None], V[None])
    nested = torch.nested.nested_tensor([torch.zeros(n, 2, 32) for n in (3, 5)], layout=torch.jagged).bfloat16()
    with pytest.raises(TypeError, match=r"q has layout torch.jagged, expected torch.strided"):
        fa4.flash_attn_func(nested, nested, nested, precision="fp8")
