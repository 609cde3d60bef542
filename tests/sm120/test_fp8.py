"""Attention on e4m3 tensors on the emulated consumer Blackwell chip, whose kernel multiplies 8-bit numbers."""

import functools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES, Checks

import fa4
from bench import static
from fa4.api import ahead
from fa4.emulator import emulate
from fa4.fwd.variant import OutStore, Schedule
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.pipeline.roles import REGISTERS_PER_SM
from fa4.runtime import dispatch
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, Operands, ProblemSize
from fa4.sm120.fwd.kernel import channels, roles, smem_map
from fa4.sm120.fwd.plan import Sm120Forward
from fa4.sm120.fwd.tiles import ForwardTiles
from tests.building import compiled_ahead
from tests.fp8.heads import (
    CASES,
    E4M3,
    explained,
    judged,
    noting_kernels,
    of_heads,
)
from tests.machine_code import machine_code
from tests.sm120.running import run_multiplied

pytestmark = pytest.mark.rotates(9)

CHIP = chip_by_number(120)
SPEC = AttentionSpec(torch.bfloat16, 128, 128, 8, 8, 0.1, operands=Operands.E4M3)
PACKED = ((300, 520), (0, 40), (70, 0), (1, 130))
OWN = (
    Case("packed", lengths=PACKED, head_dim=128, head_dim_v=64, heads_q=2, softcap=9.0),
    Case("packed_causal", lengths=PACKED, head_dim=64, causal=True, heads_q=4, heads_kv=2),
    Case("unequal_dims", seqlen_q=200, seqlen_k=150, head_dim=48, head_dim_v=112, causal=True, heads_q=2),
    # Rows of all heads of a group in a tile: of one query, of few, and of a tile of several consumers.
    Case("one_query", batch=2, seqlen_q=1, seqlen_k=200, head_dim=128, heads_q=8, heads_kv=2, causal=True),
    Case("group_of_three", seqlen_q=5, seqlen_k=200, head_dim=64, heads_q=6, heads_kv=2, sink=True),
    Case("group_of_twelve", seqlen_q=40, seqlen_k=200, head_dim=64, heads_q=12, heads_kv=1, causal=True),
    Case("few_packed", lengths=((1, 300), (2, 5), (0, 40), (3, 0), (4, 133)), head_dim=64, heads_q=8, sink=True),
)
PARTS = (
    Case("one_query", batch=2, seqlen_q=1, seqlen_k=700, head_dim=128, heads_q=8, heads_kv=2, causal=True),
    Case("packed", lengths=((1, 300), (2, 5), (0, 40), (3, 0), (4, 333)), heads_q=8, heads_kv=2, sink=True),
    Case("many_rows", seqlen_q=140, seqlen_k=700, head_dim=128, heads_q=2, heads_kv=1, causal=True),
)


run = functools.partial(run_multiplied, Operands.E4M3)


def made(case, seed):
    """The problem and arguments of a case. Keys that no sequence uses are NaN."""
    problem, arguments = of_heads(cases.make(case, seed), seed, 120)
    if not problem.inputs.varlen and case.seqused:
        for name in ("k", "v"):
            for row, (_, count) in zip(arguments[name], case.seqused):
                row[count:] = torch.nan
    return problem, arguments


def check(case, seed, interleavings, **options):
    """A case is right, with the same bits under all interleavings."""
    problem, arguments = made(case, seed)
    results = [run(problem, arguments, seed + i, schedule, **options) for i, schedule in interleavings]
    cases.assert_right(judged(problem, *results[0]), f"{case.name}, seed {seed}")
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), f"{case.name}, seed {seed}"


def two_interleavings(seed):
    return [(i, SCHEDULES[(seed + i) % len(SCHEDULES)]) for i in range(2)]


@pytest.mark.parametrize("case", (*CASES, *OWN), ids=str)
def test_case_is_right(case, seed):
    check(case, seed, two_interleavings(seed))


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_parts_are_joined(case, seed):
    problem, _ = made(case, seed)
    assert Sm120Forward(problem.spec, problem.inputs.extent, chip_by_number(120, sms=64)).splits > 1
    check(case, seed, two_interleavings(seed), sms=64)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", (*CASES, *OWN), ids=str)
def test_every_case_under_many_interleavings(case, seed):
    check(case, seed, [(i, schedule) for i in range(4) for schedule in SCHEDULES])


ROWS = (  # each of them with kernels of its own
    ForwardTiles(3, 64, schedule=Schedule.SINGLE),
    ForwardTiles(3, 64),
    ForwardTiles(2, 32, most_stages=3),
    ForwardTiles(1, 64),
)
TRIMMED = (  # consumers pass blocks over, more of them than there are stages
    Case("keys_of_several_consumers", seqlen_q=300, seqlen_k=400, head_dim=64, causal=True),
    Case("consumers_without_rows", seqlen_q=200, seqlen_k=700, head_dim=64, causal=True),
    Case("rows_without_keys", seqlen_q=400, seqlen_k=100, head_dim=64, causal=True),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_of_the_table(row, seed):
    for case in TRIMMED:
        check(case, seed, two_interleavings(seed), row=row)


def test_blocks_that_lists_name(seed):
    """Lists of a causal mask, whose blocks on the diagonal call it."""
    problem, arguments = made(Case("lists", seqlen_q=300, seqlen_k=300, head_dim=64, causal=True, heads_q=2), seed)
    block_mask = fa4.create_block_mask(fa4.masks.causal, None, None, 300, 300, device="cpu")
    results = run(problem, arguments | dict(causal=False, block_mask=block_mask), seed)
    cases.assert_right(judged(problem, *results), f"seed {seed}")


def test_no_cta_ends_while_its_stores_read_shared_memory(seed):
    problem, arguments = made(Case("short", seqlen_q=130, seqlen_k=130, head_dim=64, causal=True), seed)
    with emulate("sm_120a", sms=2, seed=seed, checks=Checks(leftovers=True)):
        problem.call(**arguments)


def test_strides_orders_and_repeats_change_no_bit(seed):
    problem, arguments = made(CASES[3], seed)
    views = {
        name: arguments[name].view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3)
        for name in "qkv"
    }
    results = [run(problem, arguments | changes, seed + i) for i, changes in enumerate(({}, {}, views))]
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other))


def test_a_nan_in_a_query_shows_in_its_row_alone(seed):
    problem, arguments = made(Case("nan", batch=2, seqlen_q=150, seqlen_k=200, head_dim=64, sink=True), seed)
    clean = run(problem, arguments, seed)
    arguments["q"].view(torch.uint8)[0, 77, 1, 5] = 127
    out, lse = run(problem, arguments, seed)
    assert out[0, 77, 1].isnan().all() and lse[0, 1, 77].isnan()
    for x, expected, place in ((out, clean[0], (0, 77, 1)), (lse, clean[1], (0, 1, 77))):
        x[place] = expected[place]
        assert torch.equal(x, expected), f"seed {seed}"


def test_what_is_recorded_is_compiled(tmp_path):
    problem = ahead.AheadProblem(120, replace(SPEC, head_dim=64, head_dim_v=64), ProblemSize(1, 300, 300))
    assert {key[0] for _, key in compiled_ahead(tmp_path, problem)} == {"sm120.forward"}


@pytest.mark.parametrize("operands", [Operands.E4M3, Operands.MXFP8], ids=str)
@pytest.mark.parametrize("head_dim, rows", [(64, 4096), (128, 4096), (128, 1)])
def test_nothing_spills(head_dim, rows, operands, tmp_path, disassembler):
    """Of each number of consumers; a single one asks for no other registers than at launch."""
    spec = replace(SPEC, head_dim=head_dim, head_dim_v=head_dim, window_right=0, operands=operands)
    made = Sm120Forward(spec, ProblemSize(4, rows, 4096), CHIP)
    kernel = machine_code(made, tmp_path)[1]
    assert static.problems(kernel, has_roles=made.cfg.consumers > 1) == []


@pytest.mark.parametrize("number", [120, 121])
def test_every_head_dim_fits_the_chip(number):
    """Shared memory, registers of a thread, and of all threads."""
    chip, dims = chip_by_number(number), range(16, 129, 16)
    changes = {}, {"window_right": 0}, {"varlen": True}
    for head_dim, head_dim_v in [(d, dv) for d in dims for dv in dims]:
        for changed, rows in zip(changes, (1, 4096, 300)):
            spec = replace(SPEC, head_dim=head_dim, head_dim_v=head_dim_v, **changed)
            cfg = Sm120Forward(spec, ProblemSize(1, rows, 4096), chip).cfg
            table = roles(cfg)
            assert cfg.stages >= 2
            assert smem_map(cfg, channels(cfg)).nbytes <= chip.smem_per_block == 99 << 10
            regs = [table.warpgroup_regs(group) for group in range(table.warpgroups)]
            assert cfg.used_regs <= min(max(regs), 255) and 128 * sum(regs) <= REGISTERS_PER_SM


@pytest.mark.parametrize(
    "head_dim, heads, rows, changes, expected",
    [
        (64, (4, 4), 4096, {}, (3, 1, Schedule.PERSISTENT)),
        (128, (4, 4), 4096, {}, (2, 1, Schedule.PERSISTENT)),
        (64, (4, 4), 4096, {"varlen": True}, (3, 1, Schedule.PACKED)),
        (64, (4, 4), 192, {"varlen": True}, (3, 1, Schedule.SINGLE)),
        (64, (4, 4), 64, {}, (1, 1, Schedule.PERSISTENT)),
        (64, (4, 4), 65, {}, (3, 1, Schedule.PERSISTENT)),
        # A group of five has eight slots of a tile.
        (128, (5, 1), 8, {}, (1, 5, Schedule.PERSISTENT)),
        (128, (5, 1), 9, {}, (2, 1, Schedule.PERSISTENT)),
        (128, (4, 1), 64, {}, (2, 4, Schedule.PERSISTENT)),
        (128, (4, 1), 65, {}, (2, 1, Schedule.PERSISTENT)),
        (128, (4, 4), 4096, {"batch_invariant": True}, (1, 1, Schedule.PERSISTENT)),
    ],
    ids=str,
)
def test_the_row_of_a_problem(head_dim, heads, rows, changes, expected):
    """Consumers, packed heads, schedule."""
    spec = replace(SPEC, head_dim=head_dim, head_dim_v=head_dim, heads_q=heads[0], heads_kv=heads[1], **changes)
    cfg = Sm120Forward(spec, ProblemSize(1, rows, 4096), CHIP).cfg
    assert (cfg.consumers, cfg.packed_heads, cfg.schedule) == expected
    assert (cfg.out_store is OutStore.DIRECT) == (cfg.consumers == 1 or cfg.split)


def test_on_a_shared_chip_the_hardware_hands_out_tiles():
    cfgs = [Sm120Forward(SPEC, ProblemSize(1, 4096, 4096), chip).cfg for chip in (CHIP, replace(CHIP, shared=True))]
    assert [cfg.schedule for cfg in cfgs] == [Schedule.PERSISTENT, Schedule.SINGLE]
    assert replace(cfgs[0], schedule=Schedule.SINGLE) == cfgs[1]


@pytest.mark.parametrize(
    "tiles, complaint",
    [
        (ForwardTiles(2, 256), "registers of tiles are too many for 2 consumers"),
        (ForwardTiles(3, 64), "registers of tiles are too many for 3 consumers"),
        (ForwardTiles(2, 64, most_stages=0), "128 x 64 tiles of head_dim 128 exceed"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(tiles, complaint):
    with pytest.raises(ValueError, match=complaint):
        Sm120Forward(SPEC, ProblemSize(1, 4096, 4096), CHIP, tiles)


@pytest.mark.parametrize("number", [120, 121])
@pytest.mark.parametrize(
    "changes, is_taken",
    [
        ({}, True),
        (dict(q=(2, 1, 4, 64)), True),
        (dict(v=(2, 300, 4, 112)), True),
        (dict(q=(2, 300, 4, 144), k=(2, 300, 4, 144)), False),
        (dict(q=(2, 300, 4, 72), k=(2, 300, 4, 72)), False),
        (dict(k_descale=torch.ones(2, 3, 4)), False),
        (dict(softmax_scale=-0.1), False),
        (dict(backend="sm80"), False),
        (dict(score_mod=lambda s, b, h, i, j: s + i), True),
        (dict(dropout_p=0.1), False),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_it_takes(number, changes, is_taken):
    """Other calls are dequantised, and run on the portable kernels."""
    found = explained(chip_by_number(number), changes)
    assert (found.spec.operands is Operands.E4M3) == is_taken == (found.chosen == "sm120"), str(found)


@pytest.mark.parametrize("number", [120, 121])
def test_16_bits_run_on_the_portable_kernels(number):
    spec, chip = replace(SPEC, operands=None), chip_by_number(number)
    assert dispatch.explain(spec, ProblemSize(1, 300, 300), chip).chosen == "sm80"
    with pytest.raises(dispatch.NoBackend, match="lacks products of 16-bit numbers"):
        dispatch.select(spec, chip, "sm120")


def test_training_takes_its_forward(seed):
    """The backward is that of the numbers that the forward multiplied."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 200, 2, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    with emulate("sm_120a", sms=4, seed=seed), noting_kernels() as taken:
        out = fa4.flash_attn_func(q, k, v, precision="fp8", causal=True)
        assert taken["native"] is Operands.E4M3
        plain = fa4.flash_attn_func(q, k, v, causal=True)
        dout = torch.randn(out.shape, generator=generator).bfloat16()
        got, expected = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, plain))
    assert 1e-3 < (out - plain).norm() / plain.norm() < 0.08
    for x, y in zip(got, expected):
        assert (x - y).norm() / y.norm() < 0.12


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_training_with_the_backend_named(precision, seed):
    """The backend has no products of 16 bits, so another one has the backward, and `explain` names it."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 200, 2, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    options = dict(precision=precision, backend="sm120")
    with emulate("sm_120a", sms=2, seed=seed):
        found = fa4.explain(q, k, v, **options)
        assert (found.chosen, found.backward) == ("sm120", "sm80 in 16 bits")
        fa4.flash_attn_func(q, k, v, **options).float().square().mean().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
        with pytest.raises(dispatch.NoBackend, match=r"8-bit ones that are dequantised \(fa4.explain says why\)"):
            fa4.flash_attn_func(q, k, v, **options, dropout_p=0.1)
