"""Schedule role, one warp: with the dynamic schedule, asks the hardware for the place of a CTA that has not started.

One question is open at a time; it is asked as soon as every role has read the answer to the one before.

Waits:   schedule_all_index.free, .full
Signals: schedule_all_index.full, .free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...pipeline.cursor import produce
from .config import Schedule
from .work import Queue

RESPONSE_BYTES = 16


@cute.jit
def schedule(context):
    if cutlass.const_expr(context.cfg.schedule is Schedule.DYNAMIC):
        ends = context.ends("schedule")
        response = context.smem.pointer("index", Int32)
        questions = produce(ends.schedule_all_index)
        queue = Queue.first(context, ends)
        while queue.has_tile():
            questions.wait()
            questions.expect_tx(RESPONSE_BYTES)
            with cute.arch.elect_one():
                cute.arch.issue_clc_query(questions.barrier(), response, multicast=False)
            questions = questions.next()
            queue = queue.next()
