"""The Blackwell backward on the emulated chip: gradients of the named cases, whatever the order of events."""

import random
from dataclasses import replace
from operator import attrgetter

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES

from bench import traffic
from fa4.bwd.workspace import Allocator, Workspace
from fa4.cli import demo
from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec
from fa4.sm100.bwd import plan
from fa4.sm100.bwd.kernel import channels, smem_map, tmem_map
from fa4.sm100.bwd.tiles import PAIR, SINGLE, BackwardTiles, tiles_for
from fa4.sm100.plan import Plan
from tests.emulated import (
    Kernels,
    SharedBackwardTests,
    bits,
    check_gradients,
    check_gradients_under_many_interleavings,
    given,
    judge_gradients,
)
from tests.sm100.named import BACKWARD, CASES

pytestmark = pytest.mark.rotates(4)

NAME = attrgetter("name")
# The error of dsink is judged by the largest over the heads; with two heads that is too few draws to be a bound.
HEADS_FOR_SINK = 4
# The two tile rows: one CTA for a block of keys, and a pair of CTAs for two. Head dims of 128 get the pair by default.
EXTRA = (
    *BACKWARD,
    Case("wide", head_dim=192, head_dim_v=128, heads_q=4, lengths=((70, 200), (129, 129), (3, 7)), window_size=(99, 5)),
    Case("pair_softcap", seqlen_q=200, seqlen_k=129, head_dim=128, softcap=15.0, logits=4.0, causal=True),
    Case(
        "pair_varlen",
        heads_q=4,
        head_dim=128,
        lengths=((130, 140), (60, 520), (7, 9), (0, 5), (9, 0)),
        seqused=((129, 130), (50, 513), (7, 3), (0, 2), (3, 0)),
        causal=True,
        sink=True,
    ),
)
SERVED = {case.name: replace(case, heads_q=HEADS_FOR_SINK) if case.sink else case for case in (*CASES.values(), *EXTRA)}
KERNELS = Kernels("sm100", "sm_100a", Plan)
# Compiling takes most of a case's time; the soak runs the others.
QUICK = (
    "window_masks_rows", "head_dim_40_padded", "head_dim_192_128", "varlen_with_empty",
    "logits_1e4", "window_softcap_gqa", "pair_varlen",
)  # fmt: skip


def rows_for(problem: cases.Problem) -> tuple[BackwardTiles, ...]:
    """The tile rows that can serve a problem."""
    return (SINGLE, PAIR) if tiles_for(problem.spec, chip_by_number(100)).row is PAIR else (SINGLE,)


class TestShared(SharedBackwardTests):
    kernels = KERNELS


@pytest.mark.parametrize("name", QUICK)
def test_gradients_of_named_case(name, seed):
    problem = cases.make(SERVED[name], seed)
    check_gradients(KERNELS, problem, seed, SCHEDULES[seed % len(SCHEDULES)])


@pytest.mark.parametrize("tiles", [SINGLE, PAIR], ids=["single", "pair"])
def test_one_cta_and_a_pair_are_right_in_any_order(tiles, seed):
    problem = cases.make(CASES["causal_d128"], seed)
    for schedule in random.Random(seed).sample(SCHEDULES, 2):
        check_gradients(KERNELS, problem, seed, schedule, tiles)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", SERVED)
def test_gradients_under_many_interleavings(name, seed):
    """10 runs of each case, of head dim 128 for both rows: more than 500 in all."""
    problem = cases.make(SERVED[name], seed)
    for tiles in rows_for(problem):
        check_gradients_under_many_interleavings(KERNELS, [problem], seed, tiles)


def test_training_gives_the_losses_of_the_portable_backend(seed):
    """A few optimiser steps of the demo's model, in bfloat16: their losses by the oracle's rule, which asks the same
    training in float32 and in bfloat16, and of more models while the verdict hangs."""
    device = torch.device("cpu")

    def losses(dtype: torch.dtype, seed: int, backend: str) -> torch.Tensor:
        model = demo.ModelConfig(layers=1, heads_q=1, heads_kv=1, head_dim=64, dtype=dtype)
        config = demo.TrainConfig(steps=3, batch=1, seqlen=140, seed=seed)
        return torch.tensor(demo.train(model, config, device, backend=backend).losses, dtype=torch.float64)

    def references(seed: int, precise: bool) -> list[torch.Tensor]:
        return [losses(torch.float32 if precise else torch.bfloat16, seed, "torch")]

    with emulate("sm_100a", seed=seed):
        got = {"losses": losses(torch.bfloat16, seed, "sm100")}
    judged = cases.judge_by_draws(got, references, seed, range(seed + 1, seed + cases.DRAWS))
    cases.assert_right(judged, f"seed {seed}")


@pytest.mark.soak  # no result hangs on it, and no other test has its kernels
def test_a_pair_moves_a_third_less_through_shared_memory():
    """The paper's arithmetic for one CTA; for a pair the same without staging dS before it is sent."""
    single, pair = (traffic.clocks(traffic.per_step(tiles)[0]) for tiles in (SINGLE, PAIR))
    assert sum(single.values()) == traffic.PAPER[SINGLE]
    assert sum(pair.values()) == 2304 < traffic.PAPER[PAIR]


def test_upstream_gradient_of_lse_may_be_absent(seed):
    problem = cases.make(replace(CASES["causal"], deterministic=True), seed)
    problem = replace(problem, dlse=torch.zeros_like(problem.dlse))
    grads = KERNELS.gradients(problem, seed, saved=given(problem)._replace(dlse=None))
    cases.assert_right(judge_gradients(problem, grads), f"causal without dlse (seed {seed})")


def test_a_nan_in_a_query_shows_in_its_gradient(seed):
    """Its dq is NaN and so are dk and dv, to which it adds; other queries' dq keep their bits. The order of additions
    is fixed, so that bits can be compared."""
    case = Case("nan", seqlen_q=150, seqlen_k=200, heads_q=1, heads_kv=1, causal=True, deterministic=True)
    problem = cases.make(case, seed)
    saved = given(problem)._replace(dlse=None)
    clean = KERNELS.gradients(problem, seed, saved=saved)
    q = problem.inputs.q.clone()
    q[0, 77, 0, 5] = torch.nan
    spoilt = KERNELS.gradients(replace(problem, inputs=problem.inputs._replace(q=q)), seed, saved=saved)
    assert spoilt.dq[0, 77].isnan().all() and spoilt.dk.isnan().any() and spoilt.dv.isnan().any()
    spoilt.dq[0, 77] = clean.dq[0, 77]
    assert torch.equal(spoilt.dq, clean.dq), f"seed {seed}"


def test_data_outside_the_sequences_in_use_is_not_seen(seed):
    """NaN after each sequence's used rows: neither in the products (0 * NaN) nor in the gradients."""
    problem = cases.make(replace(CASES["seqused"], causal=False, sink=True), seed)
    inputs, saved = problem.inputs, given(problem)
    expected = KERNELS.gradients(problem, seed)
    named = dict(q=inputs.q, k=inputs.k, v=inputs.v, out=saved.out, dout=saved.dout)
    spoilt = {name: x.clone() for name, x in named.items()}
    for name, x in spoilt.items():
        side = "k" if name in "kv" else "q"
        begins, used = getattr(inputs, f"cu_seqlens_{side}").tolist(), getattr(inputs, f"seqused_{side}").tolist()
        for begin, end, count in zip(begins, begins[1:], used):
            x[begin + count : end] = torch.nan
    saved = saved._replace(out=spoilt.pop("out"), dout=spoilt.pop("dout"))
    grads = KERNELS.gradients(replace(problem, inputs=inputs._replace(**spoilt)), seed, saved=saved)
    assert bits(grads) == bits(expected)


# Three blocks of keys and more add to a dQ, a pair's being of 256 keys: two alone would commute. In float16, whose
# rounding hides fewer of the sums' last bits than bfloat16's.
ORDERED = {
    case.name: replace(case, dtype=torch.float16)
    for case in (
        Case("full", seqlen_q=150, seqlen_k=700, heads_q=1, heads_kv=1),
        Case("causal", seqlen_q=300, seqlen_k=900, heads_q=1, heads_kv=1, causal=True),
        Case("window", seqlen_q=200, seqlen_k=700, heads_q=1, heads_kv=1, window_size=(600, 0)),
        Case("gqa", seqlen_q=140, seqlen_k=600, heads_q=2, heads_kv=1, causal=True),
        Case("varlen", heads_q=1, heads_kv=1, lengths=((130, 300), (140, 620), (7, 9)), causal=True),
    )
}
# How many multiprocessors there are decides which blocks of keys run side by side, and so which adds first.
MULTIPROCESSORS = (2, 4, 8)


def distinct(case: Case, tiles: BackwardTiles, seed: int, runs: int) -> int:
    """How many different gradients, to the bit, `runs` interleavings of one problem give, 2 if more; all are right."""
    case = replace(case, head_dim=64 if tiles is SINGLE else 128)
    problem = cases.make(case, seed)
    results = {}
    for i in range(runs):
        schedule, sms = SCHEDULES[i % 3], MULTIPROCESSORS[(i + i // 3) % 3]
        grads = KERNELS.gradients(problem, seed + i, schedule, tiles, sms)
        results.setdefault(bits(grads), grads)
        if len(results) > 1:
            break
    for grads in results.values():
        cases.assert_right(judge_gradients(problem, grads), f"{case}, {tiles} (seed {seed})")
    return len(results)


# Each for one of the rows, and the others for none: "causal" and "full" order additions as "gqa" and "varlen" do, and
# "window" as the portable kernels' tests show. The soak runs all for both.
@pytest.mark.parametrize(("name", "tiles"), [("gqa", PAIR), ("varlen", SINGLE)], ids=["pair", "single"])
def test_deterministic_gradients_are_bitwise_equal(name, tiles, seed):
    assert distinct(replace(ORDERED[name], deterministic=True), tiles, seed, runs=3) == 1


def test_wide_gradients_in_order_with_exponentials_as_polynomials(seed, monkeypatch):
    """dQ of wide heads is added in two parts, in one order: its float32 sums have the same bits whatever comes first.
    No row of the table asks for polynomials; here they are 5 of every 16 pairs."""
    allocate, sums = Allocator.__call__, list[Workspace]()
    monkeypatch.setattr(Allocator, "__call__", lambda *given: sums.append(allocate(*given)) or sums[-1])
    shape = dict(heads_q=1, heads_kv=1, head_dim=192, head_dim_v=128)
    problem = cases.make(Case("wide", seqlen_q=40, seqlen_k=500, deterministic=True, **shape), seed)
    saved = given(problem)
    for i in range(4):  # four blocks of keys; an even seed runs all at a time, an odd one after the other
        grads = KERNELS.gradients(problem, seed + i, "random", replace(SINGLE, polynomial=5), 8, saved)
        assert len({of_run.dq_sum.numpy().tobytes() for of_run in sums}) == 1, f"seed {seed}"
    cases.assert_right(judge_gradients(problem, grads, saved), f"seed {seed}")


@pytest.mark.soak  # it judges the test above and no kernel, and has one of its own
def test_order_of_additions_shows_without_the_flag(seed):
    """What the test above would miss if the order never changed. Few last bits outlive the rounding to float16, in some
    problems none: others are drawn then."""
    assert any(distinct(ORDERED["gqa"], PAIR, seed + i, runs=8) > 1 for i in range(4)), f"seed {seed}"


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tiles", [SINGLE, PAIR], ids=["single", "pair"])
@pytest.mark.parametrize("case", ORDERED.values(), ids=str)
def test_deterministic_gradients_over_many_seeds(case, tiles, seed):
    """20 seeds for each of the schedules."""
    assert distinct(replace(case, deterministic=True), tiles, seed, runs=60) == 1


@pytest.mark.parametrize(
    "dims, sms, row",
    [
        ((128, 128), 148, PAIR),
        ((104, 128), 148, PAIR),
        ((128, 104), 2, PAIR),
        ((128, 128), 1, SINGLE),
        ((96, 128), 148, SINGLE),
        ((128, 96), 148, SINGLE),
        ((192, 128), 148, SINGLE),
    ],
    ids=str,
)
def test_a_pair_takes_head_dims_that_fill_128_columns(dims, sms, row):
    spec = AttentionSpec(torch.bfloat16, *dims, heads_q=1, heads_kv=1, softmax_scale=1.0)
    assert tiles_for(spec, chip_by_number(100, sms=sms)).row is row


def test_every_head_dim_fits_the_chip():
    chip = chip_by_number(100)
    pairs = [(d, d_v) for d in range(8, 129, 8) for d_v in (8, d, 128)]
    for head_dim, head_dim_v in [*pairs, (192, 128)]:
        spec = AttentionSpec(torch.bfloat16, head_dim, head_dim_v, heads_q=1, heads_kv=1, softmax_scale=1.0)
        cfg = plan.configure(spec, chip, has_dlse=True)
        assert smem_map(cfg, channels(cfg)).nbytes <= chip.smem_per_block
        ranges = tmem_map(cfg).ranges  # raises on an overlap that is not declared
        assert ranges["dK"].columns >= head_dim and ranges["dV"].columns >= head_dim_v
