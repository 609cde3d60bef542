"""fa4's kernels end with one resident CTA, or cluster, at a time: they wait for none that has not started."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import cutlass
from cutlass import Int32

import fa4
from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import jit, plan
from fa4.runtime.device import chip_of
from fa4.runtime.spec import Gradients
from fa4.sm80.plan import Plan as Portable
from fa4.sm90.bwd.common.config import Sm90BackwardSteps
from fa4.sm90.bwd.common.work import Sm90BackwardWork
from fa4.sm90.bwd.tiles import TILES
from fa4.sm90.plan import Plan as Hopper
from fa4.sm100.plan import Plan as Blackwell
from fa4.torch_ops.run import backward
from tests.emulated import given, judge_gradients
from tests.mods.oracle import Problem, assert_kernel_is_right

pytestmark = pytest.mark.rotates(6)

PLANS: dict[str, Callable[..., plan.Plan]] = {"sm_80": Portable, "sm_90a": Hopper, "sm_100a": Blackwell}
SMS = 4
ROWS = {rule.name: rule.row for rule in TILES}
D96_ORDERED, D256_ORDERED = ROWS["d96_ordered"], ROWS["d256_ordered"]


@dataclass(frozen=True)
class Ordered:
    """A backward whose additions to dQ have an order. tiles: replaces the row of the table. chains: sums of a query
    block's dQ, fewer than key blocks. ctas: of a cluster."""

    chip: str
    case: Case
    tiles: Any = None
    chains: int = 1
    ctas: int = 1


def ordered(chip: str, *, tiles: Any = None, chains: int = 1, ctas: int = 1, **shape: Any) -> Ordered:
    return Ordered(chip, Case("bwd", **{"deterministic": tiles is None, **shape}), tiles, chains, ctas)


def heads(queries: int, keys: int | None = None) -> dict[str, int]:
    return {"heads_q": queries, "heads_kv": keys or queries}


LENGTHS = (150, 300), (20, 40), (0, 5), (9, 0), (260, 270)
# On an sm_90 of 4 SMs five heads, or three of a pair of CTAs, have one chain.
ORDERED = {
    "portable": ordered("sm_80", seqlen_q=256, seqlen_k=384, **heads(1)),
    "full": ordered("sm_90a", seqlen_q=160, seqlen_k=384, head_dim=128, **heads(5)),
    "chained": ordered("sm_90a", seqlen_q=256, seqlen_k=640, **heads(4), chains=4),
    "causal": ordered("sm_90a", seqlen_q=256, seqlen_k=384, head_dim=128, causal=True, **heads(1)),
    "by_default": ordered("sm_90a", seqlen_q=128, seqlen_k=384, head_dim=96, **heads(5), tiles=D96_ORDERED),
    "window": ordered(
        "sm_90a", seqlen_q=256, seqlen_k=384, window_size=(127, 0), **heads(2, 1), tiles=ROWS["d64_window"]
    ),
    "wide": ordered("sm_90a", seqlen_q=128, seqlen_k=384, head_dim=192, **heads(3), ctas=2),
    "wide_pair": ordered(
        "sm_90a", seqlen_q=128, seqlen_k=384, head_dim=256, **heads(3), tiles=D256_ORDERED, ctas=2
    ),
    "packed_group_causal": ordered("sm_90a", lengths=LENGTHS, causal=True, **heads(2, 1)),
    "pair": ordered("sm_100a", seqlen_q=256, seqlen_k=768, head_dim=128, **heads(1), ctas=2),
}  # fmt: skip
MORE_ORDERED = {
    "portable_packed_group_causal": ordered("sm_80", lengths=LENGTHS, causal=True, **heads(2, 1)),
    "group": ordered("sm_90a", seqlen_q=160, seqlen_k=384, head_dim=128, **heads(10, 5)),
    "group_causal": ordered("sm_90a", seqlen_q=256, seqlen_k=640, head_dim=128, causal=True, **heads(6, 2)),
    "packed": ordered("sm_90a", lengths=LENGTHS, **heads(1)),
    "left_bound": ordered("sm_90a", seqlen_q=300, seqlen_k=384, window_size=(200, None), **heads(5)),
    "right_bound": ordered("sm_90a", seqlen_q=300, seqlen_k=384, window_size=(None, 90), **heads(5)),
    "d192": ordered("sm_90a", seqlen_q=128, seqlen_k=384, head_dim=192, head_dim_v=128, **heads(5)),
    "wide_packed_causal": ordered("sm_90a", lengths=LENGTHS, head_dim=192, causal=True, **heads(2, 1), ctas=2),
    "wide_pair_group_causal": ordered(
        "sm_90a", seqlen_q=256, seqlen_k=384, head_dim=256, causal=True, **heads(2, 1), tiles=D256_ORDERED, ctas=2
    ),
    "single": ordered("sm_100a", seqlen_q=160, seqlen_k=384, head_dim=192, head_dim_v=128, **heads(1)),
    "pair_packed_group_causal": ordered("sm_100a", lengths=LENGTHS, head_dim=128, causal=True, **heads(2, 1), ctas=2),
}  # fmt: skip


def soaked(more: Any) -> list:
    return [pytest.param(name, marks=pytest.mark.soak) for name in more]


def gradients(made: plan.Plan, problem: cases.Problem) -> Gradients:
    spec = replace(problem.spec, needs_backward=True)
    return backward(problem.inputs, spec, made, given(problem))


def plan_of(chip: str, problem: cases.Problem, tiles: Any = None) -> plan.Plan:
    """Inside of `emulate`."""
    spec = replace(problem.spec.with_positive_scale(), needs_backward=True)
    return PLANS[chip](spec, problem.inputs.extent, chip_of(problem.inputs.q.device), backward_tiles=tiles)


@pytest.mark.parametrize("name", [*ORDERED, *soaked(MORE_ORDERED)])
def test_an_ordered_backward_needs_one_resident_cluster(name: str, seed: int) -> None:
    row = (ORDERED | MORE_ORDERED)[name]
    problem = cases.make(row.case, seed)
    with emulate(row.chip, sms=SMS, seed=seed, schedule="random", resident=1):
        made = plan_of(row.chip, problem, row.tiles)
        its = made._backward  # type: ignore[attr-defined]
        cfg = its.config(has_dlse=True)
        # Key blocks do wait for others.
        assert cfg.deterministic and cfg.row_blocks.semaphores and cfg.ctas == row.ctas
        assert its.chains == row.chains < -(-problem.inputs.max_seqlen_k // cfg.cluster_tile_n)
        judged = judge_gradients(problem, gradients(made, problem))
    cases.assert_right(judged, f"{name}, seed {seed}")


LISTED = [
    ("sm90", "sm_90a"),
    *(pytest.param(*x, marks=pytest.mark.soak) for x in (("sm80", "sm_80"), ("sm100", "sm_100a"))),
]


def stripes(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Blocks of 128 that are seen whole, in part, and not at all."""
    return (kv_idx + 2 * q_idx) % 512 < 350


def rotate_lists(block_mask: Any) -> None:
    """The last block of each list comes first."""
    for side in ("kv", "full_kv", "q", "full_q"):
        counts, lists = (getattr(block_mask, f"{side}_{kind}") for kind in ("num_blocks", "indices"))
        for at in product(*map(range, counts.shape)):
            there = lists[at][: counts[at]]
            there.copy_(there.roll(1))


@pytest.mark.parametrize("backend, chip", LISTED)
@pytest.mark.parametrize("is_rotated", [False, True], ids=["ascending", "rotated"])
def test_a_backward_in_the_order_of_lists_needs_one_resident_cluster(
    backend: str, chip: str, is_rotated: bool, seed: int
) -> None:
    rows = 640
    block_mask = fa4.create_block_mask(stripes, 1, 1, rows, rows, device="cpu")
    most = max(int(block_mask.kv_num_blocks.max()), int(block_mask.full_kv_num_blocks.max()))
    assert most > 1, "no list has an order"
    if is_rotated:
        rotate_lists(block_mask)
    call = dict(block_mask=block_mask, deterministic=True)
    problem = Problem("lists", rows, rows, 1, 1, head_dim=64, mask_mod=stripes, call=call)
    with emulate(chip, sms=SMS, seed=seed, schedule="random", resident=1):
        q = torch.empty(1, rows, 1, 64, dtype=torch.bfloat16, requires_grad=True)
        assert "lower launch index" in fa4.explain(q, q, q, **call).progress
        assert_kernel_is_right(problem, seed, backend)


OTHERS = {
    "persistent": ("sm_90a", Case("fwd", seqlen_q=600, seqlen_k=600, head_dim=64)),
    "dynamic": ("sm_100a", Case("fwd", seqlen_q=600, seqlen_k=600, head_dim=64, causal=True)),
    "split": ("sm_90a", Case("fwd", seqlen_q=1, seqlen_k=2000, head_dim=128)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_forward_needs_one_resident_cluster(name: str, seed: int) -> None:
    chip, case = OTHERS[name]
    problem = cases.make(case, seed)
    with emulate(chip, sms=SMS, seed=seed, schedule="random", resident=1):
        judged = cases.judge_forward(problem, *problem.call())
    cases.assert_right(judged, f"{name}, seed {seed}")


def test_a_backward_whose_first_writer_stores_needs_one_resident_cta(seed: int) -> None:
    problem = cases.make(Case("bwd", seqlen_q=256, seqlen_k=384, head_dim=128, **heads(1)), seed)
    with emulate("sm_90a", sms=SMS, seed=seed, schedule="random", resident=1):
        made = plan_of("sm_90a", problem)
        cfg = made._backward.config(has_dlse=True)  # type: ignore[attr-defined]
        assert cfg.first_writer and cfg.row_blocks.semaphores and not cfg.deterministic
        judged = judge_gradients(problem, gradients(made, problem))
    cases.assert_right(judged, f"seed {seed}")


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward whose key blocks begin at different query blocks and go round. Of a query block's additions the first
    is that of the last CTA that begins at or before it; so each CTA waits for the CTA after it, too."""

    def order_index(self: Sm90BackwardWork, m_block: Int32, head: Int32, context: Any) -> Int32:
        pos, count = self.neighbours.rank, self.neighbours.count
        nearest = ((m_block + 1) * count - 1) // self.blocks
        behind = nearest - pos
        return Int32(cutlass.select_(behind < 0, behind + count, behind))

    monkeypatch.setattr(Sm90BackwardSteps, "staggered", property(lambda cfg: True))
    monkeypatch.setattr(Sm90BackwardSteps, "ascending_order", property(lambda cfg: False))
    monkeypatch.setattr(Sm90BackwardWork, "order_index", order_index)
    # Compile keys do not tell this kernel from the right one.
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: None)


def test_an_order_that_is_a_ring_is_found_unless_all_ctas_are_resident(ring: None, seed: int) -> None:
    problem = cases.make(Case("bwd", seqlen_q=384, seqlen_k=384, **heads(1), deterministic=True), seed)
    for resident in (1, 2, 0):
        with emulate("sm_90a", sms=SMS, seed=seed, resident=resident, on_finding="collect") as gpu:
            judged = judge_gradients(problem, gradients(plan_of("sm_90a", problem), problem))
            found = {finding.kind for finding in gpu.findings}
        assert found == ({"co-residency"} if resident else set()), f"{resident} resident, seed {seed}"
        cases.assert_right(judged, f"{resident} resident, seed {seed}")


@pytest.mark.parametrize("chip", ["sm_90a", "sm_80"])
def test_a_packed_backward_ends_whose_bounds_are_too_small(chip: str, seed: int) -> None:
    """What it gives is undefined. Where lengths lie on a GPU, no call checks them."""
    problem = cases.make(Case("bwd", lengths=((384, 384),), causal=True, deterministic=True, **heads(1)), seed)
    saved, spec = given(problem), replace(problem.spec, needs_backward=True)
    for bounds in ({"max_seqlen_k": 256}, {"max_seqlen_q": 256}, {"max_seqlen_q": 128, "max_seqlen_k": 256}):
        short = replace(problem, inputs=problem.inputs._replace(**bounds))
        for resident in (0, 1):
            with emulate(chip, sms=8, seed=seed, resident=resident):
                backward(short.inputs, spec, plan_of(chip, short), saved)
