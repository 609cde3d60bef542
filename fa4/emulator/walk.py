"""How a kernel goes through attention: its tiles, their steps, and the order in which they are handed out.

What replays of a few tiles say of one CTA becomes a whole grid by this. Of our kernels the plan says it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from warpcheck.timing.grid import CtaCost, Handing, makespan


@dataclass(frozen=True)
class Walk:
    """rows: of a work tile (forward: queries, backward: keys), over all `ctas` of a cluster. step: of the other side.
    l2_group: pairs of head and sequence that advance together. descending: from the last tile of a head to its first.
    resident: CTAs that a multiprocessor has at a time. snake: laps of a persistent grid turn round. most_l2_groups:
    the last of which has all pairs that are left, None for as many as there are."""

    rows: int
    step: int
    handing: Handing
    l2_group: int = 1
    descending: bool = False
    ctas: int = 1
    resident: int = 1
    snake: bool = False
    most_l2_groups: int | None = None

    def steps(self, direction: str, queries: int, keys: int, causal: bool) -> list[int]:
        """Of each tile of a head, in the order in which they are handed out. A mask ends where both sides do."""
        if direction == "fwd":
            ends = [keys] * math.ceil(queries / self.rows)
            if causal:
                ends = [min(keys, keys - queries + (i + 1) * self.rows) for i in range(len(ends))]
            found = [math.ceil(end / self.step) for end in ends]
        else:
            every = math.ceil(queries / self.step)
            firsts = [max(0, i * self.rows + queries - keys) for i in range(math.ceil(keys / self.rows))]
            found = [every - (first // self.step if causal else 0) for first in firsts]
        return found[::-1] if self.descending else found

    def handed_out(self, of_head: Sequence[int], pairs: int) -> list[int]:
        """Steps of all tiles in their order: those of a l2_group's pairs come in turn."""
        firsts = list(range(0, pairs, self.l2_group))[: self.most_l2_groups]
        ends = [*firsts[1:], pairs]
        return [steps for first, end in zip(firsts, ends) for steps in of_head for _ in range(end - first)]

    def places(self, sms: int) -> int:
        """Where tiles are worked on at a time."""
        return sms * self.resident // self.ctas

    def cycles(self, tiles: Sequence[float], sms: int, cost: CtaCost, replace: float) -> float:
        """Until all tiles, given as FLOPs per multiprocessor in the order of `handed_out`, are done."""
        return makespan(tiles, self.places(sms), cost, self.handing, replace, snake=self.snake)


def walk_of(plan: Any, direction: str) -> Walk:
    """Of a plan of one of our backends, whose CTAs have a multiprocessor each."""
    spec, extent = plan.spec, plan.extent
    if direction == "fwd":
        cfg = plan._forward.cfg
        handing = Handing.STATIC if cfg.persistent else Handing.TAKEN
        sizes, snake = plan._forward.sizes, cfg.snake
        most = sizes.most_l2_groups if snake else None
        return Walk(cfg.rows, cfg.tile_n, handing, sizes.l2_group, True, cfg.ctas, snake=snake, most_l2_groups=most)
    cfg = plan._backward.config(False)
    pairs = spec.heads_kv * extent.batch
    l2_group = cfg.l2_group(math.ceil(extent.max_seqlen_k / cfg.cluster_tile_n), extent.max_seqlen_q, pairs)
    together = spec.heads_kv if l2_group is None else int(getattr(l2_group, "value", l2_group))
    return Walk(cfg.cluster_tile_n, cfg.tile_m, Handing.TAKEN, together, cfg.descending, cfg.ctas)
