"""Every tile row of the Blackwell kernels on such a chip, and the canaries of what no emulator can vouch for."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_of
from fa4.runtime.spec import Saved
from fa4.sm100.bwd import tiles as backward_tiles
from fa4.sm100.fwd import tiles as forward_tiles
from fa4.sm100.fwd.config import Schedule
from fa4.sm100.plan import Plan
from fa4.torch_ops import run
from tests.gpu.offered import needs_gpu, offered

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif("sm100" not in offered(), reason="needs an sm_100 or sm_103"),
]

FULL = forward_tiles.ForwardTiles(polynomial=2, schedule=Schedule.PERSISTENT)
FORWARD = {
    "persistent": FULL,
    "single": replace(FULL, schedule=Schedule.SINGLE),
    "dynamic": replace(FULL, schedule=Schedule.DYNAMIC),
    "pairs": replace(FULL, ctas=2),
    "single_pairs": replace(FULL, schedule=Schedule.SINGLE, ctas=2),
    "no_polynomial": replace(FULL, polynomial=0),
    "all_polynomial": replace(FULL, polynomial=16),
    "sawtooth": replace(FULL, sawtooth=True),
    "rescale_at_every_growth": replace(FULL, rescale_threshold=0.0),
}
BACKWARD = {"single": backward_tiles.SINGLE, "pair": backward_tiles.PAIR}
LONG = Case("long", batch=2, seqlen_q=1100, seqlen_k=1500, heads_q=4, heads_kv=2, head_dim=128)
CAUSAL = replace(LONG, name="long_causal", causal=True)
WIDE = Case("wide", seqlen_q=700, seqlen_k=700, head_dim=192, head_dim_v=128, causal=True)


def forward(problem: cases.Problem, **tiles):
    plan = Plan(problem.spec.with_positive_scale(), problem.inputs.extent, chip_of(problem.inputs.q.device), **tiles)
    return plan, *run.forward(problem.inputs, problem.spec, plan)


def backward(problem: cases.Problem, **tiles):
    plan, out, lse = forward(problem, **tiles)
    dlse = problem.dlse.masked_fill(lse == -torch.inf, 0.0)
    return out, lse, run.backward(problem.inputs, problem.spec, plan, Saved(out, lse, problem.dout, dlse))


@pytest.mark.parametrize("row", FORWARD)
def test_a_forward_row_is_right_and_repeats(row, seed):
    case = LONG if FORWARD[row].ctas == 2 else CAUSAL
    problem = cases.make(case, seed, device="cuda")
    _, out, lse = forward(problem, forward_tiles=FORWARD[row])
    cases.assert_right(cases.judge_forward(problem, out, lse), f"{row} (seed {seed})")
    for _ in range(50):
        _, again, lse_again = forward(problem, forward_tiles=FORWARD[row])
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "deterministic"])
@pytest.mark.parametrize("row", BACKWARD)
def test_a_backward_row_is_right(row, deterministic, seed):
    problem = cases.make(replace(CAUSAL, deterministic=deterministic), seed, device="cuda")
    out, lse, grads = backward(problem, backward_tiles=BACKWARD[row])
    judgements = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads)
    cases.assert_right(judgements, f"{row} (seed {seed})")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", [WIDE, replace(LONG, deterministic=True)], ids=str)
def test_products_of_different_accumulators_stay_in_order(case, seed):
    """The kernels take it that the matrix unit works in order also between accumulators, and between M = 128 and
    M = 64, which the ISA does not promise: a thousand repetitions, bit for bit."""
    problem = cases.make(replace(case, deterministic=True), seed, device="cuda")
    tiles = {"forward_tiles": replace(forward_tiles.tiles_for(problem.spec, chip_of(problem.inputs.q.device)).row,
                                      rescale_threshold=0.0)}  # fmt: skip
    out, lse, grads = backward(problem, **tiles)
    cases.assert_right(cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads), f"seed {seed}")
    for _ in range(1000):
        out_again, lse_again, grads_again = backward(problem, **tiles)
        assert torch.equal(out, out_again) and torch.equal(lse, lse_again)
        assert all(torch.equal(a, b) for a, b in zip(grads, grads_again) if a is not None)
