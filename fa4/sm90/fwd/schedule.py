"""Schedule role, one warp: takes work tiles by the counter, while the other roles work on the tile before.

Waits:   schedule_all_place.free, .full
Signals: schedule_all_place.full, .free
"""

from __future__ import annotations

import cutlass.cute as cute

from ...fwd.device.queue import CountedQueue, count_end
from .context import Sm90ForwardContext


@cute.jit
def schedule(context: Sm90ForwardContext):
    queue = CountedQueue.first(context, "schedule", takes=True)
    while queue.has_tile():
        queue = queue.next()
    count_end(context)
