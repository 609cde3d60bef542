"""Training on e4m3 numbers on the emulated Blackwell chip, whose backward multiplies them, too, with scales of heads or
of blocks."""

import contextlib
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from warpcheck.machine import Checks

import fa4
from bench import static
from fa4.api import ahead
from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.spec import (
    AttentionInputs,
    AttentionSpec,
    Flags,
    Operands,
    ProblemSize,
    Saved,
    ds_dtype,
)
from fa4.sm100 import tmem
from fa4.sm100.bwd.kernel import channels, smem_map, tmem_map
from fa4.sm100.bwd.plan import Sm100Backward
from fa4.torch_ops import low_precision
from fa4.torch_ops.descales import Descales
from tests.building import compiled_ahead
from tests.fp8 import trained
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
OF_BLOCKS = (
    Case("full", seqlen_q=200, seqlen_k=300, head_dim=64, batch=2, heads_q=2),
    Case("causal", seqlen_q=300, seqlen_k=300, head_dim=64, causal=True, heads_q=4, heads_kv=2, deterministic=True),
    Case("fewer_keys", seqlen_q=300, seqlen_k=100, head_dim=64, head_dim_v=32, causal=True, deterministic=True),
    Case("window", seqlen_q=300, seqlen_k=350, head_dim=64, window_size=(100, 30), softcap=15.0, sink=True),
    Case("left", seqlen_q=200, seqlen_k=260, head_dim=32, head_dim_v=48, window_size=(90, None), heads_q=3, heads_kv=1),
    Case("fp16", seqlen_q=140, seqlen_k=140, head_dim=64, dtype=torch.float16, deterministic=True),
    Case("one_key", seqlen_q=129, seqlen_k=1, head_dim=64),
)
MANY = Case("many_keys", seqlen_q=130, seqlen_k=8300, head_dim=64)


@pytest.fixture(params=["fp8", "mxfp8"])
def precision(request):
    return request.param


@pytest.mark.rotates(4)
@pytest.mark.parametrize("case", (*CASES, MANY), ids=str)
def test_gradients_are_right(case, seed):
    trained.assert_right(cases.make(case, seed), seed, "fp8")


@pytest.mark.rotates(4)
@pytest.mark.parametrize("case", (*OF_BLOCKS, MANY), ids=str)
def test_gradients_of_blocks_are_right(case, seed):
    trained.assert_right(_with_blocks(cases.make(case, seed), seed), seed, "mxfp8")


def _with_blocks(problem, seed):
    """The problem with blocks of 32 tokens and 32 columns that differ by up to 2^4."""
    draw = torch.Generator().manual_seed(seed)

    def scaled(x):
        blocks = [-(-size // 32) if axis in (1, 3) else size for axis, size in enumerate(x.shape)]
        powers = torch.randint(-3, 2, blocks, generator=draw).float().exp2()
        powers = powers.repeat_interleave(32, 1).repeat_interleave(32, 3)
        return (x * powers[:, : x.shape[1], :, : x.shape[3]]).to(x.dtype)

    q, k, v = map(scaled, problem.inputs[:3])
    return replace(problem, inputs=problem.inputs._replace(q=q, k=k, v=v), dout=scaled(problem.dout))


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_each_scale_of_a_block_counts(name, seed):
    """With one scale doubled before the launch, gradients are not those of before."""
    problem, index = cases.make(OF_BLOCKS[0], seed), (1, -1, 1, -1)
    before = trained.gradients(problem, seed, "mxfp8")
    of_call = low_precision.block_scales

    def doubled(*arguments):
        scales = of_call(*arguments)
        changed = getattr(scales, name).clone()
        changed[index] += 1
        return scales._replace(**{name: changed})

    with mock.patch.object(low_precision, "block_scales", doubled):
        after = trained.gradients(problem, seed, "mxfp8")
    # That of dO scales dP and dV, of q S and dK, and so on; the other sequence has the same gradients.
    changed = dict(q=("dq", "dk", "dv"), k=("dq", "dk", "dv"), v=("dq", "dk"), do=("dq", "dk", "dv"))[name]
    for of in ("dq", "dk", "dv"):
        one, other = getattr(before, of), getattr(after, of)
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) == (of not in changed), of


def test_deterministic_gradients_repeat(precision, seed):
    problem = cases.make(CASES[0], seed)
    problem = replace(problem, case=replace(problem.case, deterministic=True))
    first, second = (trained.gradients(problem, seed + i, precision, has_dlse=False) for i in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first[:3], second[:3]))


@pytest.mark.rotates(2)
def test_keys_that_no_query_sees(precision, seed):
    """Their CTAs have no step, and must not leave anything for the memory that they free."""
    case = Case("unseen", seqlen_q=140, seqlen_k=500, head_dim=64, window_size=(9, 0))
    leaves = [x.clone().requires_grad_() for x in cases.make(case, seed).inputs[:3]]
    with emulate("sm_100a", sms=2, seed=seed, checks=Checks(leftovers=True)), noting_kernels() as taken:
        out = fa4.flash_attn_func(*leaves, window_size=case.window_size, precision=precision)
        out.float().sum().backward()
    assert taken["native_backward"] and torch.count_nonzero(leaves[1].grad[:, :300]) == 0


def test_a_sink_of_8bit_tensors_has_a_gradient(seed):
    """Whatever their scales: only a call that rounds has blocks with one scale for both axes."""
    q, k, v = (x.float() for x in cases.make(OF_BLOCKS[0], seed).inputs[:3])
    (q8, q_scales), (k8, k_scales) = (fa4.quantize(x, "mxfp8") for x in (q, k))
    sink = torch.zeros(2, requires_grad=True)
    options = dict(q_descale=q_scales, k_descale=k_scales, learnable_sink=sink)
    with emulate("sm_100a", sms=2, seed=seed), noting_kernels() as taken:
        out = fa4.flash_attn_func(q8, k8, v.to(E4M3), **options)
        (found,) = torch.autograd.grad(out.float().square().sum(), sink)
    (expected,) = torch.autograd.grad(fa4.flash_attn_func(q8, k8, v.to(E4M3), **options).float().square().sum(), sink)
    assert taken["native"] is Operands.MXFP8 and "native_backward" not in taken
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05)


def test_zero_gradients(precision, seed):
    """A dO of zeros has a scale of its own; no factor may be infinite."""
    problem = cases.make(CASES[0], seed)
    problem = replace(problem, dout=torch.zeros_like(problem.dout))
    grads = trained.gradients(problem, seed, precision, has_dlse=False)
    assert all(torch.count_nonzero(x) == 0 for x in grads[:3])


@pytest.mark.rotates(3)
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(window_right=0, deterministic=True),
        dict(head_dim=64, head_dim_v=64),
        dict(head_dim=96, window_left=9),
        dict(head_dim=64, head_dim_v=64, operands=Operands.MXFP8, window_right=0, deterministic=True),
    ],
    ids=str,
)
def test_nothing_spills(changes, tmp_path, disassembler):
    backward = Sm100Backward(replace(SPEC, **changes), ProblemSize(4, 4096, 4096), CHIP)
    found = machine_kernels(backward.kernel, backward.config(has_dlse=False), CHIP, tmp_path)
    assert static.problems(max(found, key=lambda kernel: kernel.instructions)) == []


def test_every_head_dim_fits_the_chip():
    widths = range(16, 144, 16)
    of_heads = ((d, dv, Operands.E4M3) for d in widths for dv in widths)
    of_blocks = ((d, dv, Operands.MXFP8) for d in (32, 64) for dv in range(16, 80, 16))
    for (d, dv, operands), keys in itertools.product((*of_heads, *of_blocks), (4096, 1 << 16)):
        spec = replace(SPEC, head_dim=d, head_dim_v=dv, operands=operands)
        cfg = Sm100Backward(spec, ProblemSize(1, 4096, keys), CHIP).config(has_dlse=False)
        assert smem_map(cfg, channels(cfg)).nbytes <= CHIP.smem_per_block, spec
        assert tmem_map(cfg).end <= tmem.COLUMNS, spec
        assert cfg.wide_ds == (ds_dtype(keys) == torch.float8_e5m2)


@pytest.mark.rotates(2)
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
def test_other_calls_have_a_16bit_backward(precision, changes, seed):
    options = {name: x for name, x in changes.items() if name != "head_dim"}
    q, k, v = (
        torch.randn(1, 140, 2, changes.get("head_dim", 64), dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    with emulate("sm_100a", sms=2, seed=seed), noting_kernels() as taken:
        fa4.flash_attn_func(q, k, v, precision=precision, **options).sum().backward()
    assert not taken.get("native_backward") and q.grad.isfinite().all()


def test_scales_of_blocks_of_wide_heads_have_a_16bit_backward(seed):
    """Tensor memory has no room for them."""
    q, k, v = (torch.randn(1, 140, 2, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with emulate("sm_100a", sms=2, seed=seed), noting_kernels() as taken:
        fa4.flash_attn_func(q, k, v, precision="mxfp8").sum().backward()
    assert not taken["native_backward"] and q.grad.isfinite().all()


def test_a_16bit_backward_can_be_asked_for(precision, seed):
    q, k, v = (torch.randn(1, 140, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with emulate("sm_100a", sms=2, seed=seed), noting_kernels() as taken:
        assert "16 bits" in str(fa4.explain(q, k, v, precision=f"{precision}-forward"))
        fa4.flash_attn_func(q, k, v, precision=f"{precision}-forward").sum().backward()
    assert "native_backward" not in taken and q.grad.isfinite().all()


def _beside_16_bits(seed, precision, dout, dlse=None, **changes):
    """Relative errors of dq, dk and dv to the 16-bit backward of the same numbers, by sequence."""
    draw = torch.Generator().manual_seed(seed)
    shape = dict(q=(2, 150, HEADS, 64), k=(2, 150, HEADS // 2, 64), v=(2, 150, HEADS // 2, 64))
    tensors = [torch.randn(shape[name], generator=draw).to(torch.bfloat16) for name in "qkv"]
    tensors[0] *= changes.pop("logits", 1.0)
    found = []
    chip = emulate("sm_100a", sms=2, seed=seed)
    for of_call, where in ((precision, chip), (f"{precision}-forward", contextlib.nullcontext())):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with where:
            out, lse = fa4.flash_attn_func(*leaves, precision=of_call, return_lse=True, causal=True)
            outputs, upstream = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
            found.append(torch.autograd.grad(outputs, leaves, upstream))
    return [[float((x - y).norm() / (y.norm() + 1e-30)) for x, y in zip(a, b)] for a, b in zip(*found)]


def _dout(seed):
    return torch.randn(2, 150, HEADS, 64, generator=torch.Generator().manual_seed(seed + 1)).to(torch.bfloat16)


def test_gradients_of_few_rows(precision, seed):
    """The loss of a last token, or of one answer: dS must not be cut off at the usual size of all rows."""
    dout = torch.zeros(2, 150, HEADS, 64, dtype=torch.bfloat16)
    dout[:, 20] = _dout(seed)[:, 20]
    errors = _beside_16_bits(seed, precision, dout, logits=3.0)
    assert max(map(max, errors)) < 0.09, errors


def test_gradients_of_lse_alone(precision, seed):
    dlse = torch.randn(2, HEADS, 150, generator=torch.Generator().manual_seed(seed))
    errors = _beside_16_bits(seed, precision, torch.zeros(2, 150, HEADS, 64, dtype=torch.bfloat16), dlse)
    assert max(map(max, errors[:2])) < 0.09, errors  # there is no dv
    errors = _beside_16_bits(seed, precision, _dout(seed), 1000 * dlse)
    assert max(map(max, errors[:2])) < 0.09, errors


def test_a_sequence_has_factors_of_its_own(precision, seed):
    dout = _dout(seed)
    dout[0] *= 1e4
    errors = _beside_16_bits(seed, precision, dout)
    dout[0, 3, 0, 0] = torch.nan
    with_nan = _beside_16_bits(seed, precision, dout)
    for of_all, beside_nan in zip(errors, with_nan):
        assert of_all[1] < 0.09 and beside_nan[1] == of_all[1], (errors, with_nan)


@pytest.mark.parametrize("scale", [2.0**-85, 2.0**-60, 65504.0, 2.0**63])
def test_tiny_and_large_gradients(precision, scale, seed):
    """In float16, numbers near its end must not become inf when they are rounded to e4m3."""
    dtype = torch.float16 if scale == 65504.0 else torch.bfloat16
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 140, 2, 64, generator=draw).to(dtype).requires_grad_() for _ in range(3))
    dout = (torch.rand(1, 140, 2, 64, generator=draw) * scale).to(dtype)
    with emulate("sm_100a", sms=2, seed=seed):
        grads = torch.autograd.grad(fa4.flash_attn_func(q, k, v, precision=precision), (q, k, v), dout)
    plain = torch.autograd.grad(fa4.flash_attn_func(q, k, v, precision=f"{precision}-forward"), (q, k, v), dout)
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


def test_traces_and_second_derivatives(precision):
    """The backward is an operator: compiled training traces it, and it has no second derivative."""
    q, k, v = (torch.randn(1, 32, 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def gradients_of(*tensors):
        return torch.autograd.grad(fa4.flash_attn_func(*tensors, precision=precision).float().sum(), tensors)

    with emulating(CHIP), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        graph = make_fx(gradients_of)(*(mode.from_tensor(x) for x in (q, k, v)))
    assert any(node.target is torch.ops.fa4.backward_8bit.default for node in graph.graph.nodes)
    with emulate("sm_100a", sms=2):
        (dq,) = torch.autograd.grad(
            fa4.flash_attn_func(q, k, v, precision=precision).float().square().sum(), (q,), create_graph=True
        )
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            dq.float().sum().backward()


def test_what_is_recorded_of_blocks_is_compiled(tmp_path):
    spec = replace(SPEC, head_dim=64, head_dim_v=64, operands=Operands.MXFP8)
    keys = [key for _, key in compiled_ahead(tmp_path, ahead.AheadProblem(100, spec, ProblemSize(1, 300, 300)))]
    assert any("sm100.backward" in str(key) and "MXFP8" in str(key) for key in keys)
