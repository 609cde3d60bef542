"""Compile-time configuration of the sparse backward: tiles, and the order of the products of a step."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ...bwd.lists_plan import ListsVariant
from ...pipeline.smem import Tile
from ...runtime.dsl import cutlass
from ..stages import CTA_ROWS, PAIR, PANEL_COLUMNS

TILE_N = PAIR * CTA_ROWS  # listed keys of a step
UNIT = Tile(CTA_ROWS, PANEL_COLUMNS)  # a stage of the ring: so many rows and columns of a right operand
COLUMNS = PAIR * PANEL_COLUMNS  # of a product with a gradient
D_COLUMNS = COLUMNS // PAIR  # that it takes in tensor memory, as S and dP do
RESERVED_BYTES = 1 << 10  # of shared memory: barriers, row statistics
MOST_COLUMNS = 576
STATISTICS_BYTES = 2 * 4 * CTA_ROWS  # of a CTA's heads
LEAST_STAGES = 8  # of a ring that hides the latency of loads


class Gradient(enum.Enum):
    DV = "dV"
    DK = "dK"
    DQ = "dQ"


class Product(NamedTuple):
    """`COLUMNS` columns of a gradient, the part-th so many. drains: number of dV's and dK's products before it, if it
    is one of these."""

    gradient: Gradient
    part: int
    drains: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListsConfig(ListsVariant):
    """What the kernels of lists share: a CTA has up to 64 query heads of a list's key/value head, and loads rows of
    `cta_keys` listed keys in a step, one by one. The fields are the compile key."""

    smem_bytes: int
    ctas: ClassVar[int] = 1
    has_front: ClassVar[bool] = False
    tile_m: ClassVar[int] = CTA_ROWS
    cta_keys: ClassVar[int]

    @property
    def q_tile(self) -> Tile:
        return Tile(CTA_ROWS, self.head_dim)

    @property
    def k_tile(self) -> Tile:
        return Tile(self.cta_keys, self.head_dim, pieces=self.cta_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListsBackwardConfig(ListsConfig):
    """The same of the backward."""

    polynomial: ClassVar[int] = 0  # pairs of every 16 whose exp2 runs on the FMA units

    @property
    def ds_dtype(self) -> type[cutlass.Numeric]:
        return self.dtype

    @property
    def do_tile(self) -> Tile:
        return Tile(CTA_ROWS, self.head_dim_v)

    @property
    def v_tile(self) -> Tile:
        return Tile(self.cta_keys, self.head_dim_v, pieces=self.cta_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100SparseConfig(ListsBackwardConfig):
    """A pair of CTAs has 128 query heads of a list's key/value head, 64 each."""

    ctas: ClassVar[int] = PAIR
    tile_m: ClassVar[int] = PAIR * CTA_ROWS
    tile_n: ClassVar[int] = TILE_N
    cta_keys: ClassVar[int] = CTA_ROWS
    half: ClassVar[int] = D_COLUMNS // 2  # keys of a thread in a step

    @property
    def by_heads(self) -> Tile:
        """P or dS of all heads and a CTA's keys of a step, the transposed left operand of dV or dK."""
        return Tile(self.tile_m, CTA_ROWS)

    @property
    def by_keys(self) -> Tile:
        """dS of a CTA's heads and all keys of a step, the left operand of dQ."""
        return Tile(CTA_ROWS, TILE_N)

    def parts(self, gradient: Gradient) -> int:
        """Products that compute all columns of a gradient."""
        columns = self.head_dim_v if gradient is Gradient.DV else self.head_dim
        return -(-columns // COLUMNS)

    @property
    def products(self) -> list[Product]:
        """Products of a step with P or dS. Those of dV and dK, which leave tensor memory in each step, take turns with
        those of dQ, so that there is time for it."""
        drained = [Product(g, i) for g in (Gradient.DV, Gradient.DK) for i in range(self.parts(g))]
        kept = [Product(Gradient.DQ, i) for i in range(self.parts(Gradient.DQ))]
        found = []
        for number, product in enumerate(drained):
            found.append(product._replace(drains=number))
            if number > 0:
                found += kept[number - 1 : number]
        return found + kept[len(drained) - 1 :]

    @property
    def keeps_do(self) -> bool:
        """Whether dO stays in shared memory. Otherwise it comes through the ring in each step, before the columns of V
        that it meets: a deep ring hides the latency of loads, which takes longer than the additional loads."""
        return self._stages_beside(self.do_tile.nbytes) >= LEAST_STAGES

    @property
    def ring_stages(self) -> int:
        return self._stages_beside(self.do_tile.nbytes if self.keeps_do else 0)

    def _stages_beside(self, nbytes: int) -> int:
        used = self.q_tile.nbytes + 2 * self.by_heads.nbytes + self.by_keys.nbytes + nbytes
        return (self.smem_bytes - used - RESERVED_BYTES) // UNIT.nbytes
