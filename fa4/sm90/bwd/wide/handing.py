"""How P gets from one warpgroup to the other, and dS to the other CTA of a pair.

2^15 P lies in shared memory as float16, in the order in which threads hold it: eight numbers of every thread, then the
next eight. Dropout's verdict goes with it as the sign, so that one warpgroup alone computes it: negative is dropped. dS
of a pair's other CTA lies behind a CTA's own, brought there by a bulk copy between their shared memories.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from ....core.vec_io import load_halves, store_vec
from ....pipeline.cursor import Cursor
from ....pipeline.roles import WARPS_PER_WARPGROUP
from ....pipeline.tma import bulk_copy_to
from ..placement import WARPGROUP
from ..pointwise import rounded


def hand_over(context, stage: Int32, p: list[Float32]) -> None:
    """Put this thread's P there."""
    words = rounded(p, Float16)
    for i, place in enumerate(_places(context, stage, len(p))):
        store_vec(place, words[4 * i : 4 * i + 4])


def handed_over(context, stage: Int32, count: int) -> list[Float32]:
    """This thread's P, from there."""
    return [x for place in _places(context, stage, count) for x in load_halves(place, Float16)]


def factors_by_sign(p: list[Float32], scale: Float32) -> list[Float32]:
    """What dP is multiplied by: `scale`, or 0 where P says that the pair is dropped."""
    return [Float32(cutlass.select_(x < 0.0, Float32(0.0), scale)) for x in p]


def _places(context, stage: Int32, count: int) -> list[cute.Pointer]:
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    first = context.smem.pointer("P", Float16) + stage * (context.cfg.p_bytes // 2) + 8 * thread
    return [first + i * WARPGROUP for i in range(0, count, 8)]


@cute.jit
def send_ds(context, others: Cursor):
    """Whole warpgroup, which has written and announced its dS: send it to the pair's other CTA. others: the place
    there."""
    panel = context.cfg.ds_tile.panel_bytes
    # All threads have fenced what they wrote; see `Channel.carries` of dS.
    cute.arch.barrier(barrier_id=context.ds_written, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
        others.expect_tx(panel)
        source = context.smem.address("dS") + others.stage * (2 * panel)
        rank = context.args.order.rank ^ 1
        with cute.arch.elect_one():
            bulk_copy_to(rank, source, source + panel, panel, others.barrier())
