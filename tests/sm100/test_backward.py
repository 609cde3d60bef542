"""The Blackwell backward on the emulated chip: gradients of the named cases, whatever the order of events."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4 import cases, reference
from fa4.cases import CASES, Case
from fa4.device import chip_by_number, chip_of
from fa4.emulator import emulate
from fa4.sm100.bwd import plan
from fa4.sm100.bwd.kernel import channels, smem_map, tmem_map
from fa4.spec import AttentionSpec, Gradients

SCHEDULES = ("round_robin", "random", "adversarial")
SERVED = [case for case in CASES.values() if case.head_dim <= 128 or (case.head_dim, case.head_dim_v) == (192, 128)]
WIDE = Case(
    "wide", head_dim=192, head_dim_v=128, heads_q=4, lengths=((70, 200), (129, 129), (3, 7)), window_size=(99, 5)
)
# The error of dsink is judged by the largest over the heads; with two heads that is too few draws to be a bound.
HEADS_FOR_SINK = 8


def upstream(problem: cases.Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and dlse as a forward and its caller would hand them to the backward."""
    out, lse = reference.forward(problem.inputs, problem.spec, precise=False)
    return out, lse, problem.dlse.masked_fill(lse == -torch.inf, 0.0)


def gradients(problem: cases.Problem, *, seed: int = 0, schedule: str = "round_robin", sms: int = 4) -> Gradients:
    """The kernels' gradients, out and lse being the same-precision reference's."""
    out, lse, dlse = upstream(problem)
    spec = dataclasses.replace(problem.spec, needs_backward=True)
    with emulate("sm_100a", sms=sms, seed=seed, schedule=schedule):
        return plan.backward(problem.inputs, spec, chip_of(out.device), out, lse, problem.dout, dlse)


def assert_right(problem: cases.Problem, grads: Gradients, context: str) -> None:
    problem = dataclasses.replace(problem, dlse=upstream(problem)[2])
    cases.assert_right(cases.judge_backward(problem, grads), context)


def bits(grads: Gradients) -> tuple[bytes, ...]:
    return tuple(x.contiguous().view(torch.int16).numpy().tobytes() for x in grads if x is not None)


@pytest.mark.parametrize("case", [*SERVED, WIDE], ids=str)
def test_gradients_of_named_case(case, seed):
    if case.sink:
        case = dataclasses.replace(case, heads_q=HEADS_FOR_SINK, heads_kv=case.heads_kv)
    problem = cases.make(case, seed)
    assert_right(problem, gradients(problem, seed=seed), f"{case} (seed {seed})")


def test_a_sequence_may_end_before_its_padded_row_does(seed):
    problem = cases.make(Case("seqused_dense", batch=2, seqlen_q=150, seqlen_k=290, seqused=((150, 257), (3, 0))), seed)
    assert_right(problem, gradients(problem, seed=seed), f"seqused without packing (seed {seed})")


@pytest.mark.parametrize("name", ["causal_d128", "sink_gqa_window", "varlen"])
def test_gradients_through_autograd(name, seed):
    case = dataclasses.replace(CASES[name], heads_q=HEADS_FOR_SINK)
    problem = cases.make(case, seed)
    with emulate("sm_100a", seed=seed):
        out, lse, grads = problem.call_with_gradients(backend="sm100")
    cases.assert_right(cases.judge_forward(problem, out, lse), f"{name} forward (seed {seed})")
    assert_right(problem, grads, f"{name} (seed {seed})")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["causal_d128", "varlen_window_gqa"])
def test_schedule_does_not_matter(name, schedule, seed):
    problem = cases.make(CASES[name], seed)
    assert_right(problem, gradients(problem, seed=seed, schedule=schedule), f"{name}, {schedule} (seed {seed})")


def test_upstream_gradient_of_lse_may_be_absent(seed):
    problem = cases.make(CASES["causal"], seed)
    problem = dataclasses.replace(problem, dlse=torch.zeros_like(problem.dlse))
    out, lse, _ = upstream(problem)
    with emulate("sm_100a", seed=seed):
        grads = plan.backward(problem.inputs, problem.spec, chip_of(out.device), out, lse, problem.dout, None)
    assert_right(problem, grads, f"causal without dlse (seed {seed})")


def test_data_outside_the_sequences_in_use_is_not_seen(seed):
    """NaN after each sequence's used rows: neither in the products (0 * NaN) nor in the gradients."""
    problem = cases.make(CASES["seqused"], seed)
    inputs = problem.inputs
    out, lse, dlse = upstream(problem)
    expected = gradients(problem, seed=seed)
    named = dict(q=inputs.q, k=inputs.k, v=inputs.v, out=out, dout=problem.dout)
    spoilt = {name: x.clone() for name, x in named.items()}
    for name, x in spoilt.items():
        side = "k" if name in "kv" else "q"
        begins, used = getattr(inputs, f"cu_seqlens_{side}").tolist(), getattr(inputs, f"seqused_{side}").tolist()
        for begin, end, count in zip(begins, begins[1:], used):
            x[begin + count : end] = torch.nan
    dout, out = spoilt.pop("dout"), spoilt.pop("out")
    with emulate("sm_100a", seed=seed):
        inputs = inputs._replace(**spoilt)
        grads = plan.backward(inputs, problem.spec, chip_of(out.device), out, lse, dout, dlse)
    assert bits(grads) == bits(expected)


# Three blocks of keys and more add to a dQ: two alone would commute.
ORDERED = (
    Case("full", seqlen_q=200, seqlen_k=500, heads_q=1, heads_kv=1),
    Case("causal", seqlen_q=500, seqlen_k=500, heads_q=1, heads_kv=1, causal=True),
    Case("window", seqlen_q=500, seqlen_k=500, heads_q=1, heads_kv=1, window_size=(300, 0)),
    Case("gqa", seqlen_q=300, seqlen_k=400, heads_q=4, heads_kv=2, causal=True),
    Case("varlen", heads_q=2, heads_kv=1, lengths=((130, 300), (300, 420), (7, 9)), causal=True),
)


# How many multiprocessors there are decides which blocks of keys run side by side, and so which adds first.
MULTIPROCESSORS = (1, 4, 7)


@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_deterministic_gradients_are_bitwise_equal(case, seed):
    problem = cases.make(dataclasses.replace(case, deterministic=True), seed)
    results = [
        gradients(problem, seed=seed + sms, schedule=schedule, sms=sms)
        for schedule, sms in zip(SCHEDULES, MULTIPROCESSORS)
    ]
    assert_right(problem, results[0], f"{case} (seed {seed})")
    assert len({bits(grads) for grads in results}) == 1


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_deterministic_gradients_over_many_seeds(case, seed):
    problem = cases.make(dataclasses.replace(case, deterministic=True), seed)
    runs = [(schedule, seed + i, MULTIPROCESSORS[i % 3]) for schedule in SCHEDULES for i in range(20)]
    results = {bits(gradients(problem, seed=s, schedule=schedule, sms=sms)) for schedule, s, sms in runs}
    assert len(results) == 1


def test_order_of_additions_shows_without_the_flag(seed):
    """What the tests above would miss if the order never changed."""
    problem = cases.make(Case("causal", seqlen_q=700, seqlen_k=700, heads_q=1, heads_kv=1, causal=True), seed)
    assert len({bits(gradients(problem, seed=seed, sms=sms)) for sms in MULTIPROCESSORS}) > 1


def test_every_head_dim_fits_the_chip():
    chip = chip_by_number(100)
    pairs = [(d, d_v) for d in range(8, 129, 8) for d_v in (8, d, 128)]
    for head_dim, head_dim_v in [*pairs, (192, 128)]:
        spec = AttentionSpec(torch.bfloat16, head_dim, head_dim_v, heads_q=1, heads_kv=1, softmax_scale=1.0)
        cfg = plan.configure(spec, chip, has_dlse=True)
        assert smem_map(cfg, channels(cfg)).nbytes <= chip.smem_per_block
        spans = tmem_map(cfg).spans  # raises on an overlap that is not declared
        assert spans["dK"].columns >= head_dim and spans["dV"].columns >= head_dim_v
