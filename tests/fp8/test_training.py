"""Training with precision="fp8" and "mxfp8": gradients against the float64 oracle on the rounded numbers."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fa4
from fa4.oracle.cases import CASES, Case, assert_right, judge_backward, judge_forward, make
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.spec import Operands
from fa4.torch_ops import low_precision, recipes
from fa4.torch_ops.descales import dequantized
from tests.small import SMALL

PRECISIONS = low_precision.PRECISIONS
NAMES = (
    *("gqa", "window_both_sides", "softcap", "sink_gqa_window", "varlen_with_empty", "seqused", "seqused_keys_only"),
    *("packed_rows_past_the_end", "head_dim_v_smaller", "no_keys", "no_queries", "fp16", "head_dim_40_padded"),
    *("deterministic_groups_of_three", "causal_fewer_keys_masks_rows"),
)
DROPOUT = Case("dropout", seqlen_q=70, seqlen_k=90, heads_q=4, dropout_p=0.3, causal=True)


def rounded(problem, precision):
    """The problem on the numbers that the call multiplies."""
    inputs, descales = low_precision.rounded(problem.inputs, precision)
    exact = dequantized(inputs, descales, torch.float32)
    return type(problem)(problem.case, exact, problem.spec, problem.dout, problem.dlse)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", [*(CASES[name] for name in NAMES), DROPOUT], ids=str)
def test_case_is_right(case, precision, seed):
    if PRECISIONS[precision] is Operands.MXFP8 and case.head_dim % 32:
        pytest.skip("blocks of 32 columns")
    problem = make(case, seed)
    out, lse, grads = problem.call_with_gradients(precision=precision)
    assert out.dtype == case.dtype and {x.dtype for x in grads[:3]} == {case.dtype}
    problem = rounded(problem, precision)
    verdict = judge_forward(problem, out, lse) + judge_backward(problem, grads)
    assert_right(verdict, f"{case}, {precision}, seed {seed}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounded_numbers_are_exact_in_16_bits(dtype, precision, seed):
    """So the backward has the very numbers of a forward that multiplies 8 bits. (Large ones: float16 ends at 2^-24.)"""
    problem = make(Case("x", seqlen_q=40, seqlen_k=70, dtype=dtype, logits=8.0), seed)
    inputs, descales = low_precision.rounded(problem.inputs, precision)
    for narrow, exact in zip(*(dequantized(inputs, descales, to)[:3] for to in (dtype, torch.float32))):
        assert torch.equal(narrow.float(), exact) or dtype == torch.float16
        assert (narrow.float() - exact).abs().max() <= 2.0**-25


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_step_is_that_of_attention_on_the_rounded_numbers(precision, seed):
    """Bit for bit, with a score_mod whose captured tensor is trained, an lse that is used, and dropout."""
    problem = make(Case("x", batch=2, seqlen_q=40, seqlen_k=70, heads_q=4), seed)
    slope, sink = torch.rand(4, requires_grad=True), torch.randn(4, requires_grad=True)
    inputs, descales = low_precision.rounded(problem.inputs, precision)
    numbers = dequantized(inputs, descales, torch.bfloat16)
    results = []
    for tensors, options in ((problem.inputs[:3], dict(precision=precision)), (numbers[:3], {})):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = fa4.flash_attn_func(
            *leaves, learnable_sink=sink, score_mod=lambda s, b, h, i, j: s + slope[h] * (i - j), dropout_p=0.2,
            dropout_seed=3, deterministic=True, return_lse=True, **options,
        )  # fmt: skip
        results.append(
            (out, lse, *torch.autograd.grad(out.float().sin().sum() + lse.cos().sum(), (*leaves, slope, sink)))
        )
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_autograd_saves_8_bits(precision):
    q, k, v = (torch.randn(1, 64, 2, 32).bfloat16().requires_grad_() for _ in range(3))
    saved = []

    def pack(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = fa4.flash_attn_func(q, k, v, precision=precision)
    wide = [x for x in saved if x.shape == q.shape and x.element_size() > 1]
    assert len(wide) == 1 and wide[0].data_ptr() == out.data_ptr()
    assert sum(x.dtype == recipes.E4M3 for x in saved) == 3


def test_rows_that_are_not_used_may_hold_anything(seed):
    torch.manual_seed(seed)
    used, grads = torch.tensor([30, 7], dtype=torch.int32), []
    q, k, v = (torch.randn(2, n, 2, 32).bfloat16() for n in (20, 40, 40))
    for filling in (0.0, torch.nan):
        for x in (k, v):
            x[0, 30:], x[1, 7:] = filling, filling
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = fa4.flash_attn_func(*leaves, seqused_k=used, precision="fp8")
        grads.append((out, *torch.autograd.grad(out.float().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*grads)) and not grads[0][2][1, 7:].any()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["sink", "varlen"])
def test_compiled_code_gives_the_same_bits(name, precision, seed):
    from dataclasses import replace

    problem = make(replace(SMALL[name], dtype=torch.bfloat16, head_dim=32), seed)
    eager = problem.call_with_gradients(precision=precision)
    torch._dynamo.reset()
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.tensors().items()}
    compiled = torch.compile(lambda x: problem.call(**x, precision=precision), fullgraph=True, backend="aot_eager")
    out, lse = compiled(leaves)
    dlse = problem.dlse.masked_fill(lse.detach() == -torch.inf, 0.0)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (problem.dout, dlse))
    assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
    assert all(torch.equal(a, b) for a, b in zip(grads, [g for g in eager[2] if g is not None]))


def test_new_lengths_do_not_recompile():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, counts = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(
        lambda q: fa4.flash_attn_func(q, q, q, causal=True, precision="fp8"), fullgraph=True, backend=counter
    )
    for seqlen in (17, 33, 65, 130):
        q = torch.randn(3, seqlen, 2, 32).bfloat16()
        assert torch.equal(compiled(q), fa4.flash_attn_func(q, q, q, causal=True, precision="fp8"))
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 3


def test_checkpointing_and_autocast_give_the_same_gradients(seed):
    torch.manual_seed(seed)
    x = torch.randn(1, 40, 2, 32, requires_grad=True)
    results = []
    for wrap in (lambda f, y: f(y), lambda f, y: checkpoint(f, y, use_reentrant=False)):
        with torch.autocast("cpu", torch.bfloat16):
            out = wrap(lambda y: fa4.flash_attn_func(y, y * 2, y, causal=True, precision="fp8"), x)
        assert out.dtype == torch.bfloat16
        results.append((out, *torch.autograd.grad(out.float().sin().sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*results)) and results[0][1].dtype == torch.float32


def test_there_is_no_second_derivative():
    x = torch.randn(1, 8, 1, 32).bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(fa4.flash_attn_func(x, x, x, precision="fp8").sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(grad.sum(), x)


def test_latent_attention_takes_it():
    parts = [torch.randn(shape).bfloat16() for shape in ((1, 9, 4, 32), (1, 9, 4, 32), (1, 20, 32), (1, 20, 32))]
    exact = fa4.mla_attention(*parts, softmax_scale=0.1)
    out = fa4.mla_attention(*parts, softmax_scale=0.1, precision="fp8")
    assert (out - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_the_largest_numbers_of_float16_stay_finite(precision):
    q, k, v = (torch.full((1, 40, 1, 32), x, dtype=torch.float16) for x in (0.01, 0.01, 65504.0))
    out = fa4.flash_attn_func(q, k, v, precision=precision)
    assert out.isfinite().all() and (out > 57000).all()


@pytest.mark.parametrize(
    ("number", "precision", "changes", "expected"),
    [
        (100, "fp8", {}, "backend  sm100, backward sm100 in 8 bits"),
        (100, "fp8-forward", {}, "backend  sm100, backward sm100 in 16 bits"),
        (100, "fp8", dict(dropout_p=0.1), "backend  sm100, backward sm100 in 16 bits"),
        (100, "mxfp8", {}, "backend  sm100, backward sm100 in 8 bits"),
        (100, "mxfp8-forward", {}, "backend  sm100, backward sm100 in 16 bits"),
        (120, "mxfp8", {}, "backend  sm120, backward sm80 in 16 bits"),
        (120, "fp8", {}, "backend  sm120, backward sm80 in 16 bits"),
        (90, "fp8", {}, "backend  sm90, backward sm90 in 16 bits"),
        (80, "fp8", {}, "backend  sm80, backward sm80 in 16 bits"),
    ],
)
def test_explain_tells_the_backward(number, precision, changes, expected):
    q, k, v = (torch.empty(2, 500, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with emulating(chip_by_number(number)):
        assert expected in str(fa4.explain(q, k, v, precision=precision, **changes)).splitlines()
        with torch.no_grad():
            assert "backward" not in str(fa4.explain(q, k, v, precision=precision, **changes))
