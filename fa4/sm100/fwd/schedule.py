"""Schedule role, one warp: with the dynamic schedule, takes over work tiles of CTAs or pairs that have not started.

It issues cluster launch control queries, one at a time; in a pair the leader does, for both CTAs. The next query
follows when every role has read the response.

Waits:   schedule_all_index.free, .full
Signals: schedule_all_index.full, .free
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...pipeline.cursor import Cursor, produce
from ...pipeline.ends import LEADER
from .config import Schedule
from .context import Sm100ForwardContext
from .work import Queue


@cute.jit
def schedule(context: Sm100ForwardContext):
    if const_expr(context.cfg.schedule is Schedule.DYNAMIC):
        ends = context.ends("schedule")
        queries = produce(ends.schedule_all_index)
        queue = Queue.first(context, ends)
        while queue.has_tile():
            query(context, queries)
            queries = queries.next()
            queue = queue.next()


@cute.jit
def query(context: Sm100ForwardContext, queries: Cursor):
    """Whole warp."""
    if context.args.order.rank == LEADER:
        queries.wait()
        with cute.arch.elect_one():
            queries.query(context.smem.pointer("index", Int32))
