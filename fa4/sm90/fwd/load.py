"""Load role, one warp: TMA loads of Q, K and V to shared memory, in the order in which the products read them.

Waits:   load_compute_Q.free, load_compute_K.free, load_compute_V.free; of 8-bit numbers
         load_convert_K.free, load_convert_V.free
Signals: load_compute_Q.full, load_compute_K.full, load_compute_V.full; of 8-bit numbers
         load_convert_K.full, load_convert_V.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ...fwd.device.load import load_k, load_q, load_qkv, load_v
from ...fwd.device.queue import Queue, row_tile
from ...fwd.variant import KvLoad
from ...pipeline.cursor import Cursor, Lane, produce
from .context import Sm90ForwardContext


@cute.jit
def load(context: Sm90ForwardContext):
    cfg, ends = context.cfg, context.ends("load")
    q = [produce(ends.load_compute_Q, Lane(consumer, cfg.consumers)) for consumer in range(cfg.consumers)]
    if const_expr(cfg.kv_load is not KvLoad.TMA):
        load_q_only(context, q)
    elif const_expr(cfg.converts_kv):
        load_qkv(context, q, produce(ends.load_convert_K), produce(ends.load_convert_V), load_k, load_v)
    else:
        load_qkv(context, q, produce(ends.load_compute_K), produce(ends.load_compute_V), load_k, load_v)


@cute.jit
def load_q_only(context: Sm90ForwardContext, q: list[Cursor]):
    """Load Q only: another role loads K and V."""
    cfg, rank = context.cfg, context.args.order.rank
    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            for consumer in cutlass.range_constexpr(cfg.consumers):
                q[consumer].wait()
                load_q(context, work, row_tile(cfg, work, rank, consumer), q[consumer])
            q = [cursor.next() for cursor in q]
        queue = queue.next()
