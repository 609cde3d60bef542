"""The order in which the key blocks of a block mask add to a block of queries: that of their numbers.

A CTA has a block of keys, and its list says which blocks of queries it adds to. How many add there before it, the list
of that block of queries says; the statistics kernel looks for every entry at once, so that the main kernel reads one
number a step.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..core.traced import BlockTensors
from .blocks import THREADS


@cute.jit
def rank_key_blocks(blocks: BlockTensors, ranks: cute.Tensor, batch: Int32, head: Int32, row: Int32):
    """Of each block of keys that a block of queries lists, how many come before it; ranks: (blocks of keys,).

    All THREADS threads. `row`: the block of queries.
    """
    shape = blocks.counts.shape
    at = cutlass.min(batch, shape[0] - 1), cutlass.min(head, shape[1] - 1), row
    partial = blocks.lists[(*at, None)], blocks.counts[at]
    full = blocks.full_lists[(*at, None)], blocks.full_counts[at]
    for (own, count), (other, others) in ((partial, full), (full, partial)):
        for i in cutlass.range(cute.arch.thread_idx()[0], count, THREADS, unroll=1):
            ranks[own[i]] = i + _entries_below(own[i], other, others)


@cute.jit
def _entries_below(bound: Int32, entries: cute.Tensor, count: Int32) -> Int32:
    """How many of the first `count` ascending entries are less than a bound, by a thread."""
    first, stop = Int32(0), count
    while first < stop:
        middle = (first + stop) // 2
        is_below = entries[middle] < bound
        first = Int32(cutlass.select_(is_below, middle + 1, first))
        stop = Int32(cutlass.select_(is_below, stop, middle))
    return first
