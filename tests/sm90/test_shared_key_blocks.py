"""Hopper backwards of which several CTAs share each key block, on the emulated chip."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES

from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import device
from fa4.runtime.spec import AttentionSpec, ProblemSize
from fa4.sm90.bwd.parts import parts_for
from fa4.sm90.bwd.plan import configure
from fa4.sm90.bwd.tiles import BackwardTiles, tiles_for
from fa4.sm90.plan import Plan
from tests.emulated import Kernels, bits, check_gradients

KERNELS = Kernels("sm90", "sm_90a", Plan)
CHIP = device.chip_by_number(90)
FULL = AttentionSpec(torch.bfloat16, 128, 128, 40, 40, 128**-0.5, needs_backward=True)
CAUSAL = replace(FULL, heads_q=14, heads_kv=2, window_right=0)
CROSS, SHORT = ProblemSize(1, 32760, 512), ProblemSize(4, 2000, 2000)


def row(tile_m: int, parts: int | None) -> BackwardTiles:
    return BackwardTiles(tile_m, first_writer=True, parts=parts)


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    ("tiles", "case"),
    [
        (row(80, 3), Case("cross", seqlen_q=500, seqlen_k=150, heads_q=2, heads_kv=2, head_dim=128)),
        (row(64, 2), Case("causal", seqlen_q=300, seqlen_k=310, heads_q=3, heads_kv=1, head_dim=128, causal=True)),
        (row(128, 3), Case("one_block", batch=2, seqlen_q=700, seqlen_k=77, heads_kv=1, head_dim=64, sink=True)),
        (row(64, 4), Case("uneven", seqlen_q=400, seqlen_k=200, head_dim=72, head_dim_v=104, softcap=9.0)),
        (row(64, 6), Case("more_parts_than_steps", seqlen_q=200, seqlen_k=300, head_dim=40, causal=True)),
        (row(64, 3), Case("keys_without_queries", seqlen_q=300, seqlen_k=140, head_dim=128, window_size=(None, -40))),
    ],
    ids=lambda x: getattr(x, "name", ""),
)  # fmt: skip
def test_gradients(tiles, case, seed):
    problem = cases.make(case, seed)
    check_gradients(KERNELS, problem, seed, SCHEDULES[seed % len(SCHEDULES)], tiles)


def test_deterministic_gradients_repeat(seed):
    case = Case("order", seqlen_q=330, seqlen_k=300, heads_q=2, head_dim=128, deterministic=True)
    problem = cases.make(case, seed)
    found = {bits(KERNELS.gradients(problem, seed + i, schedule, row(80, 2))) for i, schedule in enumerate(SCHEDULES)}
    assert len(found) == 1, f"seed {seed}"


@pytest.mark.parametrize(
    ("spec", "extent", "parts", "name"),
    [
        (FULL, CROSS, 4, "d128_parts_ordered"),
        (replace(FULL, heads_q=12, heads_kv=12), CROSS, 8, "d128_parts_ordered"),
        (replace(FULL, deterministic=True), CROSS, 4, "d128_parts_ordered"),
        (replace(FULL, heads_q=4, heads_kv=4), ProblemSize(1, 4096, 1024), 4, "d128_parts"),
        (replace(FULL, softcap=9.0), CROSS, 4, "d128_cut_parts"),
        (replace(FULL, head_dim=64, head_dim_v=64), CROSS, 4, "d64_parts"),
        (CAUSAL, SHORT, 2, "d128_cut_parts"),
        (replace(CAUSAL, deterministic=True), SHORT, 1, "d128_ordered"),
        (replace(FULL, batch_invariant=True), CROSS, 1, "d128_few_keys"),
        (replace(FULL, varlen=True), CROSS, 1, "d128"),
        (FULL, ProblemSize(1, 16384, 16384), 1, "d128"),
        (FULL, ProblemSize(1, 0, 16384), 1, "d128"),
    ],
)
def test_few_key_blocks_are_shared(spec, extent, parts, name):
    assert parts_for(spec, extent, CHIP) == parts
    assert tiles_for(spec, CHIP, extent).name == name


@pytest.mark.parametrize(
    "spec",
    [replace(CAUSAL, deterministic=True), replace(FULL, varlen=True), replace(FULL, window_left=9)],
    ids=["order along a diagonal", "varlen", "left bound"],
)
def test_other_problems_are_refused(spec):
    with pytest.raises(ValueError, match="parts of key blocks"):
        configure(spec, CHIP, False, row(64, 2), parted=True)
