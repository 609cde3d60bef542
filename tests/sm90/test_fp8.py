"""Attention on e4m3 tensors on the emulated Hopper chip, whose kernel multiplies 8-bit numbers."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from warpcheck.machine import SCHEDULES

import fa4
from bench import static
from fa4.api import ahead
from fa4.emulator import emulate
from fa4.fwd.launchers import TRANSPOSE, TRANSPOSED_KEYS, TransposeConfig
from fa4.oracle import cases, reference
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number, chip_of
from fa4.runtime.spec import AttentionInputs, AttentionSpec, Operands, ProblemSize
from fa4.sm90.fwd.fp8.kernel import channels, smem_map
from fa4.sm90.fwd.fp8.plan import Fp8Forward
from tests.building import compiled_ahead
from tests.fp8.heads import CASES, explained, judged, noting_kernels, of_heads
from tests.machine_code import machine_code

E4M3 = torch.float8_e4m3fn
CHIP = chip_by_number(90)
LONG = Case("long", seqlen_q=256, seqlen_k=5000, head_dim=64, head_dim_v=32)
WIDE = (
    Case("wide", seqlen_q=261, seqlen_k=450, head_dim=256, causal=True, heads_q=2, heads_kv=1, sink=True),
    Case("wide_window", seqlen_q=300, seqlen_k=700, head_dim=192, head_dim_v=128, window_size=(200, 30), softcap=15.0),
    Case(
        "wide_values",
        seqlen_q=256,
        seqlen_k=333,
        head_dim=80,
        head_dim_v=208,
        batch=2,
        seqused=((None, 333), (None, 7)),
    ),
    Case("long_wide", seqlen_q=256, seqlen_k=5000, head_dim=144, head_dim_v=256),
)
SPEC = AttentionSpec(torch.bfloat16, 128, 128, 8, 8, 0.1, operands=Operands.E4M3)


def run(case, seed, arguments, problem, **changes):
    with emulate("sm_90a", sms=3, seed=seed, schedule=SCHEDULES[seed % len(SCHEDULES)]):
        tensors = [arguments[name] for name in "qkv"]
        assert "e4m3" in fa4.explain(*tensors, causal=case.causal, seqused_k=problem.inputs.seqused_k).tiles
        return problem.call(**arguments | changes)


@pytest.mark.rotates(4)
@pytest.mark.parametrize("case", (*CASES, LONG, *WIDE), ids=str)
def test_case_is_right(case, seed):
    problem, arguments = of_heads(cases.make(case, seed), seed, 90)
    if case.seqused:
        for name in ("k", "v"):  # rows that no sequence uses
            for row, (_, count) in zip(arguments[name], case.seqused):
                row[count:] = torch.nan
    out, lse = run(case, seed, arguments, problem)
    assert out.dtype == torch.bfloat16
    cases.assert_right(judged(problem, out, lse), f"{case.name}, seed {seed}")


@pytest.mark.rotates(4)
def test_strides_orders_and_repeats_change_no_bit(seed):
    case = CASES[3]
    problem, arguments = of_heads(cases.make(case, seed), seed, 90)
    views = {
        name: arguments[name].view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3)
        for name in "qkv"
    }
    results = [run(case, seed + i, arguments, problem, **changes) for i, changes in enumerate(({}, {}, views))]
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other))


def test_an_expanded_head_and_a_factor_of_all(seed):
    case = Case("expanded", seqlen_q=256, seqlen_k=200, heads_q=4, heads_kv=4)
    problem, arguments = of_heads(cases.make(case, seed), seed, 90)
    arguments |= {name: arguments[name][:, :, :1].expand(-1, -1, 4, -1) for name in "kv"}
    arguments |= dict(q_descale=None, k_descale=torch.tensor(0.5), v_descale=torch.tensor([2.0]))
    exact = [arguments[name].float() * factor for name, factor in (("q", 1.0), ("k", 0.5), ("v", 2.0))]
    problem = replace(problem, inputs=problem.inputs._replace(q=exact[0], k=exact[1], v=exact[2]))
    cases.assert_right(judged(problem, *run(case, seed, arguments, problem)), f"seed {seed}")


def test_transposed_factors(seed):
    problem, arguments = of_heads(cases.make(CASES[0], seed), seed, 90)
    expected = run(CASES[0], seed, arguments, problem)
    for names in (("q_descale",), ("q_descale", "k_descale", "v_descale")):
        views = {name: arguments[name].t().contiguous().t() for name in names}
        got = run(CASES[0], seed, arguments, problem, **views)
        assert all(torch.equal(x, y) for x, y in zip(got, expected))


def test_what_is_recorded_is_compiled(tmp_path):
    """Of a call, the kernel that it launches, and the transposition."""
    spec = replace(SPEC, head_dim=64, head_dim_v=64)
    problem = ahead.AheadProblem(90, spec, ProblemSize(1, 300, 300))
    keys = {key[0] for _, key in compiled_ahead(tmp_path, problem)}
    assert keys == {"sm90.fp8", "fwd.transpose"}


@pytest.mark.rotates(4)
def test_training_takes_its_forward(seed):
    """The backward is that of the numbers that the forward multiplied."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 256, 2, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    with emulate("sm_90a", sms=4, seed=seed):
        out = fa4.flash_attn_func(q, k, v, precision="fp8", causal=True, backend="sm90")
        plain = fa4.flash_attn_func(q, k, v, causal=True, backend="sm90")
        dout = torch.randn(out.shape, generator=generator).bfloat16()
        got, expected = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, plain))
    assert 1e-3 < (out - plain).norm() / plain.norm() < 0.08
    for x, y in zip(got, expected):
        assert (x - y).norm() / y.norm() < 0.12


H100_BITS = {
    (2, 257, 333, 2, 2, 96, False): "e61eebd3dc1023aa",
    (3, 300, 2500, 1, 1, 128, True): "bbe40fc2ba9b29fb",
}


@pytest.mark.parametrize("seed, queries, keys, heads_q, heads_kv, head_dim, causal", H100_BITS)
def test_an_h100_gave_the_same_bits(seed, queries, keys, heads_q, heads_kv, head_dim, causal):
    """Scores are whole numbers in the base of two, so that exponentials are exact. What is left are the sums of e4m3
    products, of which a tensor core keeps few bits. On 2026-11-27 an H100's out and lse had these digests."""
    generator = torch.Generator().manual_seed(seed)
    batch = 2 if seed == 2 else 1
    shapes = (batch, queries, heads_q, head_dim), (batch, keys, heads_kv, head_dim)
    q, k = (torch.randint(-1, 2, shape, generator=generator).float().to(E4M3) for shape in shapes)
    v = torch.randn(shapes[1], generator=generator).to(E4M3)
    with emulate("sm_90a", sms=3, seed=seed):
        out, lse = fa4.flash_attn_func(q, k, v, causal=causal, softmax_scale=math.log(2), return_lse=True)
    digest = hashlib.sha256(out.view(torch.int16).numpy().tobytes() + lse.numpy().tobytes())
    assert digest.hexdigest()[:16] == H100_BITS[seed, queries, keys, heads_q, heads_kv, head_dim, causal]


@pytest.mark.parametrize("columns, keys, used", [(16, 1, None), (80, 300, (300, 0, 131)), (128, 129, None)])
def test_transposition(columns, keys, used, seed):
    """Keys in the order of the products, and zeros past the sequence."""
    v = torch.randint(0, 255, (3, keys, 2, columns), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    padded = -(-keys // TRANSPOSED_KEYS) * TRANSPOSED_KEYS
    result = torch.empty(3, 2, columns, padded, dtype=torch.uint8)
    seqused = None if used is None else torch.tensor(used, dtype=torch.int32)
    with emulate("sm_90a", sms=2, seed=seed):
        chip = chip_of(v.device)
        TRANSPOSE.launcher(TransposeConfig(columns, used is not None), chip)(v, result, seqused)
    rows = torch.arange(padded).view(-1, 2, 4, 2).transpose(1, 2).flatten()  # key at each position
    expected = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, padded - keys)).clone()
    for x, count in zip(expected, used or ()):
        x[count:] = 0
    assert torch.equal(result, expected[:, rows].permute(0, 2, 3, 1))


@pytest.mark.rotates(4)
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(window_right=0),
        dict(head_dim=64, head_dim_v=64),
        dict(head_dim=256, head_dim_v=256),
        dict(window_left=99, softcap=5.0, has_sink=True),
    ],
    ids=str,
)
def test_nothing_spills_and_products_are_not_serialised(changes, tmp_path, disassembler):
    forward = Fp8Forward(replace(SPEC, **changes), ProblemSize(4, 4096, 4096), CHIP)
    assert static.problems(machine_code(forward, tmp_path)[1]) == []


def test_every_head_dim_fits_the_chip():
    for d in range(16, 272, 16):
        for dv in range(16, 272, 16):
            cfg = Fp8Forward(replace(SPEC, head_dim=d, head_dim_v=dv), ProblemSize(1, 512, 4096), CHIP).cfg
            assert smem_map(cfg, channels(cfg)).nbytes <= CHIP.smem_per_block, (d, dv)


@pytest.mark.parametrize(
    "changes, is_taken",
    [
        ({}, True),
        (dict(q=(2, 255, 4, 64)), False),
        (dict(q=(2, 300, 4, 272), k=(2, 300, 4, 272)), False),
        (dict(q=(2, 300, 4, 72), k=(2, 300, 4, 72)), False),
        (dict(k_descale=torch.ones(2, 3, 4)), False),
        (dict(q_descale=torch.ones(2, 8), q=(2, 300, 8, 64)), False),
        (dict(softmax_scale=-0.1), False),
        (dict(backend="sm80"), False),
        (dict(backend="sm90"), True),
        (dict(score_mod=lambda s, b, h, i, j: s + i), False),
        (dict(dropout_p=0.1), False),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_it_takes(changes, is_taken):
    """Other calls are dequantised."""
    found = explained(CHIP, changes)
    assert ("e4m3" in found.tiles) == is_taken, str(found)


@pytest.mark.rotates(4)
def test_the_reference_adds_as_the_tensor_core(seed):
    """Also where products cancel each other, so that few bits are left of the scores, which lse shows."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, length, 1, 128, generator=draw).to(E4M3) for length in (256, 200, 200))
    with emulate("sm_90a", sms=2, seed=seed), noting_kernels() as taken, torch.no_grad():
        _, lse = fa4.flash_attn_func(q, k, v, return_lse=True)
    inputs = AttentionInputs(q.float(), k.float(), v.float(), max_seqlen_q=256, max_seqlen_k=200)
    spec = AttentionSpec(torch.bfloat16, 128, 128, 1, 1, 128**-0.5, operands=Operands.E4M3)
    _, exact = reference.forward(inputs, spec)
    _, expected = reference.forward(inputs, spec, precise=False, **reference.HOPPER_8BIT)
    assert taken["native"] is Operands.E4M3
    torch.testing.assert_close(lse, expected, atol=3e-6, rtol=0)
    assert (lse - exact).abs().max() > 1e-4
