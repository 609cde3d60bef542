"""Sums over the lanes of a warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


def inclusive_sum(value: Int32) -> Int32:
    """Return the sum over this lane and all lower ones. All lanes of the warp call."""
    lane = cute.arch.lane_idx()
    for offset in (1, 2, 4, 8, 16):
        lower = cute.arch.shuffle_sync_up(value, offset=offset)
        value = value + Int32(cutlass.select_(lane >= offset, lower, Int32(0)))
    return value
