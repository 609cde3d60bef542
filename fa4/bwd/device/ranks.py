"""Order index of each key block in the dQ additions of a query block, for block masks: ascending key blocks.

A CTA processes a block of keys; its list contains the query blocks that it adds to. Its order index there follows from
the list of that query block. The statistics kernel computes the order index of every list entry in advance, so that the
main kernel loads one number per step.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...core.traced import BlockTensors
from ..blocks import THREADS


@cute.jit
def rank_key_blocks(blocks: BlockTensors, ranks: cute.Tensor, batch: Int32, head: Int32, row: Int32):
    """Write ranks[key block] = number of smaller entries, for each key block in the lists of a query block.

    Called by all THREADS threads. ranks: (key blocks,). row: query block.
    """
    shape = blocks.counts.shape
    coord = cutlass.min(batch, shape[0] - 1), cutlass.min(head, shape[1] - 1), row
    partial = blocks.lists[(*coord, None)], blocks.counts[coord]
    full = blocks.full_lists[(*coord, None)], blocks.full_counts[coord]
    for (entries, count), (other, other_count) in ((partial, full), (full, partial)):
        for i in cutlass.range(cute.arch.thread_idx()[0], count, THREADS, unroll=1):
            ranks[entries[i]] = i + _entries_below(entries[i], other, other_count)


@cute.jit
def _entries_below(bound: Int32, entries: cute.Tensor, count: Int32) -> Int32:
    """Binary search by one thread: number of the first `count` ascending entries that are less than `bound`."""
    first, stop = Int32(0), count
    while first < stop:
        middle = (first + stop) // 2
        is_below = entries[middle] < bound
        first = Int32(cutlass.select_(is_below, middle + 1, first))
        stop = Int32(cutlass.select_(is_below, stop, middle))
    return first
