"""Load role, one warp: TMA loads of Q and of key blocks, from last to first.

Waits:   load_both_Q.free, load_both_KV.free
Signals: load_both_Q.full, load_both_KV.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...fwd.device.work import work_tile
from ...pipeline.cursor import produce
from ..fwd.load import load_block, load_q
from .config import LatentContext


@cute.jit
def load(context: LatentContext):
    ends = context.ends("load")
    q, kv = produce(ends.load_both_Q), produce(ends.load_both_KV)
    work = work_tile(context, Int32(cute.arch.block_idx()[0]))
    if work.count > 0:
        block_iter = work.block_iter
        start = block_iter.start()
        load_q(context, work, 0, q)
        for i in cutlass.range(work.count, unroll=1):
            load_block(context, "k", work, block_iter.block(block_iter.ahead(start, i)), kv)
            kv = kv.next()
