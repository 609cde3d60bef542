"""Counters of work tiles on a GPU: 0 before a launch that counts with one, and 0 again when it has ended."""

from __future__ import annotations

import torch
from torch import Tensor

from .device import Chip
from .torch_internals import current_raw_stream

NUMBERS = 9  # int32; the first and the last are used, which so are in different sectors of the L2
_of_streams: dict[tuple[int, int], Tensor] = {}


def tile_counter(q: Tensor, chip: Chip) -> Tensor:
    """Return a counter, (NUMBERS,) int32, for a launch on the current stream; see `fa4.fwd.device.queue.CountedQueue`.
    q: on the device of the launch.

    Launches on a stream run one after the other, so they share one, which each launch leaves at 0. A captured graph may
    be replayed beside other work, so each of its launches has its own, which a replay sets to 0.
    """
    if chip.emulated or not q.is_cuda or torch.cuda.is_current_stream_capturing():
        return q.new_zeros(NUMBERS, dtype=torch.int32)
    index = q.device.index
    key = index, current_raw_stream(index)
    counter = _of_streams.get(key)
    if counter is None:
        counter = _of_streams[key] = q.new_zeros(NUMBERS, dtype=torch.int32)
    return counter
