"""Host code of forwards whose consumers have 64 rows of a work tile each: heads in a tile, and conditions of tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..pipeline.roles import ROWS_PER_WARP, WARPS_PER_WARPGROUP, Role, RoleTable
from ..pipeline.smem import Tile
from ..runtime.choice import Condition
from ..runtime.spec import AttentionSpec, ProblemSize
from .variant import ForwardVariant, Schedule, padded_heads_of

ROWS = WARPS_PER_WARPGROUP * ROWS_PER_WARP  # of a consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerVariant(ForwardVariant):
    """consumers: groups of four warps that compute; each has 64 rows of the work tile. most_stages: upper bound of K
    stages and of V stages."""

    consumers: int
    most_stages: int
    schedule: Schedule

    @property
    def rows(self) -> int:
        """Rows of a work tile."""
        return self.ctas * self.consumers * ROWS

    @property
    def o_tile(self) -> Tile:
        """O rows of one warp, which it stores by itself."""
        return Tile(ROWS_PER_WARP, self.head_dim_v)

    @property
    def persistent(self) -> bool:
        return self.schedule in (Schedule.PERSISTENT, Schedule.COUNTED)

    @property
    def snake(self) -> bool:
        return self.schedule is Schedule.PERSISTENT

    @property
    def has_counter(self) -> bool:
        return self.schedule is Schedule.COUNTED

    @property
    def has_packed_order(self) -> bool:
        """Narrower than on other chips: varlen sequences with one tile each have `Schedule.SINGLE`."""
        return self.schedule is Schedule.PACKED

    @property
    def seq_bounded_q(self) -> bool:
        """False: Q rows behind a sequence's end may hold any values, because their results are not used."""
        return False

    @property
    def seq_bounded_o(self) -> bool:
        """True for varlen: rows behind a sequence's end belong to another sequence, so stores end with the sequence."""
        return self.varlen


def consumer_roles(cfg: Any, compute: Callable, load: Callable) -> RoleTable:
    """Return the roles of a kernel of consumers and one load warp. cfg: has `consumers`, and `regs`, registers per
    thread of (consumers, load warp). compute, load: bodies."""
    end = cfg.consumers * WARPS_PER_WARPGROUP
    compute_regs, load_regs = cfg.regs
    return RoleTable(
        (
            Role("compute", warps=(0, end), regs=compute_regs, body=compute, instances=cfg.consumers),
            Role("load", warps=(end, end + 1), regs=load_regs, body=load),
        )
    )


def packed_heads_of_one(spec: AttentionSpec) -> int:
    """Return the query heads per tile of one consumer (pack_gqa)."""
    return spec.group if spec.group <= ROWS else math.gcd(spec.group, ROWS)


def packed_heads(spec: AttentionSpec, extent: ProblemSize, consumers: int, packs_heads: bool = False) -> int:
    """Return the query heads per tile (pack_gqa). Packing pays if the rows of one head leave half of a tile empty, or
    with packs_heads, as a table says."""
    if spec.has_blocks:
        return 1  # query heads may have blocks of their own
    if consumers == 1:
        return packed_heads_of_one(spec)
    rows = consumers * ROWS
    if 2 * extent.max_seqlen_q <= rows:
        return math.gcd(spec.group, rows & -rows)  # a power of two: TMA stores O of whole queries
    return math.gcd(spec.group, ROWS_PER_WARP) if packs_heads else 1


def are_few(spec: AttentionSpec, extent: ProblemSize) -> bool:
    """True if all query rows of a key/value head fit in one consumer, or if results must not depend on the batch."""
    return spec.batch_invariant or extent.max_seqlen_q * padded_heads_of(spec.group) <= ROWS


FEW = Condition("few query rows", lambda case: are_few(case.spec, case.extent), "many query rows")
SEVERAL_TILES = Condition(
    "several tiles a sequence", lambda case: case.extent.max_seqlen_q * case.spec.group > case.tile_rows
)
