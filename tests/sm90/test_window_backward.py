"""The Hopper backward of windows on the emulated chip: half steps, and dq by the last key block."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES

from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, ProblemSize
from fa4.sm90.bwd.plan import Sm90Backward, configure
from fa4.sm90.bwd.tiles import TILES, BackwardTiles, tiles_for
from fa4.sm90.plan import Plan
from tests.emulated import Kernels, bits, check_gradients

pytestmark = pytest.mark.rotates(4)

CHIP = chip_by_number(90)
ROW = {rule.name: rule.row for rule in TILES}
KERNELS = Kernels("sm90", "sm_90a", Plan)
WINDOW = AttentionSpec(torch.bfloat16, 64, 64, 64, 8, 0.1, window_left=127, window_right=0, needs_backward=True)


@pytest.mark.parametrize(
    ("left", "right"),
    [(127, 0), (63, 0), (100, 50), *(pytest.param(*x, marks=pytest.mark.soak) for x in ((0, 0), (200, -70), (9, 300)))],
)
@pytest.mark.parametrize("lengths", [None, ((150, 280), (70, 40), (0, 5), (9, 0))], ids=["one_length", "packed"])
def test_consumers_compute_halves_of_steps_along_the_bounds_of_a_window(left, right, lengths, seed):
    shape = dict(lengths=lengths) if lengths else dict(seqlen_q=400, seqlen_k=330)
    case = Case("halves", heads_q=2, heads_kv=1, head_dim=64, window_size=(left, right), **shape)
    check_gradients(KERNELS, cases.make(case, seed), seed, SCHEDULES[seed % len(SCHEDULES)], ROW["d64"])


def test_steps_are_halved_in_windows_alone():
    def halves(**flags) -> bool:
        return configure(replace(WINDOW, **flags), CHIP, False, ROW["d64"]).halves_steps

    assert halves() and halves(varlen=True) and halves(softcap=9.0)
    assert not halves(window_left=None) and not halves(window_right=None)
    assert not configure(WINDOW, CHIP, False, BackwardTiles(64)).halves_steps


LAST = (
    Case("two_blocks", seqlen_q=420, seqlen_k=420, heads_q=4, heads_kv=2, head_dim=64, window_size=(127, 0)),
    Case("four_blocks", seqlen_q=300, seqlen_k=500, heads_q=2, heads_kv=2, head_dim=40, window_size=(300, 0)),
    Case("to_the_right", seqlen_q=500, seqlen_k=500, heads_q=2, heads_kv=1, head_dim=64, window_size=(10, 200)),
    Case("one_block", batch=2, seqlen_q=70, seqlen_k=110, heads_q=2, head_dim=32, window_size=(9, 0), sink=True),
    Case("keys_that_no_query_meets", seqlen_q=150, seqlen_k=500, head_dim=64, window_size=(40, 0), softcap=9.0),
)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.soak] * (i > 2), id=case.name)
                                  for i, case in enumerate(LAST)])  # fmt: skip
def test_the_last_key_block_in_the_order_stores_dq(case, seed):
    """Nothing else writes dq, whose memory holds NaN before."""
    problem = cases.make(case, seed)
    results = {bits(check_gradients(KERNELS, problem, seed, x, ROW["d64_window"], sms=3)) for x in SCHEDULES}
    assert len(results) == 1, f"seed {seed}"


@pytest.mark.parametrize(
    ("flags", "extent", "row"),
    [
        ({}, ProblemSize(1, 4096, 4096), "d64_window"),
        ({"softcap": 9.0}, ProblemSize(1, 4096, 5000), "d64_window"),
        ({"window_left": 1023}, ProblemSize(1, 4096, 4096), "d64"),
        ({}, ProblemSize(1, 5000, 4096), "d64"),
        ({"window_right": -1}, ProblemSize(1, 4096, 4096), "d64"),
        ({"varlen": True}, ProblemSize(1, 4096, 4096), "d64"),
        ({"head_dim": 16, "head_dim_v": 16}, ProblemSize(1, 4096, 4096), "d64"),
        ({"head_dim": 16}, ProblemSize(1, 4096, 4096), "d64"),
        ({"head_dim": 24, "head_dim_v": 8}, ProblemSize(1, 4096, 4096), "d64_window"),
    ],
    ids=str,
)
def test_windows_in_which_every_query_sees_a_key_need_no_finish_kernel(flags, extent, row):
    backward = Sm90Backward(replace(WINDOW, **flags), extent, CHIP)
    assert backward.choice.name == row
    assert backward.config(has_dlse=False).row_blocks.finishes == (row == "d64")


def test_parts_of_grids_have_no_order_by_default():
    """A CTA would wait for CTAs that do not run."""
    chip, few = replace(CHIP, sampled=True), ProblemSize(1, 16384, 1024)
    full = replace(WINDOW, window_left=None, window_right=None, heads_q=16, heads_kv=16)
    names = [tiles_for(WINDOW, chip, ProblemSize(1, 4096, 4096)).name]
    names += [tiles_for(replace(full, head_dim=d, head_dim_v=128), chip, few).name for d in (128, 192)]
    names.append(tiles_for(replace(full, head_dim=128, head_dim_v=128), chip, ProblemSize(1, 32760, 512)).name)
    assert names == ["d64", "d128", "d192", "d128_parts"]


def test_tiles_that_would_leave_out_dq_are_refused():
    row = ROW["d64_window"]
    with pytest.raises(ValueError, match="expected every query to see one"):
        Sm90Backward(WINDOW, ProblemSize(1, 5000, 4096), CHIP, row)
    for flags in ({"window_left": None}, {"window_right": None}, {"varlen": True}, {"head_dim": 16, "head_dim_v": 16}):
        with pytest.raises(ValueError, match="last_finishes: expected"):
            configure(replace(WINDOW, **flags), CHIP, False, row)
    with pytest.raises(ValueError, match="last_finishes: expected"):
        configure(WINDOW, CHIP, False, replace(row, ordered=False))
