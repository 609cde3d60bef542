"""Where a CTA starts in its list: at the keys that the CTAs beside it are at, so that these rows are in the L2 cache.

CTAs do not start at the same time, nor run at the same rate. If each began with its first key, they would add to
rows all over the sums of dK and dV, which may be larger than the L2 cache. So a list is a ring. All CTAs move through
the keys in ascending order, again and again. `front` counts the rows of k that the fastest of them has come past: a
CTA starts with the first listed row from there on. No CTA waits for another, and any front is correct.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...bwd.device.list_work import SparseWork
from ...pipeline.cursor import consume
from ...pipeline.ends import Ends
from ...pipeline.roles import WARP
from .config import TILE_N
from .context import Sm90SparseContext


def start_block(context: Sm90SparseContext, ends: Ends) -> Int32:
    """Return the block that the CTA starts with, as role add_dV found it."""
    if not context.cfg.has_front:
        return Int32(0)
    consume(ends.add_dV_all_start).wait()
    return Int32(start_slot(context)[0])


def start_slot(context: Sm90SparseContext) -> cute.Tensor:
    """Return the shared memory of the block that the CTA starts with."""
    return cute.make_tensor(context.smem.pointer("start", Int32), cute.make_layout(1))


def load_front(context: Sm90SparseContext) -> Int32:
    return cute.arch.load(context.args.tensors.front.iterator, Int32, sem="relaxed", scope="gpu")


def first_block(context: Sm90SparseContext, work: SparseWork, front: Int32) -> Int32:
    """Whole warp: return the block to start with. Of long lists, lanes look at every n-th block."""
    row = front % cute.size(context.args.tensors.k, mode=[0])
    step = cute.ceil_div(work.blocks(context), WARP)
    block = cute.arch.lane_idx() * step
    is_before = (block < work.blocks(context)) & (work.key_row(context, block * TILE_N) < row)
    first = cute.arch.popc(cute.arch.vote_ballot_sync(is_before)) * step
    return Int32(cutlass.select_(first < work.blocks(context), first, Int32(0)))


@cute.jit
def advance(context: cutlass.Constexpr[Sm90SparseContext], front: Int32, row: Int32):
    """Whole warp: tell that this CTA, which found `front`, has come to the first lane's row."""
    if cute.arch.lane_idx() == 0:
        keys = cute.size(context.args.tensors.k, mode=[0])
        ahead = row - front % keys
        come_to = front + Int32(cutlass.select_(ahead < 0, ahead + keys, ahead))
        cute.arch.red(context.args.tensors.front.iterator, come_to, op="max", dtype="s32", sem="relaxed", scope="gpu")
