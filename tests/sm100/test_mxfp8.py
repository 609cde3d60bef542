"""Attention on e4m3 tensors with scales of blocks of 32 numbers, which the emulated Blackwell chip multiplies with
them."""

from dataclasses import replace

import pytest
import torch
from warpcheck.machine import SCHEDULES

import fa4
from fa4.api import ahead
from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number, chip_of, emulating
from fa4.runtime.spec import AttentionSpec, Operands, ProblemSize
from fa4.sm100.fwd.kernel import channels, smem_map, tmem_map
from fa4.sm100.fwd.plan import Sm100Forward
from fa4.torch_ops import recipes
from tests.fp8.heads import explained, judged, noting_kernels, rounding_of

CHIP = chip_by_number(100)
SPEC = AttentionSpec(torch.bfloat16, 128, 128, 8, 8, 0.1, operands=Operands.MXFP8)
PACKED = ((300, 520), (0, 40), (70, 0), (1, 130), (129, 33))
CASES = (
    Case("full", seqlen_q=300, seqlen_k=520, head_dim=64, batch=2, heads_q=2),
    Case("causal", seqlen_q=530, seqlen_k=530, head_dim=128, causal=True),
    Case("more_keys", seqlen_q=257, seqlen_k=900, head_dim=128, causal=True, heads_q=4, heads_kv=2),
    Case("window", seqlen_q=300, seqlen_k=700, head_dim=64, window_size=(200, 30), softcap=15.0, sink=True),
    Case("group_of_three", seqlen_q=300, seqlen_k=300, head_dim=96, head_dim_v=80, heads_q=3, heads_kv=1),
    Case("two_sizes", seqlen_q=300, seqlen_k=400, head_dim=192, head_dim_v=128, causal=True),
    Case("one_block", seqlen_q=261, seqlen_k=13, head_dim=32, head_dim_v=48, softmax_scale=0.7),
    Case("empty_rows", seqlen_q=300, seqlen_k=100, head_dim=64, causal=True, sink=True),
    Case("few_keys_used", seqlen_q=256, seqlen_k=333, head_dim=96, batch=2, seqused=((None, 333), (None, 7))),
    Case("packed", lengths=PACKED, head_dim=128, head_dim_v=64, heads_q=2, softcap=9.0),
    Case("packed_causal", lengths=PACKED, head_dim=64, causal=True, heads_q=4, heads_kv=2),
    Case("packed_used", lengths=PACKED, head_dim=128, seqused=((300, 500), (0, 33), (70, 0), (1, 64), (100, 1))),
)


def of_blocks(problem, seed):
    """The problem on the numbers that e4m3 tensors and scales of blocks stand for, and the call's arguments. Blocks
    differ by up to 2^8."""
    generator, inputs = torch.Generator().manual_seed(seed), problem.inputs
    arguments, exact = {}, []
    bounds = (inputs.cu_seqlens_q, inputs.seqused_q), *[(inputs.cu_seqlens_k, inputs.seqused_k)] * 2
    for name, x, (cu_seqlens, seqused) in zip("qkv", inputs[:3], bounds):
        shape = (*x.shape[:-1], -(-x.shape[-1] // 32)) if name != "v" else (*x.shape[:-2], 1, x.shape[-1])
        powers = torch.randint(-4, 5, shape, generator=generator).float().exp2()
        x = x.float() * (powers if name == "v" else powers.repeat_interleave(32, -1)[..., : x.shape[-1]] / 4)
        options = dict(cu_seqlens=cu_seqlens, seqused=seqused, axis="tokens" if name == "v" else "head_dim")
        data, scales = fa4.quantize(x, "mxfp8", **options)
        arguments |= {name: data, f"{name}_descale": scales}
        exact.append(fa4.dequantize(data, scales, torch.float32, cu_seqlens=cu_seqlens))
    spec = replace(problem.spec, dtype=torch.bfloat16, operands=Operands.MXFP8)
    problem = replace(problem, inputs=inputs._replace(q=exact[0], k=exact[1], v=exact[2]), spec=spec)
    return replace(problem, rounding=rounding_of(problem, 100)), arguments


def run(seed, arguments, problem):
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    with emulate("sm_100a", sms=2, seed=seed, schedule=schedule), noting_kernels() as taken:
        results = problem.call(**arguments)
    assert taken["native"] is Operands.MXFP8
    return results


@pytest.mark.rotates(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_is_right(case, seed):
    problem, arguments = of_blocks(cases.make(case, seed), seed)
    cases.assert_right(judged(problem, *run(seed, arguments, problem)), f"{case.name}, seed {seed}")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_each_scale_counts(name, seed):
    """With one block's scales doubled for all tokens, the result is that of the numbers with these scales, and another
    one: of a single token's, whose key may have a weight near zero, that is not sure."""
    problem, arguments = of_blocks(cases.make(CASES[0], seed), seed)
    before = run(seed, arguments, problem)
    bits = arguments[f"{name}_descale"].view(torch.uint8).clone()
    bits[1, :, 1, -1] += 1
    changed = arguments | {f"{name}_descale": bits.view(recipes.E8M0)}
    exact = fa4.dequantize(changed[name], changed[f"{name}_descale"], torch.float32)
    problem = replace(problem, inputs=problem.inputs._replace(**{name: exact}))
    out, lse = run(seed, changed, problem)
    cases.assert_right(judged(problem, out, lse), f"seed {seed}")
    assert not torch.equal(out, before[0]) and (name == "v") == torch.equal(lse, before[1])


@pytest.mark.parametrize("index", [8, 11], ids=["dense", "packed"])
def test_scales_of_unused_keys_may_hold_anything(index, seed):
    problem, arguments = of_blocks(cases.make(CASES[index], seed), seed)
    of_k, of_v = (arguments[f"{name}_descale"].view(torch.uint8).clone() for name in "kv")
    if index == 8:
        of_k[1, 7:], of_v[1, 1:] = 255, 255  # the second sequence has seven keys
    else:
        cu_seqlens, used = problem.inputs.cu_seqlens_k.tolist(), problem.inputs.seqused_k.tolist()
        for b, (first, stop, count) in enumerate(zip(cu_seqlens, cu_seqlens[1:], used)):
            of_k[first + count : stop] = 255
            of_v[first // 32 + b + -(-count // 32) : stop // 32 + b + 1] = 255
    scales = dict(k_descale=of_k.view(recipes.E8M0), v_descale=of_v.view(recipes.E8M0))
    cases.assert_right(judged(problem, *run(seed, arguments | scales, problem)), f"seed {seed}")


def test_scales_have_any_strides(seed):
    problem, arguments = of_blocks(cases.make(CASES[0], seed), seed)
    before = run(seed, arguments, problem)
    q, k, v = (arguments[f"{name}_descale"].view(torch.uint8) for name in "qkv")
    k = torch.stack((k, k), -1)[..., 0]
    views = q.transpose(1, 2).contiguous().transpose(1, 2), k, v.flip(1).clone().flip(1)
    scales = {f"{name}_descale": x.view(recipes.E8M0) for name, x in zip("qkv", views)}
    for x, y in zip(before, run(seed, arguments | scales, problem)):
        assert torch.equal(x, y)


def test_keys_are_split(seed):
    problem, arguments = of_blocks(cases.make(Case("split", seqlen_q=140, seqlen_k=1500, head_dim=64), seed), seed)
    with emulate("sm_100a", sms=8, seed=seed), noting_kernels() as taken:
        what = (
            replace(SPEC, head_dim=64, head_dim_v=64, heads_q=1, heads_kv=1),
            ProblemSize(1, 140, 1500),
            chip_of(arguments["q"].device),
        )
        assert Sm100Forward(*what).splits > 1
        results = problem.call(**arguments)
    assert taken["native"] is Operands.MXFP8
    cases.assert_right(judged(problem, *results), f"seed {seed}")


def test_what_is_recorded_is_compiled(tmp_path):
    problem = ahead.AheadProblem(100, replace(SPEC, head_dim=64, head_dim_v=64), ProblemSize(1, 300, 300))
    keys = [key for _, key in ahead.compile_into(tmp_path, problem)]
    assert len(keys) == 1 and "MXFP8" in str(keys[0])


def test_a_tensor_may_have_one_factor_instead(seed):
    problem, arguments = of_blocks(cases.make(CASES[2], seed), seed)
    factor = torch.rand(1, 2, generator=torch.Generator().manual_seed(seed)) + 0.5
    exact = arguments["k"].float() * factor[:, None, :, None]
    problem = replace(problem, inputs=problem.inputs._replace(k=exact))
    out, lse = run(seed, arguments | dict(k_descale=factor), problem)
    cases.assert_right(judged(problem, out, lse), f"seed {seed}")


def test_training_takes_it_for_the_forward(seed):
    case = Case("training", seqlen_q=300, seqlen_k=300, head_dim=64, causal=True)
    inputs = cases.make(case, seed).inputs
    q, k, v = (x.bfloat16().requires_grad_() for x in inputs[:3])
    with emulate("sm_100a", sms=2, seed=seed), noting_kernels() as taken:
        out = fa4.flash_attn_func(q, k, v, causal=True, precision="mxfp8")
        out.float().square().mean().backward()
    assert taken["native"] is Operands.MXFP8
    assert q.grad is not None and q.grad.isfinite().all()


def test_every_head_dim_fits_the_chip():
    for d, dv in ((d, dv) for d in (32, 64, 96, 128) for dv in range(16, 144, 16)):
        cfg = Sm100Forward(replace(SPEC, head_dim=d, head_dim_v=dv), ProblemSize(1, 4096, 4096), CHIP).cfg
        assert smem_map(cfg, channels(cfg)).nbytes <= CHIP.smem_per_block, (d, dv)
        assert tmem_map(cfg).end <= 512 and cfg.kv_stages >= 3, (d, dv)


@pytest.mark.parametrize(
    "changes, is_taken",
    [
        ({}, True),
        (dict(q=(2, 128, 4, 64)), False),
        (dict(q=(2, 300, 4, 192), k=(2, 300, 4, 192), v=(2, 300, 4, 192)), False),
        (dict(softmax_scale=-0.1), False),
        (dict(backend="sm80"), False),
        (dict(score_mod=lambda s, b, h, i, j: s + i), True),
        (dict(dropout_p=0.1), True),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_it_takes(changes, is_taken):
    """Other calls are dequantised."""
    scales = recipes.ones(changes.get("q", (2, 300, 4, 64)), 2, "head_dim", torch.device("cpu"))
    found = explained(CHIP, changes | dict(q_descale=recipes.as_e8m0(scales)))
    assert (found.spec.operands is Operands.MXFP8) == is_taken, str(found)


def test_explain_knows_training():
    x = torch.empty(2, 300, 4, 64, dtype=torch.bfloat16)
    with emulating(CHIP):
        assert fa4.explain(x, x, x, precision="mxfp8").spec.operands is Operands.MXFP8
        narrow = x[..., :48]
        with pytest.raises(ValueError, match="q has head_dim 48, expected a multiple of 32 for precision 'mxfp8'"):
            fa4.explain(narrow, narrow, narrow, precision="mxfp8")


def test_scales_along_the_other_axis_are_dequantised():
    scales = recipes.as_e8m0(recipes.ones((2, 300, 4, 64), 2, "tokens", torch.device("cpu")))
    assert explained(CHIP, dict(k_descale=scales)).spec.operands is None
    assert explained(CHIP, dict(v_descale=scales)).spec.operands is Operands.MXFP8
