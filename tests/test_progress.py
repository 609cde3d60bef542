"""No CTA waits for a CTA that may not run: simulated on the host from the order code of kernels (`tests.schedules`).

With one resident CTA at a time every wait must be for a CTA of lower launch index; then any number of resident CTAs
makes progress.
"""

import dataclasses
import random
from itertools import product

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.mods.ir.record import ModSpec
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, ProblemSize
from fa4.sm80.plan import Sm80Backward as Portable
from fa4.sm90.bwd.plan import Sm90Backward as Hopper
from fa4.sm90.bwd.tiles import TILES, tiles_for
from fa4.sm100.bwd.plan import Sm100Backward as Blackwell
from tests.gpu.residency import FEW_HEADS, HEADS, PLAIN, SEQLEN
from tests.schedules import NoProgress, Pace, Problem, run, walks, without_waits

CHIP = chip_by_number(90)
ROWS = {rule.name: rule.row for rule in TILES}
MASKS = ((None, None), (None, 0), (None, -150), (None, 90), (150, 0), (150, None), (40, 30))
KINDS = {
    "sm90": (Hopper, 90, 128, ROWS["d128_cut"]),
    "sm90_higher_steps": (Hopper, 90, 64, ROWS["d64"]),
    "sm90_wide": (Hopper, 90, 192, ROWS["wide"]),
    "sm90_clusters": (Hopper, 90, 256, ROWS["d256_ordered"]),
    "sm100": (Blackwell, 100, 64, None),
    "sm100_clusters": (Blackwell, 100, 128, None),
    "sm80": (Portable, 80, 64, None),
}


def configured(kind: str, problem: Problem, group: int, sms: int, pairs_per_group: int | None = None, mods=None):
    """The deterministic kernel's configuration."""
    backward, number, head_dim, tiles = KINDS[kind]
    spec = AttentionSpec(
        torch.bfloat16, head_dim, min(head_dim, 128) if tiles is ROWS["wide"] else head_dim, problem.heads_kv * group,
        problem.heads_kv, 0.1, window_left=problem.left, window_right=problem.right, needs_backward=True,
        deterministic=True, mods=mods,
    )  # fmt: skip
    chip = chip_by_number(number, sms=sms)
    if pairs_per_group is not None and backward is Hopper:
        tiles = dataclasses.replace(tiles, pairs_per_group=pairs_per_group)
    return backward(spec, ProblemSize(problem.batch, problem.seqlen_q, problem.seqlen_k), chip, tiles).config(False)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", range(1, 13))
def test_every_wait_is_for_a_lower_launch_index(kind, blocks, seed):
    """All masks and groups, with sections, waves and resident CTAs of random numbers."""
    choose = random.Random(seed + blocks)
    for (left, right), group in product(MASKS, (1, 3)):
        heads, batch, sms = choose.randint(1, 3), choose.randint(1, 3), choose.randint(2, 14)
        problem = Problem(300, 1, heads, batch, left, right)
        cfg = configured(kind, problem, group, sms, choose.choice((None, 1, 2, 5)))
        problem = dataclasses.replace(problem, seqlen_k=blocks * cfg.cluster_tile_n)
        if choose.random() < 0.5:
            lengths = tuple((choose.randint(1, 300), choose.randint(1, problem.seqlen_k)) for _ in range(batch))
            problem = dataclasses.replace(problem, lengths=lengths)
        chains = choose.randint(1, 4) if getattr(cfg, "ascending_order", False) else 1
        if chains > 1:
            cfg = dataclasses.replace(cfg, chained=True)
        found = walks(cfg, problem, chains)
        assert len(found) == blocks * heads * batch
        additions = [addition for walk in found for addition in walk]
        assert len(set(additions)) == len(additions)
        residents = range(1, len(found) + 1) if len(found) <= 12 else (1, 2, 3, sms, len(found))
        for resident in residents:
            run(found, resident, Pace(jitter=choose.random()), seed)


@pytest.mark.parametrize("kind", ["sm90", "sm90_higher_steps", "sm100", "sm80"])
@pytest.mark.parametrize("blocks", range(1, 9))
def test_every_wait_by_the_lists_of_a_block_mask_is_for_a_lower_launch_index(kind, blocks, seed):
    choose = random.Random(seed + blocks)
    for group in (1, 3):
        heads, batch, sms = choose.randint(1, 3), choose.randint(1, 3), choose.randint(2, 14)
        states = tuple(tuple(choose.choices((0, 1, 2), k=blocks)) for _ in range(3))
        problem = Problem(3 * 128, blocks * 128, heads, batch, states=states)
        cfg = configured(kind, problem, group, sms, mods=ModSpec(block=(128, 128)))
        assert cfg.ordered_by_lists and not cfg.descending
        found = walks(cfg, problem)
        additions = [addition for walk in found for addition in walk]
        listed = sum(state > 0 for row in states for state in row)
        expected = listed * heads * batch * (128 // cfg.cluster_tile_n) * (128 * group // cfg.tile_m)
        assert len(set(additions)) == len(additions) == expected
        for resident in range(1, min(len(found), 12) + 1):
            run(found, resident, Pace(jitter=choose.random()), seed)


def test_a_ring_of_waits_ends_only_if_all_its_ctas_are_resident():
    """CTA p begins at query block p and goes round: at each the CTA that begins there adds first."""
    ring = [[((p + i) % 5, i) for i in range(5)] for p in range(5)]
    run(ring, 5)
    for resident in range(1, 5):
        with pytest.raises(NoProgress, match=f"0 of 5 CTAs end with {resident} resident"):
            run(ring, resident)


ON_A_CHIP = (  # head_dim, key/value heads, group, seqlen of 16k tokens
    (64, 32, 1, 1024), (64, 32, 1, 4096), (96, 21, 1, 1024), (96, 21, 1, 4096), (128, 16, 1, 1024), (128, 16, 1, 4096),
    (128, 8, 4, 1024), (128, 8, 4, 4096), (256, 8, 1, 1024), (256, 8, 1, 4096),
)  # fmt: skip
QUICK = (128, 16, 1, 1024), (256, 8, 1, 1024)


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    "shape", [pytest.param(x, marks=[pytest.mark.soak] * (x not in QUICK), id=str(x)) for x in ON_A_CHIP]
)
def test_waits_cost_little_on_a_whole_chip(shape):
    """Without a mask, on 132 CTAs, or 66 clusters at head_dim 256."""
    head_dim, heads, group, seqlen = shape
    problem = Problem(seqlen, seqlen, heads, 16384 // seqlen)
    spec = AttentionSpec(
        torch.bfloat16, head_dim, head_dim, heads * group, heads, 0.1, needs_backward=True, deterministic=True
    )
    cfg = Hopper(spec, ProblemSize(problem.batch, seqlen, seqlen), chip_by_number(90)).config(False)
    found = walks(cfg, problem)
    assert without_waits(found, cfg.concurrent_blocks) / run(found, cfg.concurrent_blocks, Pace(jitter=0.1)) > 0.97


def test_ordered_rows_without_a_mask_need_pairs_enough():
    for heads, batch, seqlen in ((8, 1, 16384), (8, 4, 4096), (8, 16, 1024), (1, 1, 16384), (2, 1, 4096)):
        spec = AttentionSpec(torch.bfloat16, 256, 256, heads, heads, 0.1, needs_backward=True)
        extent = ProblemSize(batch, seqlen, seqlen)
        causal = dataclasses.replace(spec, window_right=0)
        assert tiles_for(spec, CHIP, extent).name == "d256" + "_ordered" * (heads == 8)
        assert tiles_for(causal, CHIP, ProblemSize(batch, 4096, 4096)).name == "d256_ordered"
        # On a chip of fewer multiprocessors the last CTA starts earlier.
        assert tiles_for(spec, chip_by_number(90, sms=8), extent).name == "d256_ordered"


def test_a_gpu_runs_ordered_kernels_with_one_sum_and_with_several():
    """The calls of `tests.gpu.residency`, on an H100."""
    chains = {}
    for name, heads in product(PLAIN, (HEADS, FEW_HEADS)):
        head_dim, mask, order = name.split()
        spec = AttentionSpec(
            torch.bfloat16, int(head_dim), int(head_dim), heads, heads, 0.1, needs_backward=True,
            window_right=0 if mask == "causal" else None, deterministic=order == "deterministic",
        )  # fmt: skip
        backward = Hopper(spec, ProblemSize(1, SEQLEN, SEQLEN), chip_by_number(90))
        if backward.config(False).deterministic:
            chains[name, heads] = backward.chains
    by_default = {(name, heads) for name, heads in chains if "default" in name}
    full = {("256 full default", HEADS)}
    assert by_default == full | {(f"{d} causal default", n) for d in (96, 128, 256) for n in (HEADS, FEW_HEADS)}
    several = {f"{head_dim} full deterministic" for head_dim in (64, 96, 128, 192, 256)}
    assert {key for key, count in chains.items() if count > 1} == {(name, FEW_HEADS) for name in several}
