"""Schedule role, one warp: with the dynamic schedule, takes over work tiles of CTAs that have not started.

It issues cluster launch control queries, one at a time. The next query follows when every role has read the response.

Waits:   schedule_all_index.free, .full
Signals: schedule_all_index.full, .free
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...pipeline.cursor import produce
from .config import Schedule
from .context import Sm100ForwardContext
from .work import Queue

RESPONSE_BYTES = 16


@cute.jit
def schedule(context: Sm100ForwardContext):
    if const_expr(context.cfg.schedule is Schedule.DYNAMIC):
        ends = context.ends("schedule")
        response = context.smem.pointer("index", Int32)
        queries = produce(ends.schedule_all_index)
        queue = Queue.first(context, ends)
        while queue.has_tile():
            queries.wait()
            queries.expect_tx(RESPONSE_BYTES)
            with cute.arch.elect_one():
                cute.arch.issue_clc_query(queries.barrier(), response, multicast=False)
            queries = queries.next()
            queue = queue.next()
