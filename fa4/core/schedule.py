"""Which tile a thread block works on: blocks of rows by (head, sequence) pairs, in sections.

A section is a run of neighbouring pairs. Within it the block of rows changes slowest, so the pairs of a section advance
together: with longest blocks first the short ones fill the end, and blocks that must add to the same rows in turn are
spread over time. A section that fits the L2 cache keeps what its pairs share there.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32


class Tile(NamedTuple):
    block: Int32
    head: Int32
    sequence: Int32

    @staticmethod
    def of(index: Int32, blocks: Int32, heads: Int32, batch: Int32, section: Int32) -> Tile:
        """The tile of thread block `index` of blocks * heads * batch, in sections of `section` pairs."""
        first_pair = index // (blocks * section) * section
        pairs = cutlass.min(section, heads * batch - first_pair)
        within = index - first_pair * blocks
        pair = first_pair + within % pairs
        return Tile(within // pairs, pair % heads, pair // heads)
