"""The Blackwell forward on the emulated chip: named cases against the oracle, under several interleavings."""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from fa4 import cases, device
from fa4.cases import Case
from fa4.emulator import emulate
from fa4.emulator.machine import SCHEDULES
from fa4.run import forward
from fa4.sm100.fwd import plan
from fa4.sm100.fwd.config import Schedule
from fa4.sm100.fwd.kernel import channels, smem_map
from fa4.sm100.fwd.tiles import ForwardTiles, tiles_for
from fa4.sm100.plan import Plan
from fa4.spec import AttentionSpec
from tests.sm100.named import CASES

SMS = 2  # fewer than most cases have work tiles, so that CTAs stride through them or run in waves


def run(problem: cases.Problem, seed: int, schedule: str, tiles: ForwardTiles | None = None):
    """(out, lse) of the kernel on an emulated chip; raises on any finding."""
    with emulate("sm_100a", sms=SMS, seed=seed, schedule=schedule):
        chip = device.chip_of(torch.device("cpu"))
        made = Plan(problem.spec.with_positive_scale(), problem.inputs.extent, chip, forward_tiles=tiles)
        return forward(problem.inputs, problem.spec, made)


def poison_unused(problem: cases.Problem) -> cases.Problem:
    """Fill rows that no sequence uses with NaN: they must not reach any result."""
    i = problem.inputs
    for x, used, starts in (
        (i.q, i.seqused_q, i.cu_seqlens_q),
        (i.k, i.seqused_k, i.cu_seqlens_k),
        (i.v, i.seqused_k, i.cu_seqlens_k),
    ):
        for b, count in enumerate([] if used is None else used.tolist()):
            if starts is None:
                x[b, count:] = torch.nan
            else:
                x[starts[b] + count : starts[b + 1]] = torch.nan
    return problem


def check(name: str, seed: int, interleavings) -> None:
    """One case is right under the first interleaving and bitwise the same under the others."""
    problem = poison_unused(cases.make(CASES[name], seed))
    first = None
    for schedule, emulator_seed in interleavings:
        out, lse = run(problem, emulator_seed, schedule)
        if first is None:
            first = out, lse
            cases.assert_right(cases.judge_forward(problem, out, lse), f"{name}, seed {seed}")
        where = f"{name} differs under {schedule}, seed {emulator_seed}"
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1]), where


@pytest.mark.parametrize("name", sorted(CASES))
def test_case(name, seed):
    check(name, seed, [(schedule, seed) for schedule in random.Random(seed).sample(SCHEDULES, 2)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_case_under_many_interleavings(name, seed):
    check(name, seed, [(schedule, seed + i) for i in range(4) for schedule in SCHEDULES])


def test_schedules_and_thresholds_agree(seed):
    """Work order changes nothing; rescaling at every growth and the order of key blocks change roundings only."""
    problem = cases.make(Case("long", seqlen_q=300, seqlen_k=600, head_dim=64, heads_q=4, causal=True), seed)
    persistent = ForwardTiles("test", 4, Schedule.PERSISTENT, "test")
    rows = (
        persistent,
        replace(persistent, schedule=Schedule.SINGLE),
        replace(persistent, schedule=Schedule.DYNAMIC),
        replace(persistent, rescale_threshold=0.0),
        replace(persistent, sawtooth=True),
    )
    results = [run(problem, seed, "random", row) for row in rows]
    for out, lse in results:
        cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")
    for out, lse in results[1:3]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_polynomial_share_is_as_accurate_as_the_special_function_unit(seed):
    """Whichever elements the FMA units take: all of them, some, none."""
    problem = cases.make(Case("shares", seqlen_q=130, seqlen_k=260, head_dim=128, dtype=torch.float16), seed)
    for share in (0, 16):
        out, lse = run(problem, seed, "round_robin", ForwardTiles("test", share, Schedule.SINGLE, "test"))
        cases.assert_right(cases.judge_forward(problem, out, lse), f"share {share}, seed {seed}")


PAIRS = ForwardTiles("test", 2, Schedule.SINGLE, "test", ctas=2)


@pytest.mark.parametrize(
    "case",
    [
        # Ends in the first CTA, in the second, in the first tile and in the second; packed heads; one key.
        Case("varlen", heads_q=4, heads_kv=2, head_dim=128, lengths=((300, 390), (0, 5), (9, 1), (7, 0), (520, 130))),
        Case("seqused", batch=2, seqlen_q=300, seqlen_k=290, head_dim=128, seqused=((300, 257), (3, 0))),
    ],
    ids=lambda case: case.name,
)
def test_a_pair_serves_sequences_of_any_length(case, seed):
    problem = poison_unused(cases.make(case, seed))
    for schedule in ("round_robin", "adversarial"):
        out, lse = run(problem, seed, schedule, PAIRS)
        cases.assert_right(cases.judge_forward(problem, out, lse), f"{schedule}, seed {seed}")


def test_one_q_tile_a_cta(seed):
    """How many Q tiles take turns is the configuration's: roles, channels and memory follow."""
    problem = cases.make(Case("one", seqlen_q=150, seqlen_k=300, head_dim=64, causal=True), seed)
    out, lse = run(problem, seed, "random", ForwardTiles("test", 4, Schedule.SINGLE, "test", q_tiles=1))
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


def test_a_nan_in_a_query_shows_in_its_row_alone(seed):
    """In out and in lse, also where rows may be unused and unused rows are zero whatever they hold."""
    case = Case("nan", batch=2, seqlen_q=150, seqlen_k=200, head_dim=64, causal=True, seqused=((150, 200), (140, 130)))
    problem = cases.make(case, seed)
    clean = run(problem, seed, "round_robin")
    q = problem.inputs.q.clone()
    q[0, 77, 1, 5] = torch.nan
    spoilt = run(replace(problem, inputs=problem.inputs._replace(q=q)), seed, "round_robin")
    assert spoilt[0][0, 77, 1].isnan().all() and spoilt[1][0, 1, 77].isnan()
    for x, expected, place in ((spoilt[0], clean[0], (0, 77, 1)), (spoilt[1], clean[1], (0, 1, 77))):
        x[place] = expected[place]
        assert torch.equal(x, expected), f"seed {seed}"


@pytest.mark.parametrize(
    "number, changes, polynomial, schedule, ctas",
    [
        (100, dict(), 2, Schedule.PERSISTENT, 2),
        (100, dict(varlen=True), 2, Schedule.SINGLE, 2),
        (100, dict(window_right=0), 2, Schedule.SINGLE, 1),
        (100, dict(window_left=100, window_right=0), 2, Schedule.PERSISTENT, 1),
        (100, dict(head_dim=64, head_dim_v=64, varlen=True), 4, Schedule.SINGLE, 1),
        (103, dict(varlen=True), 0, Schedule.SINGLE, 2),  # the chip decides about exp2 alone
        (103, dict(window_right=0), 0, Schedule.SINGLE, 1),
    ],
)
def test_chip_and_problem_decide_about_different_columns(number, changes, polynomial, schedule, ctas):
    spec = replace(AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1), **changes)
    tiles = tiles_for(spec, device.chip_by_number(number))
    assert (tiles.polynomial, tiles.schedule, tiles.ctas) == (polynomial, schedule, ctas)


@pytest.mark.parametrize(
    "changes, rows, ctas",
    [
        (dict(), None, 2),
        (dict(), 257, 2),
        (dict(), 256, 1),
        (dict(varlen=True), 2049, 2),
        (dict(varlen=True), 2048, 1),
        (dict(window_left=5), None, 1),
        (dict(window_right=5), None, 1),
        (dict(head_dim=192), None, 1),
        (dict(head_dim_v=120), None, 1),
    ],
    ids=str,
)
def test_two_ctas_share_a_tile_where_it_is_full(changes, rows, ctas):
    spec = replace(AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1), **changes)
    assert tiles_for(spec, device.chip_by_number(100), rows).ctas == ctas


@pytest.mark.parametrize(
    "dims, polynomial", [((64, 64), 4), ((128, 64), 4), ((64, 72), 2), ((128, 128), 2), ((192, 128), 0)]
)
def test_head_dims_decide_how_many_exponentials_are_polynomials(dims, polynomial):
    spec = AttentionSpec(torch.bfloat16, *dims, 4, 2, 0.1)
    assert tiles_for(spec, device.chip_by_number(100)).polynomial == polynomial


def test_strided_and_expanded_inputs(seed):
    """Heads-first memory, a k and v that share one tensor, a batch axis of stride 0."""
    problem = cases.make(Case("strided", batch=2, seqlen_q=130, seqlen_k=140, head_dim=64), seed)
    inputs = problem.inputs
    kv = torch.cat((inputs.k, inputs.v), dim=-1)
    q = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    k, v = kv[..., :64], kv[..., 64:][:1].expand(2, -1, -1, -1)
    problem = replace(problem, inputs=inputs._replace(q=q, k=k, v=v))
    out, lse = run(problem, seed, "random")
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


def test_public_function_dispatches_here(seed):
    """`flash_attn_func` on CPU tensors inside the emulator takes this backend, and says so."""
    problem = cases.make(CASES["causal"], seed)
    with emulate("sm_100a", sms=SMS, seed=seed):
        out, lse = problem.call(backend="sm100")
        auto, _ = problem.call()
        explanation = fa4.explain(problem.inputs.q, problem.inputs.k, problem.inputs.v, causal=True)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")
    assert torch.equal(out, auto)
    assert explanation.chosen == "sm100" and "causal" in explanation.tiles


@pytest.mark.parametrize("number", [100, 103])
def test_every_head_dim_fits_the_chip(number):
    chip = device.chip_by_number(number)
    pairs = [(d, dv) for d in range(8, 129, 8) for dv in (8, d, 128)] + [(192, 128)]
    for head_dim, head_dim_v in pairs:
        spec = AttentionSpec(torch.bfloat16, head_dim, head_dim_v, 4, 2, 0.1)
        cfg = plan.configure(spec, chip)
        assert cfg.kv_stages >= 2
        assert smem_map(cfg, channels(cfg)).nbytes <= chip.smem_per_block


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (dict(head_dim_v=64), "head_dim_v = 128"),
        (dict(schedule=Schedule.DYNAMIC), "not the dynamic one"),
    ],
)
def test_a_pair_refuses(changes, complaint):
    spec = AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1)
    pair = plan.configure(spec, device.chip_by_number(100))
    assert pair.ctas == 2
    with pytest.raises(ValueError, match=complaint):
        replace(pair, **changes)
