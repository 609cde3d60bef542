"""Tile schedule of an attention kernel: its tiles, their steps, and their order.

It extends replays of a few tiles to a whole grid. A plan of a backend of fa4 defines the schedule of its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from warpcheck.timing.grid import CtaCost, TileScheduler, makespan


@dataclass(frozen=True)
class TileSchedule:
    """Tiles of a kernel.

    rows: of a tile (forward: queries, backward: keys), over all `ctas` of a cluster. step: rows of the other side per
    step. l2_group: (head, sequence) pairs that advance together. descending: from the last tile of a head to its first.
    resident: CTAs per multiprocessor at a time. snake: every other round of a persistent grid goes backwards.
    most_l2_groups: number of groups, the last of which has all remaining pairs; None for as many as there are.
    column_tiles: tiles of the same rows, each with some columns of the result; all rows of one come before the next.
    """

    rows: int
    step: int
    scheduler: TileScheduler
    l2_group: int = 1
    descending: bool = False
    ctas: int = 1
    resident: int = 1
    snake: bool = False
    most_l2_groups: int | None = None
    column_tiles: int = 1

    def steps(self, direction: str, queries: int, keys: int, causal: bool) -> list[int]:
        """Return the steps of each tile of a head, in order. A causal mask is aligned to the end of both sides."""
        if direction == "fwd":
            ends = [keys] * math.ceil(queries / self.rows)
            if causal:
                ends = [min(keys, keys - queries + (i + 1) * self.rows) for i in range(len(ends))]
            found = [math.ceil(end / self.step) for end in ends]
        else:
            every = math.ceil(queries / self.step)
            firsts = [max(0, i * self.rows + queries - keys) for i in range(math.ceil(keys / self.rows))]
            found = [every - (first // self.step if causal else 0) for first in firsts]
        return (found[::-1] if self.descending else found) * self.column_tiles

    def steps_of_grid(self, of_head: Sequence[int], pairs: int) -> list[int]:
        """Return the steps of all tiles in order; the pairs of an L2 group alternate."""
        firsts = list(range(0, pairs, self.l2_group))[: self.most_l2_groups]
        ends = [*firsts[1:], pairs]
        return [steps for first, end in zip(firsts, ends) for steps in of_head for _ in range(end - first)]

    def slots(self, sms: int) -> int:
        """Return the number of clusters that run at a time."""
        return sms * self.resident // self.ctas

    def cycles(self, tiles: Sequence[float], sms: int, cost: CtaCost, replace: float) -> float:
        """Return the cycles of a grid. tiles: FLOPs per multiprocessor, in the order of `steps_of_grid`."""
        return makespan(tiles, self.slots(sms), cost, self.scheduler, replace, snake=self.snake)


def tile_schedule_of(plan: Any, direction: str) -> TileSchedule:
    """Return the schedule of a plan of fa4, with one CTA per multiprocessor."""
    spec, extent = plan.spec, plan.extent
    if direction == "fwd":
        cfg = plan._forward.cfg
        scheduler = TileScheduler.STATIC if cfg.persistent and not cfg.has_counter else TileScheduler.DYNAMIC
        sizes, snake = plan._forward.sizes, cfg.snake
        most = sizes.most_l2_groups if cfg.merges_l2_groups else None
        return TileSchedule(
            cfg.rows, cfg.tile_n, scheduler, sizes.l2_group, True, cfg.ctas, snake=snake, most_l2_groups=most
        )
    cfg = plan._backward.config(False)
    pairs = spec.heads_kv * extent.batch
    l2_group = cfg.l2_group(math.ceil(extent.max_seqlen_k / cfg.cluster_tile_n), extent.max_seqlen_q, pairs)
    together = spec.heads_kv if l2_group is None else int(getattr(l2_group, "value", l2_group))
    return TileSchedule(cfg.cluster_tile_n, cfg.tile_m, TileScheduler.DYNAMIC, together, cfg.descending, cfg.ctas)
