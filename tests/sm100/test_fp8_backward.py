"""Training on e4m3 numbers on the emulated Blackwell chip, whose backward multiplies them, too."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from warpcheck.machine import SCHEDULES

import fa4
from bench import static
from fa4.emulator import emulate
from fa4.oracle import cases, reference
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.spec import (
    AttentionInputs,
    AttentionSpec,
    Flags,
    Gradients,
    Operands,
    ProblemSize,
    Saved,
    ds_dtype,
)
from fa4.sm100.bwd.kernel import channels, smem_map
from fa4.sm100.bwd.plan import Sm100Backward
from fa4.torch_ops import low_precision
from fa4.torch_ops.descales import Descales, dequantized
from tests.fp8.heads import E4M3, noting_kernels
from tests.machine_code import machine_kernels

CHIP = chip_by_number(100)
HEADS = 8  # of calls whose error is one of few rows: with two, it scatters by 3
SPEC = AttentionSpec(torch.bfloat16, 128, 128, 8, 8, 0.1, needs_backward=True, operands=Operands.E4M3)
CASES = (
    Case("full", seqlen_q=200, seqlen_k=300, head_dim=64, batch=2, heads_q=2),
    Case("pair", seqlen_q=300, seqlen_k=400, head_dim=128, heads_q=2, heads_kv=1),
    Case("pair_causal", seqlen_q=300, seqlen_k=300, head_dim=112, head_dim_v=128, causal=True, batch=2),
    Case("more_keys", seqlen_q=130, seqlen_k=390, head_dim=128, causal=True, heads_q=4, heads_kv=2, deterministic=True),
    Case("fewer_keys", seqlen_q=300, seqlen_k=100, head_dim=128, causal=True, deterministic=True),
    Case("window", seqlen_q=300, seqlen_k=350, head_dim=96, window_size=(100, 30), softcap=15.0, sink=True),
    Case("left", seqlen_q=200, seqlen_k=260, head_dim=32, head_dim_v=80, window_size=(90, None), heads_q=3, heads_kv=1),
    Case("fp16", seqlen_q=100, seqlen_k=140, head_dim=128, dtype=torch.float16, deterministic=True),
    Case("one_by_one", seqlen_q=1, seqlen_k=1, head_dim=64),
    Case("large", seqlen_q=150, seqlen_k=300, head_dim=128, logits=100.0),
)
MANY = Case("many_keys", seqlen_q=130, seqlen_k=8300, head_dim=64)


def saved_of(problem, has_dlse):
    return Saved(problem.dout, problem.dlse, problem.dout, problem.dlse if has_dlse else None)


def trained(case, seed, has_dlse=True):
    """The problem on the numbers that the call multiplies."""
    problem = cases.make(case, seed)
    eight, descales = low_precision.rounded(problem.inputs, "fp8")
    inputs = dequantized(eight, descales, torch.float32)
    dout, operands = low_precision.gradient_operands(saved_of(problem, has_dlse), eight, descales)
    spec, rounding = (
        replace(problem.spec, operands=Operands.E4M3),
        dict(ds_factors=operands.ds_factors(problem.spec.group)),
    )
    exact = replace(problem, inputs=inputs, spec=spec, dout=dout, rounding=rounding)
    return problem, exact


def gradients(problem, seed, has_dlse=True):
    """Of a call, from a kernel of 8 bits."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.tensors().items()}
    chip = emulate("sm_100a", sms=4, seed=seed, schedule=SCHEDULES[seed % len(SCHEDULES)])
    with chip, noting_kernels() as taken:
        out, lse = problem.call(**leaves, precision="fp8")
        dlse = problem.dlse.masked_fill(lse.detach() == -torch.inf, 0.0)
        results, dresults = ((out, lse), (problem.dout, dlse)) if has_dlse else ((out,), (problem.dout,))
        grads = Gradients(*torch.autograd.grad(results, list(leaves.values()), dresults))
    assert taken["native_backward"]
    return grads


def judged(exact, grads):
    def references(of, precise):
        options = {"ds_factors": of.rounding["ds_factors"]} | {
            name: x for name, x in of.rounding.items() if name in ("sequential", "key_order")
        }
        return reference.backward(of.inputs, of.spec, of.dout, of.dlse, precise=precise, **options)

    return cases.judge_by_draws(grads._asdict(), references, exact, (), cases.roundings(exact))


@pytest.mark.rotates(4)
@pytest.mark.parametrize("case", (*CASES, MANY), ids=str)
def test_gradients_are_right(case, seed):
    problem, exact = trained(case, seed)
    grads = gradients(problem, seed)
    assert all(x is None or x.dtype == case.dtype for x in grads[:3])
    cases.assert_right(judged(exact, grads), f"{case.name}, seed {seed}")


def test_deterministic_gradients_repeat(seed):
    problem, _ = trained(CASES[3], seed)
    first, second = (gradients(problem, seed + i, has_dlse=False) for i in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first[:3], second[:3]))


def test_zero_gradients(seed):
    """A dO of zeros has a scale of its own; no factor may be infinite."""
    problem, _ = trained(CASES[0], seed)
    grads = gradients(replace(problem, dout=torch.zeros_like(problem.dout)), seed, has_dlse=False)
    assert all(torch.count_nonzero(x) == 0 for x in grads[:3])


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(window_right=0, deterministic=True),
        dict(head_dim=64, head_dim_v=64),
        dict(head_dim=96, window_left=9),
    ],
    ids=str,
)
def test_nothing_spills(changes, tmp_path, disassembler):
    backward = Sm100Backward(replace(SPEC, **changes), ProblemSize(4, 4096, 4096), CHIP)
    found = machine_kernels(backward.kernel, backward.config(has_dlse=False), CHIP, tmp_path)
    assert static.problems(max(found, key=lambda kernel: kernel.instructions)) == []


def test_every_head_dim_fits_the_chip():
    for d in range(16, 144, 16):
        for dv in range(16, 144, 16):
            for keys in (4096, 1 << 16):
                spec = replace(SPEC, head_dim=d, head_dim_v=dv)
                cfg = Sm100Backward(spec, ProblemSize(1, 4096, keys), CHIP).config(has_dlse=False)
                assert smem_map(cfg, channels(cfg)).nbytes <= CHIP.smem_per_block, (d, dv)
                assert cfg.wide_ds == (ds_dtype(keys) == torch.float8_e5m2)


@pytest.mark.parametrize(
    "changes",
    [
        dict(dropout_p=0.1),
        dict(score_mod=fa4.scores.alibi(torch.ones(2))),
        dict(head_dim=192),
        dict(softmax_scale=-0.1),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_calls_have_a_16bit_backward(changes, seed):
    options = {name: x for name, x in changes.items() if name != "head_dim"}
    q, k, v = (
        torch.randn(1, 40, 2, changes.get("head_dim", 64), dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    with emulate("sm_100a", sms=2, seed=seed), noting_kernels() as taken:
        fa4.flash_attn_func(q, k, v, precision="fp8", **options).sum().backward()
    assert not taken.get("native_backward") and q.grad.isfinite().all()


def test_a_16bit_backward_can_be_asked_for(seed):
    q, k, v = (torch.randn(1, 40, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with emulate("sm_100a", sms=2, seed=seed), noting_kernels() as taken:
        assert "e4m3" in str(fa4.explain(q, k, v, precision="fp8-forward"))
        fa4.flash_attn_func(q, k, v, precision="fp8-forward").sum().backward()
    assert "native_backward" not in taken and q.grad.isfinite().all()


def _beside_16_bits(seed, dout, dlse=None, **changes):
    """Relative errors of dq, dk and dv to the 16-bit backward of the same numbers, by sequence."""
    draw = torch.Generator().manual_seed(seed)
    shape = dict(q=(2, 150, HEADS, 64), k=(2, 150, HEADS // 2, 64), v=(2, 150, HEADS // 2, 64))
    tensors = [torch.randn(shape[name], generator=draw).to(torch.bfloat16) for name in "qkv"]
    tensors[0] *= changes.pop("logits", 1.0)
    found = []
    for precision, chip in (("fp8", emulate("sm_100a", sms=2, seed=seed)), ("fp8-forward", contextlib.nullcontext())):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with chip:
            out, lse = fa4.flash_attn_func(*leaves, precision=precision, return_lse=True, causal=True)
            outputs, upstream = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
            found.append(torch.autograd.grad(outputs, leaves, upstream))
    return [[float((x - y).norm() / (y.norm() + 1e-30)) for x, y in zip(a, b)] for a, b in zip(*found)]


def _dout(seed):
    return torch.randn(2, 150, HEADS, 64, generator=torch.Generator().manual_seed(seed + 1)).to(torch.bfloat16)


def test_gradients_of_few_rows(seed):
    """The loss of a last token, or of one answer: dS must not be cut off at the usual size of all rows."""
    dout = torch.zeros(2, 150, HEADS, 64, dtype=torch.bfloat16)
    dout[:, 20] = _dout(seed)[:, 20]
    errors = _beside_16_bits(seed, dout, logits=3.0)
    assert max(map(max, errors)) < 0.09, errors


def test_gradients_of_lse_alone(seed):
    dlse = torch.randn(2, HEADS, 150, generator=torch.Generator().manual_seed(seed))
    errors = _beside_16_bits(seed, torch.zeros(2, 150, HEADS, 64, dtype=torch.bfloat16), dlse)
    assert max(map(max, errors[:2])) < 0.09, errors  # there is no dv
    errors = _beside_16_bits(seed, _dout(seed), 1000 * dlse)
    assert max(map(max, errors[:2])) < 0.09, errors


def test_a_sequence_has_factors_of_its_own(seed):
    dout = _dout(seed)
    dout[0] *= 1e4
    errors = _beside_16_bits(seed, dout)
    dout[0, 3, 0, 0] = torch.nan
    with_nan = _beside_16_bits(seed, dout)
    for of_all, beside_nan in zip(errors, with_nan):
        assert of_all[1] < 0.09 and beside_nan[1] == of_all[1], (errors, with_nan)


@pytest.mark.parametrize("scale", [2.0**-60, 65504.0])
def test_tiny_and_large_gradients(scale, seed):
    """In float16, numbers near its end must not become inf when they are rounded to e4m3."""
    dtype = torch.float16 if scale > 1 else torch.bfloat16
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 60, 2, 64, generator=draw).to(dtype).requires_grad_() for _ in range(3))
    dout = (torch.rand(1, 60, 2, 64, generator=draw) * scale).to(dtype)
    with emulate("sm_100a", sms=2, seed=seed):
        grads = torch.autograd.grad(fa4.flash_attn_func(q, k, v, precision="fp8"), (q, k, v), dout)
    plain = torch.autograd.grad(fa4.flash_attn_func(q, k, v, precision="fp8-forward"), (q, k, v), dout)
    for x, y in zip(grads, plain):
        assert not x.isnan().any()
        if y.isfinite().all():
            assert (x.double() - y.double()).norm() < 0.12 * y.double().norm()


def test_many_keys_have_a_16bit_backward():
    """e4m3 has few numbers for P of so many keys."""
    q, k = torch.zeros(1, 2, 1, 64, dtype=E4M3), torch.zeros(1, 16385, 1, 64, dtype=E4M3)
    inputs = AttentionInputs(q, k, k, max_seqlen_q=2, max_seqlen_k=16385)
    saved = Saved(*(torch.zeros(1, 2, 1, 64) for _ in range(3)))
    assert low_precision.native_backward(saved, inputs, Flags(0.1), Descales()) is None


def test_traces_and_second_derivatives():
    """The backward is an operator: compiled training traces it, and it has no second derivative."""
    q, k, v = (torch.randn(1, 32, 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def gradients_of(*tensors):
        return torch.autograd.grad(fa4.flash_attn_func(*tensors, precision="fp8").float().sum(), tensors)

    with emulating(CHIP), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        graph = make_fx(gradients_of)(*(mode.from_tensor(x) for x in (q, k, v)))
    assert any(node.target is torch.ops.fa4.backward_8bit.default for node in graph.graph.nodes)
    with emulate("sm_100a", sms=2):
        (dq,) = torch.autograd.grad(
            fa4.flash_attn_func(q, k, v, precision="fp8").float().square().sum(), (q,), create_graph=True
        )
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            dq.float().sum().backward()
