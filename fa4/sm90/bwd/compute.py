"""Compute role, two consumers: P, dS, dV, dK and dQ of 64 keys each. A thread has two keys and a quarter of a step's
queries. At the end the role stores dV and dK.

Waits:   load_compute_{K,V,Q,dO}.full, compute_compute_dS.full, compute_reduce_dQ.free, reduce_compute_sum.full
Signals: load_compute_{Q,dO}.free, compute_compute_dS.full, compute_reduce_dQ.full
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import const_expr

from ...pipeline.cursor import consume
from .common.work import work_tile
from .consumer import BackwardConsumer
from .context import Sm90BackwardContext
from .epilogue import stage_gradients, store_gradients, store_sums
from .steps import all_steps


@cute.jit
def compute(context: Sm90BackwardContext):
    work, consumer = work_tile(context), BackwardConsumer(context)
    consumer.dv.fill(0.0)
    consumer.dk.fill(0.0)
    if work.steps > 0:
        consume(consumer.ends.load_compute_K).wait()
        all_steps(context, consumer, work)
    else:
        stage_gradients(context, work, consumer)
    if const_expr(not context.cfg.parted):
        store_gradients(context, work, consumer)
    elif const_expr(not context.cfg.overlaps_last_dq):
        store_sums(context, consumer)
