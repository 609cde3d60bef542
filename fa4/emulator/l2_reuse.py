"""Which key blocks of a forward come from device memory because L2 does not hold them: its CTAs in time, and an LRU
cache of key blocks.

A CTA reads the key blocks of its tile one after the other, some blocks ahead of the one that it computes. Concurrent
CTAs of a head read the same blocks at about the same time. In the same order, a head whose K and V exceed L2 is read
from device memory again by each wave of CTAs. In sawtooth order (arXiv 2601.16032) every other wave goes backwards, and
begins with the blocks that the wave before has read last.
"""

from __future__ import annotations

import collections
import heapq
import random
from dataclasses import dataclass

_SPREAD = 0.05  # standard deviation of the time of a step, of its mean: assumed


@dataclass(frozen=True)
class KeyTraffic:
    """A forward without a mask.

    heads: (sequence, key/value head) pairs, whose tiles follow each other. tiles: of a head. blocks: key blocks of a
    tile. block_bytes: of K and V. ctas: concurrent. step: cycles of a CTA for a block. ahead: blocks that are loaded
    before the one that is computed. l2_bytes: what L2 holds. dram_bytes: of device memory, per cycle.
    """

    heads: int
    tiles: int
    blocks: int
    block_bytes: int
    ctas: int
    step: float
    ahead: int
    l2_bytes: int
    dram_bytes: float

    def simulate(self, sawtooth: bool, seed: int = 0) -> Traffic:
        """Return the traffic of all tiles. A CTA that has finished a tile takes the next one."""
        rng = random.Random(seed)
        l2 = collections.OrderedDict[tuple[int, int], None]()
        capacity = max(self.l2_bytes // self.block_bytes, 1)
        taken, missed, dram_free, end = 0, 0, 0.0, 0.0
        every = self.heads * self.tiles
        # Of a CTA: when it issues its next load, its tile, the step, and when its last steps end.
        queue = [(rng.random() * self.step, i, i, 0, (0.0,) * self.ahead) for i in range(min(self.ctas, every))]
        taken = len(queue)
        heapq.heapify(queue)
        while queue:
            now, cta, tile, step, ends = heapq.heappop(queue)
            head, wave = tile // self.tiles, tile // self.ctas
            block = head, self.blocks - 1 - step if sawtooth and wave % 2 else step
            arrival = now
            if block in l2:
                l2.move_to_end(block)
            else:
                missed += 1
                arrival = dram_free = max(dram_free, now) + self.block_bytes / self.dram_bytes
                l2[block] = None
                if len(l2) > capacity:
                    l2.popitem(last=False)
            done = max(ends[-1], arrival) + self.step * max(rng.gauss(1, _SPREAD), 0)
            end, ends = max(end, done), (*ends[1:], done)
            step += 1
            if step == self.blocks:
                tile, step, taken = taken, 0, taken + 1
            if tile < every:
                heapq.heappush(queue, (max(ends[0], now), cta, tile, step, ends))
        return Traffic(missed * self.block_bytes, end)


@dataclass(frozen=True)
class Traffic:
    """nbytes: of K and V from device memory. cycles: of the grid."""

    nbytes: int
    cycles: float
