"""Load role of 16-bit rows that TMA cannot load in boxes, two instances of two warps: copies the key blocks of either
compute role row by row, from last to first, part by part.

Waits:   load_both_left.free, load_both_right.free; with several work tiles load_both_Q.free
Signals: load_both_Q.full, load_both_left.full, load_both_right.full, load_even_tail.full, load_odd_tail.full

An instance does not wait for its copies: they complete the barriers. So it starts the copies of a part as soon as the
place is free. Rows come to the L2 cache before, two blocks of the instance ahead: scattered rows have no other
locality.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...fwd.device.key_rows import KeyRows, copied_rows, prefetch
from ...fwd.device.load import load_q
from ...fwd.device.queue import Queue
from ...fwd.device.work import Work
from ...pipeline.cursor import Cursor, produce
from ...pipeline.roles import WARP
from .config import GATHERERS, HALVES, TILE_N
from .context import LatentContext
from .load import part_cursors


@cute.jit
def gather(context: LatentContext):
    if _warp() < GATHERERS:
        gather_tiles(context, 0)
    else:
        gather_tiles(context, 1)


@cute.jit
def gather_tiles(context: LatentContext, half: cutlass.Constexpr[int]):
    """Copy the key blocks of warpgroup `half`. The first warp loads Q, after the first keys, whose place is free
    before that of Q."""
    cfg, ends = context.cfg, context.ends("load")
    q, parts = produce(ends.load_both_Q), part_cursors(cfg, ends)[half]
    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            rows = KeyRows.of(context, work, copied_rows(cfg, GATHERERS))
            far = KeyRows.of(context, work, (_thread(),))  # to prefetch
            rows.load_pages(_block(work, half))
            far.load_pages(_block(work, half + HALVES))
            prefetch_block(context, work, far, half + HALVES)
            for i in cutlass.range((work.count + 1 - half) // HALVES, unroll=1):
                n = HALVES * i + half
                parts = copy_block(context, work, rows, n, half, parts)
                if i == 0 and _warp() == 0:
                    if const_expr(cfg.persistent):
                        q.wait()
                    load_q(context, work, work.m_block, q)
                prefetch_block(context, work, far, n + 2 * HALVES)
            q = q.next()
        queue = queue.next()


def copy_block(
    context: LatentContext, work: Work, rows: KeyRows, n: Int32, half: int, parts: list[Cursor]
) -> list[Cursor]:
    """Copy the n-th block, one of warpgroup `half`, whose pages are loaded; load those of the instance's next block."""
    cfg, address = context.cfg, context.smem.address("K and P") + half * context.cfg.stage_bytes
    for part, cursor in enumerate(parts):
        if part < HALVES:  # the tail is free with the second one
            cursor.wait()
        if part == 0:  # the instance's last copies are done: they have been read
            cute.arch.cp_async_wait_group(0)
        rows.copy("k", _block(work, n), address, slice(*cfg.part_bounds[part : part + 2]))
        cursor.arrive()
    cute.arch.cp_async_commit_group()
    rows.load_pages(_block(work, n + HALVES))
    return [cursor.next() for cursor in parts]


@cute.jit
def prefetch_block(context: LatentContext, work: Work, far: KeyRows, n: Int32):
    """Prefetch a row of the n-th block, if there is one, whose page is loaded; load that of the instance's next block.
    The CTAs of the heads of a query divide the rows."""
    cfg = context.cfg
    ctas = cfg.group // cfg.packed_heads
    if n < work.count and (_thread() + work.head) % ctas == 0:
        source, _ = far.source(context.args.k, _block(work, n), 0)
        prefetch(source, cfg.head_dim * cfg.dtype_bits // 8)
    far.load_pages(_block(work, n + HALVES))


def _block(work: Work, n: Int32 | int) -> Int32:
    """Number of the n-th block in the order of the loop; of a block that does not exist, any number."""
    return work.block_iter.block(work.block_iter.ahead(work.block_iter.start(), n))


def _warp() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % (HALVES * GATHERERS)


def _thread() -> Int32:
    """This thread's number in its instance, which has one for each row of a block."""
    assert GATHERERS * WARP == TILE_N
    return cute.arch.thread_idx()[0] % TILE_N
