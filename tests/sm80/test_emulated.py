"""The portable kernels on the emulated chip: right against the oracle, and free of races, leaks and stray accesses."""

import random

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from warpcheck.machine import SCHEDULES

import fa4
from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_of
from fa4.sm80.plan import Plan
from fa4.sm80.tiles import ForwardTiles
from fa4.torch_ops import run
from tests.emulated import Kernels, bits, check_gradients, check_small_logits_under_a_softcap

pytestmark = pytest.mark.rotates(2)

# Small, and each with a part of the kernels that the others leave out; a GPU runs all cases. Compiling takes most of a
# case's time: keys in parts are in tests/test_run.py and, dense, in tests/mods; more columns of v than of k with
# dropout, there; lengths in use of keys alone, forward, in tests/kvcache; groups of heads, forward, in "everything".
FORWARD = (
    "gqa_packed_short_queries",
    pytest.param("split_keys_sink", marks=pytest.mark.soak),
    pytest.param("slices_in_parts", marks=pytest.mark.soak),
)
BOTH = (
    "ragged_one_past_tile",
    "heads_of_several_sections",
    pytest.param("head_dim_v_larger", marks=pytest.mark.soak),
    "seqused_queries_only",
    "packed_rows_past_the_end",
    "batch_and_scale",
    "everything",
    "slices",
    "uneven_slices",
)
BACKWARD = ("deterministic_groups_of_three", "padded_keys", "slices_in_order")
KERNELS = Kernels("sm80", "sm_80", Plan)
OWN = (
    Case("padded_keys", batch=3, seqlen_q=40, seqlen_k=90, seqused=((None, 77), (None, 3), (None, 0)), causal=True),
    # O, dQ, dK and dV in slices of their columns.
    Case("slices", seqlen_q=140, seqlen_k=150, heads_q=2, heads_kv=1, head_dim=512, causal=True),
    Case(
        "uneven_slices",
        lengths=((40, 40), (0, 8), (70, 33)),
        heads_q=2,
        heads_kv=1,
        head_dim=408,
        head_dim_v=296,
        causal=True,
        sink=True,
    ),
    Case(
        "slices_in_order",
        seqlen_q=70,
        seqlen_k=100,
        heads_q=2,
        heads_kv=1,
        head_dim=576,
        head_dim_v=512,
        causal=True,
        deterministic=True,
    ),
    Case("slices_in_parts", seqlen_q=3, seqlen_k=500, heads_q=16, heads_kv=1, head_dim=576, head_dim_v=512),
    Case("split_keys_sink", seqlen_q=2, seqlen_k=1100, heads_q=4, head_dim=32, sink=True),
    Case(
        "everything",
        lengths=((70, 90), (0, 5), (33, 20)),
        seqused=((61, 90), (0, 5), (33, 0)),
        dtype=torch.float16,
        heads_q=4,
        head_dim=40,
        head_dim_v=24,
        window_size=(30, 5),
        softcap=10.0,
        sink=True,
        deterministic=True,
    ),
)
CASES = cases.CASES | {case.name: case for case in OWN}


def _emulated(seed: int):
    schedule = random.Random(seed).choice(["round_robin", "random", "adversarial"])
    print(f"schedule = {schedule}")
    return emulate("sm_80", seed=seed, schedule=schedule)


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, seed):
    problem = cases.make(CASES[name], seed)
    with _emulated(seed):
        out, lse = problem.call(backend="sm80")
    cases.assert_right(cases.judge_forward(problem, out, lse), f"{name} (seed {seed})")


def test_rings_of_two_stages(seed):
    """No row of the table has two stages: they are there to be tuned. Of three blocks of keys the last one is loaded
    while the first is read."""
    case = Case("two_stages", seqlen_q=70, seqlen_k=150, heads_q=1, heads_kv=1, head_dim=32, causal=True)
    problem = cases.make(case, seed)
    with _emulated(seed):
        plan = Plan(
            problem.spec, problem.inputs.extent, chip_of(problem.inputs.q.device), ForwardTiles(64, 64, 4, 2, 1)
        )
        out, lse = run.forward(problem.inputs, problem.spec, plan)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


def test_a_tile_with_fewer_rows_than_its_threads_copy_at_once_is_refused(seed):
    """No row of the table is one: it would be read and written past its end."""
    problem = cases.make(Case("narrow", seqlen_q=70, seqlen_k=90, head_dim=32), seed)
    with _emulated(seed), pytest.raises(Exception, match="a tile has 32 rows, expected a multiple of 64"):
        chip = chip_of(problem.inputs.q.device)
        plan = Plan(problem.spec, problem.inputs.extent, chip, ForwardTiles(128, 32, 8))
        run.forward(problem.inputs, problem.spec, plan)


@pytest.mark.parametrize("name", BOTH)
def test_forward_and_gradients(name, seed):
    problem = cases.make(CASES[name], seed)
    with _emulated(seed):
        out, lse, grads = problem.call_with_gradients(backend="sm80")
    judgements = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads)
    cases.assert_right(judgements, f"{name} (seed {seed})")


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients(name, seed):
    """Those of a deterministic case to the bit the same, though blocks of threads run in another order each time."""
    problem = cases.make(CASES[name], seed)
    schedules = SCHEDULES if problem.spec.deterministic else random.Random(seed).sample(SCHEDULES, 1)
    assert len({bits(check_gradients(KERNELS, problem, seed, schedule)) for schedule in schedules}) == 1, f"seed {seed}"


@pytest.mark.parametrize("head_dim", [512, pytest.param(576, marks=pytest.mark.soak)])
def test_gradients_of_the_widest_heads_in_little_shared_memory(head_dim, seed):
    """The narrowest tiles: 16 keys have half a word of dropout's bits."""
    case = Case(
        "little", seqlen_q=35, seqlen_k=70, heads_q=2, heads_kv=1, head_dim=head_dim, head_dim_v=512, causal=True
    )
    problem = cases.make(case, seed)
    with emulate("sm_86", sms=4, seed=seed):
        rng = torch.tensor([seed, 0])
        q, k, v = (x.detach().requires_grad_() for x in problem.inputs[:3])
        options = dict(causal=True, dropout_p=0.25, dropout_seed=rng)
        by = {}
        for backend in ("sm80", "torch"):
            out = fa4.flash_attn_func(q, k, v, backend=backend, **options)
            by[backend] = out, *torch.autograd.grad(out, (q, k, v), problem.dout)
    for x, expected in zip(by["sm80"], by["torch"]):
        torch.testing.assert_close(x, expected, atol=0.03, rtol=0.03)


def test_small_logits_under_a_softcap(seed):
    check_small_logits_under_a_softcap(KERNELS, seed)


def test_a_row_that_is_nan_shows_in_lse_and_gradients(seed):
    problem = cases.make(CASES["batch_and_scale"], seed)
    problem.inputs.q[1, 7, 0, 3] = torch.nan
    with _emulated(seed):
        out, lse, grads = problem.call_with_gradients(backend="sm80")
    is_nan = torch.zeros_like(lse, dtype=torch.bool)
    is_nan[1, 0, 7] = True
    assert torch.equal(lse.isnan(), is_nan)
    assert torch.equal(out.isnan().all(-1), is_nan.transpose(1, 2)) and torch.equal(
        out.isnan().any(-1), out.isnan().all(-1)
    )
    assert torch.equal(grads.dq.isnan().all(-1), is_nan.transpose(1, 2))
    assert torch.equal(grads.dq.isnan().any(-1), grads.dq.isnan().all(-1))
    assert grads.dk[1, :, 0].isnan().any() and not grads.dk[0].isnan().any()
