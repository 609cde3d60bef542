"""Exchange of P between the two consumers, and of dS between the two CTAs of a pair.

2^15 P is in shared memory as float16, in thread order: eight numbers of every thread, then the next eight. Its sign
carries dropout, so only one consumer computes that: negative means dropped. dS of the peer CTA is behind the CTA's own
dS; a bulk copy between their shared memories brings it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from ....core.dropout import keeps
from ....core.vec_io import load_halves, store_vec
from ....pipeline.cursor import Cursor
from ....pipeline.roles import WARPS_PER_WARPGROUP
from ....pipeline.tma import bulk_copy_to
from ..common.config import WARPGROUP
from ..common.pointwise import KeepBits, pack
from .context import Sm90WideContext


def store_p(context: Sm90WideContext, stage: Int32, p: list[Float32]) -> None:
    """Store this thread's P to shared memory."""
    packed = pack(p, Float16)
    for i, ptr in enumerate(_p_ptrs(context, stage, len(p))):
        store_vec(ptr, packed[4 * i : 4 * i + 4])


def load_p(context: Sm90WideContext, stage: Int32, count: int) -> list[Float32]:
    """Load this thread's P from shared memory."""
    return [x for ptr in _p_ptrs(context, stage, count) for x in load_halves(ptr, Float16)]


def sign_dropped(p: list[Float32], keep_bits: KeepBits) -> list[Float32]:
    """Return the elements, which are not negative, with a minus sign for dropped ones."""
    return [Float32(cutlass.select_(keeps(*keep_bits.bit(i)), x, -x)) for i, x in enumerate(p)]


def dropout_factors(p: list[Float32], scale: Float32) -> list[Float32]:
    """Return the factors of dP: `scale`, or 0 where the sign of P says dropped."""
    return [Float32(cutlass.select_(x < 0.0, Float32(0.0), scale)) for x in p]


def _p_ptrs(context: Sm90WideContext, stage: Int32, count: int) -> list[cute.Pointer]:
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    first = context.smem.pointer("P", Float16) + stage * (context.cfg.p_bytes // 2) + 8 * thread
    return [first + i * WARPGROUP for i in range(0, count, 8)]


@cute.jit
def send_ds(context: Sm90WideContext, peer: Cursor):
    """Whole warpgroup, after it stored dS and arrived: send dS to the stage `peer` of the peer CTA."""
    panel = context.cfg.ds_tile.panel_bytes
    # All threads have fenced their writes; see `Channel.carries` of dS.
    cute.arch.barrier(barrier_id=context.ds_written, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
        peer.expect_tx(panel)
        source = context.smem.address("dS") + peer.stage * (2 * panel)
        rank = context.args.order.rank ^ 1
        with cute.arch.elect_one():
            bulk_copy_to(rank, source, source + panel, panel, peer.barrier())
