"""Hopper forwards of narrow windows, whose consumers have one key block each, on the emulated chip."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import device
from fa4.runtime.spec import AttentionSpec, ProblemSize
from fa4.sm90.fwd.plan import configure
from fa4.sm90.fwd.tiles import ForwardTiles, tiles_for
from fa4.sm90.plan import Plan
from tests.emulated import Kernels

KERNELS = Kernels("sm90", "sm_90a", Plan)
CHIP = device.chip_by_number(90)
ROW = ForwardTiles(4, 136, ping_pong=False, packs_heads=True, one_block=True)
EIGHT = dict(heads_q=8, heads_kv=1, head_dim=64)
SPEC = AttentionSpec(torch.bfloat16, 64, 64, 64, 8, 0.125, window_left=127, window_right=0)
LONG = ProblemSize(2, 8192, 8192)


@pytest.mark.parametrize(
    "case",
    [
        Case("as_wide_as_a_block", batch=2, seqlen_q=200, seqlen_k=200, window_size=(127, 0), sink=True, **EIGHT),
        Case("more_keys", seqlen_q=61, seqlen_k=330, window_size=(100, 28), **EIGHT),
        Case("rows_without_keys", seqlen_q=300, seqlen_k=150, window_size=(90, 0), **EIGHT),
        Case("softcap", seqlen_q=150, seqlen_k=170, window_size=(30, 9), softcap=9.0, dtype=torch.float16, **EIGHT),
        Case("groups_of_four", seqlen_q=170, seqlen_k=171, heads_q=8, heads_kv=2, head_dim=48, window_size=(120, 0)),
    ],
    ids=lambda case: case.name,
)
def test_keys_of_a_consumer_are_one_block(case, seed):
    problem = cases.make(case, seed)
    for schedule in ("random", "round_robin"):
        out, lse = KERNELS.forward(problem, seed, schedule, ROW)
        cases.assert_right(cases.judge_forward(problem, out, lse), f"{case}, {schedule}, seed {seed}")


@pytest.mark.parametrize("consumers", [2, 3])
def test_fewer_consumers(consumers, seed):
    problem = cases.make(Case("few", seqlen_q=170, seqlen_k=190, window_size=(127, 0), **EIGHT), seed)
    out, lse = KERNELS.forward(problem, seed, "random", replace(ROW, consumers=consumers))
    cases.assert_right(cases.judge_forward(problem, out, lse), f"{consumers} consumers, seed {seed}")


def test_narrow_windows_of_eight_heads_have_the_row():
    name = "head_dim <= 64, window in a block"
    assert tiles_for(SPEC, CHIP, LONG).name == name
    assert tiles_for(replace(SPEC, window_left=100, window_right=28), CHIP, LONG).name == name
    others = (
        {"window_left": 129},
        {"heads_kv": 4},
        {"heads_kv": 16},
        {"varlen": True},
        {"has_seqused_k": True},
        {"head_dim": 72},
        {"window_right": None},
    )
    for other in others:
        assert tiles_for(replace(SPEC, **other), CHIP, LONG).name != name, other


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"window_left": 129}, "tile_n 136 is less than the 137 keys"),
        ({"heads_kv": 4}, "at most 8 packed heads, got 16"),
        ({"varlen": True}, "sequences of one length"),
        ({"window_right": None}, "expected windows"),
    ],
    ids=str,
)
def test_other_problems_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        configure(replace(SPEC, **changes), LONG, CHIP, ROW)
