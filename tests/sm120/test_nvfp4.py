"""Attention on e2m1 tensors with scales of blocks of 16 numbers, which the emulated consumer Blackwell chip multiplies
with them."""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES, Checks

import fa4
from bench import static
from fa4.api import ahead
from fa4.core.fragment_coords import FragmentCoords
from fa4.emulator import emulate
from fa4.fwd.variant import Schedule
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.pipeline.roles import REGISTERS_PER_SM
from fa4.runtime import nvfp4
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.spec import AttentionSpec, Operands, ProblemSize
from fa4.sm120 import mma
from fa4.sm120.fwd.kernel import channels, roles, smem_map
from fa4.sm120.fwd.plan import Sm120Forward
from fa4.sm120.fwd.tiles import ForwardTiles
from tests.building import compiled_ahead
from tests.fp8.heads import judged
from tests.machine_code import machine_code
from tests.sm120.running import run_multiplied

pytestmark = pytest.mark.rotates(9)

CHIP = chip_by_number(120)
SPEC = AttentionSpec(torch.bfloat16, 128, 128, 8, 8, 0.1, operands=Operands.NVFP4)
_CASES = (
    Case("full", seqlen_q=300, seqlen_k=520, head_dim=64, batch=2, heads_q=2),
    Case("causal", seqlen_q=530, seqlen_k=530, head_dim=128, causal=True),
    Case("more_keys", seqlen_q=257, seqlen_k=901, head_dim=128, causal=True, heads_q=4, heads_kv=2),
    Case("window", seqlen_q=300, seqlen_k=700, head_dim=64, window_size=(200, 30), softcap=15.0, sink=True),
    Case("left", seqlen_q=300, seqlen_k=300, head_dim=64, batch=2, window_size=(10, None), heads_q=3, heads_kv=1),
    Case("group_of_three", seqlen_q=300, seqlen_k=300, head_dim=96, head_dim_v=80, heads_q=3, heads_kv=1),
    Case("one_block", seqlen_q=261, seqlen_k=13, head_dim=32, head_dim_v=48, softmax_scale=0.7),
    Case("empty_rows", seqlen_q=300, seqlen_k=100, head_dim=64, causal=True, sink=True),
    Case("few_keys_used", seqlen_q=256, seqlen_k=333, head_dim=96, batch=2, seqused=((None, 333), (None, 7))),
    Case("large", seqlen_q=300, seqlen_k=300, head_dim=64, batch=2, logits=300.0),
    Case("columns_of_v", seqlen_q=130, seqlen_k=200, head_dim=128, head_dim_v=112, causal=True),
    # Rows of all heads of a group in a tile: of one query, of few, and of a tile of several consumers.
    Case("one_query", batch=2, seqlen_q=1, seqlen_k=200, head_dim=64, heads_q=6, heads_kv=2, causal=True),
    Case("few_queries", seqlen_q=5, seqlen_k=200, head_dim=128, heads_q=8, heads_kv=2, sink=True),
    Case("group_of_twelve", seqlen_q=40, seqlen_k=200, head_dim=64, heads_q=12, heads_kv=1, causal=True),
)
run = functools.partial(run_multiplied, Operands.NVFP4)
CASES = {case.name: case for case in _CASES}


def made(case, seed):
    """The problem on the numbers that e2m1 tensors and their scales stand for, and the call's arguments. Scales of
    blocks differ by up to 2^6, and may be far above or below 1."""
    problem = cases.make(case, seed)
    generator, inputs = torch.Generator().manual_seed(seed), problem.inputs
    of_scores, of_v = (3 * torch.randint(-1, 2, (2,), generator=generator)).tolist()
    sizes = {"q": 2.0**of_scores, "k": 2.0**-of_scores, "v": 2.0**of_v}
    used = None if case.seqused is None else torch.tensor([k for _, k in case.seqused], dtype=torch.int32)
    arguments, exact = {}, []
    for name, x in zip("qkv", inputs[:3]):
        along_tokens = name == "v"
        shape = (*x.shape[:-1], x.shape[-1] // 16) if not along_tokens else (x.shape[0], 1, *x.shape[2:])
        powers = torch.randint(-3, 4, shape, generator=generator).float().exp2()
        powers = powers if along_tokens else powers.repeat_interleave(16, -1) / 4
        axis, seqused = ("tokens" if along_tokens else "head_dim"), None if name == "q" else used
        four = fa4.quantize(sizes[name] * x.float() * powers, "nvfp4", axis=axis, seqused=seqused)
        arguments |= {name: four.data, f"{name}_descale": four.scales}
        exact.append(fa4.dequantize(*four, torch.float32, seqlen=x.shape[1] if along_tokens else None))
    spec = replace(problem.spec, dtype=torch.bfloat16, operands=Operands.NVFP4)
    inputs = inputs._replace(q=exact[0], k=exact[1], v=exact[2])
    return replace(problem, inputs=inputs, spec=spec), arguments


def check(problem, arguments, seed, **options):
    """A call is right, with the same bits under two interleavings."""
    results = [run(problem, arguments, seed + i, SCHEDULES[(seed + i) % len(SCHEDULES)], **options) for i in range(2)]
    cases.assert_right(judged(problem, *results[0]), f"{problem.case}, seed {seed}")
    assert all(torch.equal(x, y) for x, y in zip(*results)), f"{problem.case}, seed {seed}"


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_case_is_right(case, seed):
    check(*made(case, seed), seed)


def test_keys_are_split(seed):
    """Also those of single queries, which one consumer has."""
    for rows in (140, 1):
        case = Case("split", seqlen_q=rows, seqlen_k=900, head_dim=64, heads_q=2, heads_kv=1)
        spec = replace(SPEC, head_dim=64, head_dim_v=64, heads_q=2, heads_kv=1)
        assert Sm120Forward(spec, ProblemSize(1, rows, 900), chip_by_number(120, sms=8)).splits > 1
        check(*made(case, seed), seed, sms=8)


ROWS = (  # each of them with kernels of its own
    ForwardTiles(3, 64, schedule=Schedule.SINGLE),
    ForwardTiles(2, 128),
    ForwardTiles(1, 64),
)
TRIMMED = (  # consumers pass blocks over, more of them than there are stages
    Case("keys_of_several_consumers", seqlen_q=300, seqlen_k=400, head_dim=64, causal=True),
    Case("rows_without_keys", seqlen_q=400, seqlen_k=100, head_dim=64, causal=True),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_of_the_table(row, seed):
    for case in TRIMMED:
        check(*made(case, seed), seed, row=row)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_each_scale_counts(name, seed):
    """With the last block's scales doubled for all tokens, the result is that of the numbers with these scales."""
    problem, arguments = made(CASES["full"], seed)
    before = run(problem, arguments, seed)
    bits = arguments[f"{name}_descale"].view(torch.uint8).clone()
    if name == "v":
        bits[1, -1, 1] = (bits[1, -1, 1].int() + 16).clamp(max=0x7E).to(torch.uint8)  # two powers of two
    else:
        bits[1, :, 1, -1] = (bits[1, :, 1, -1].int() + 8).clamp(max=0x7E).to(torch.uint8)
    changed = arguments | {f"{name}_descale": bits.view(nvfp4.SCALE_DTYPE)}
    tokens = problem.inputs.v.shape[1] if name == "v" else None
    exact = fa4.dequantize(changed[name], changed[f"{name}_descale"], torch.float32, seqlen=tokens)
    problem = replace(problem, inputs=problem.inputs._replace(**{name: exact}))
    out, lse = run(problem, changed, seed)
    cases.assert_right(judged(problem, out, lse), f"seed {seed}")
    assert not torch.equal(out, before[0]) and (name == "v") == torch.equal(lse, before[1])


def test_scales_and_numbers_of_unused_keys_may_be_anything(seed):
    problem, arguments = made(CASES["few_keys_used"], seed)
    of_k, of_v, k, v = (arguments[n].view(torch.uint8).clone() for n in ("k_descale", "v_descale", "k", "v"))
    of_k[1, 7:], of_v[1, 1:], k[1, 7:] = 0x7F, 0x7F, 0x77
    v[1, 4:], v[1, 3] = 0x77, v[1, 3] | 0x70  # the eighth key is beside the seventh
    codes = {n: x.view(nvfp4.DTYPE) for n, x in (("k", k), ("v", v))}
    scales = {f"{n}_descale": x.view(nvfp4.SCALE_DTYPE) for n, x in (("k", of_k), ("v", of_v))}
    results = run(problem, arguments, seed), run(problem, arguments | codes | scales, seed)
    assert all(torch.equal(x, y) for x, y in zip(*results)), f"seed {seed}"


def test_strides_change_no_bit(seed):
    problem, arguments = made(CASES["full"], seed)
    views = {}
    for name, x in arguments.items():
        bytes_ = x.view(torch.uint8)
        views[name] = bytes_.transpose(1, 2).contiguous().transpose(1, 2).view(x.dtype)
    wide = arguments["k_descale"].view(torch.uint8)
    views["k_descale"] = torch.stack((wide, wide), -1)[..., 0].view(nvfp4.SCALE_DTYPE)
    odd = torch.zeros(arguments["v"].numel() + 1, dtype=torch.uint8)[1:].view(arguments["v"].shape)
    views["v"] = odd.copy_(arguments["v"].view(torch.uint8)).view(nvfp4.DTYPE)
    for x, y in zip(run(problem, arguments, seed), run(problem, arguments | views, seed)):
        assert torch.equal(x, y), f"seed {seed}"


def test_a_nan_in_a_query_shows_in_its_row_alone(seed):
    """Numbers of 4 bits have no NaN, but their scales do."""
    problem, arguments = made(Case("nan", batch=2, seqlen_q=150, seqlen_k=200, head_dim=64, sink=True), seed)
    clean = run(problem, arguments, seed)
    arguments["q_descale"].view(torch.uint8)[0, 77, 1, 2] = 127
    out, lse = run(problem, arguments, seed)
    assert out[0, 77, 1].isnan().all() and lse[0, 1, 77].isnan()
    for x, expected, place in ((out, clean[0], (0, 77, 1)), (lse, clean[1], (0, 1, 77))):
        x[place] = expected[place]
        assert torch.equal(x, expected), f"seed {seed}"


@pytest.mark.parametrize("rows", [300, 20], ids=["many_rows", "few_rows"])
def test_lists_of_blocks_and_functions(rows, seed):
    """Of functions that know the keys of scores; scales are loaded ahead for the next block of a list."""
    problem, arguments = made(Case("lists", seqlen_q=rows, seqlen_k=900, head_dim=64, heads_q=2), seed)
    mask = fa4.create_block_mask(lambda b, h, i, j: ((j // 128) % 3 == 0) & (j - i < 777), 1, None, rows, 900)
    options = dict(block_mask=mask, score_mod=lambda s, b, h, i, j: s - ((i - j) / 64) * (j % 5))
    out, lse = run(problem, arguments | options, seed)
    q, k, v = (x.double() for x in problem.inputs[:3])
    exact, of_lse = fa4.flash_attn_func(q, k, v, **options, return_lse=True, backend="torch")
    assert (out.double() - exact).norm() / exact.norm() < 0.12 and (lse - of_lse).abs().max() < 1e-5, f"seed {seed}"


def test_p_is_rounded_as_numbers_are_quantised(seed):
    """Relative to 2688 for a row's largest: scores are exact logarithms to base 2, and V is the identity."""
    keys = 128
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    exponents = -magnitudes[torch.randint(8, (keys,), generator=generator)]
    exponents[:2], exponents[16:32], exponents[32:48], exponents[70] = torch.tensor([0.0, -1.0]), -16.0, -24.0, -24.0
    q, k = torch.zeros(1, 1, 1, 32), torch.zeros(1, keys, 1, 32)
    q[..., 0], k[0, :, 0, 0] = 6.0, exponents
    k[0, :, 0, 1] = 6 * torch.where(exponents < -6, 4.0, 1.0)  # so that their scales are 4 and 1
    v = torch.eye(keys).view(1, keys, 1, keys)
    (q4, sq), (k4, sk) = (fa4.quantize(x, "nvfp4") for x in (q, k))
    v4, sv = fa4.quantize(v, "nvfp4", axis="tokens")
    assert torch.equal(fa4.dequantize(k4, sk, torch.float32), k)
    unit = fa4.dequantize(v4, sv, torch.float32).max()  # of the identity's ones, as they are rounded
    scales = dict(q_descale=sq, k_descale=sk, v_descale=sv)
    with emulate("sm_120a", sms=2, seed=seed):
        out, lse = fa4.flash_attn_func(q4, k4, v4, **scales, softmax_scale=math.log(2) / 6, return_lse=True)
    p = exponents.exp2()
    expected = nvfp4.values(*nvfp4.quantised(p * 2688)) / 2688
    got = out.flatten().double() / unit * lse.double().exp().flatten()
    assert torch.equal(got == 0, expected == 0) and not got[32:48].any() and got[70] == 0 and got[16:32].all()
    torch.testing.assert_close(got, expected.double(), rtol=2**-8, atol=0, msg=lambda text: f"{text}, seed {seed}")


def test_keys_are_in_the_order_of_the_products():
    """Every key once; 16 neighbours in the registers of two threads."""
    coords = FragmentCoords((), 0, 32, **mma.KEY_ORDER)
    firsts = [lane // 2 * 16 + lane % 2 * 2 for lane in range(4)]
    keys = [[first + offset for offset in coords.offsets] for first in firsts]
    assert sorted(itertools.chain(*keys)) == list(range(128)) and all(x == sorted(x) for x in keys)
    for first in range(0, 32, 8):
        for pair in (0, 2):
            block = sorted(keys[pair][first : first + 8] + keys[pair + 1][first : first + 8])
            assert block == list(range(block[0], block[0] + 16)) and block[0] % 16 == 0


def test_no_cta_ends_while_its_stores_read_shared_memory(seed):
    problem, arguments = made(Case("short", seqlen_q=130, seqlen_k=130, head_dim=64, causal=True), seed)
    with emulate("sm_120a", sms=2, seed=seed, checks=Checks(leftovers=True)):
        problem.call(**arguments)


def test_what_is_recorded_is_compiled(tmp_path):
    problem = ahead.AheadProblem(120, replace(SPEC, head_dim=64, head_dim_v=64), ProblemSize(1, 300, 300))
    keys = [key for _, key in compiled_ahead(tmp_path, problem)]
    assert len(keys) == 1 and "NVFP4" in str(keys[0])


@pytest.mark.parametrize("head_dim, rows", [(64, 4096), (128, 4096), (128, 1)])
def test_nothing_spills(head_dim, rows, tmp_path, disassembler):
    spec = replace(SPEC, head_dim=head_dim, head_dim_v=head_dim, window_right=0)
    made = Sm120Forward(spec, ProblemSize(4, rows, 4096), CHIP)
    kernel = machine_code(made, tmp_path)[1]
    assert static.problems(kernel, has_roles=made.cfg.consumers > 1) == []


@pytest.mark.parametrize("number", [120, 121])
def test_every_head_dim_fits_the_chip(number):
    """Shared memory, registers of a thread, and of all threads."""
    chip = chip_by_number(number)
    for d, dv in ((d, dv) for d in (32, 64, 96, 128) for dv in range(16, 144, 16)):
        for rows in (1, 4096):
            cfg = Sm120Forward(replace(SPEC, head_dim=d, head_dim_v=dv), ProblemSize(1, rows, 4096), chip).cfg
            table = roles(cfg)
            assert cfg.stages >= 2 and cfg.tile_n % 64 == 0, (d, dv)
            assert smem_map(cfg, channels(cfg)).nbytes <= chip.smem_per_block, (d, dv)
            regs = [table.warpgroup_regs(group) for group in range(table.warpgroups)]
            assert cfg.used_regs <= min(max(regs), 255) and 128 * sum(regs) <= REGISTERS_PER_SM


@pytest.mark.parametrize("number", [120, 121])
@pytest.mark.parametrize(
    "changes, is_taken",
    [
        ({}, True),
        (dict(rows=1), True),
        (dict(head_dim_v=112), True),
        (dict(head_dim=256), False),
        (dict(head_dim=48), False),
        (dict(head_dim_v=72), False),
        (dict(softmax_scale=-0.1), False),
        (dict(backend="sm80"), False),
        (dict(score_mod=lambda s, b, h, i, j: s + i), True),
        (dict(dropout_p=0.1), False),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_it_takes(number, changes, is_taken):
    """Other calls are dequantised, and run on the portable kernels."""
    sizes = dict(rows=300, head_dim=64, head_dim_v=64)
    sizes |= {name: x for name, x in changes.items() if name in sizes}
    options = {name: x for name, x in changes.items() if name not in sizes}
    case = Case("", batch=2, seqlen_q=sizes["rows"], seqlen_k=300, head_dim=sizes["head_dim"])
    _, arguments = made(replace(case, head_dim_v=sizes["head_dim_v"]), 0)
    with emulating(chip_by_number(number)):
        found = fa4.explain(**arguments, **options)
    assert (found.spec.operands is Operands.NVFP4) == is_taken == (found.chosen == "sm120"), str(found)
    assert is_taken or "products of 4 bits: " in str(found)
