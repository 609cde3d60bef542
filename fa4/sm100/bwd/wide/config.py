"""Compile-time configuration of the Blackwell backward of wide heads, and the shapes that follow from it.

256 columns of dK and of dV would fill tensor memory and leave no room for scores. So three kernels compute one gradient
each, and all have the same form: a CTA owns 128 rows, which are lanes of S, dP and of the gradient D, and loops over
blocks of the other side.

    gradient    lanes      left operands     right operands    product
    dV          keys       K                 Q                 dV += P^T dO
    dK          keys       K, V              Q, dO             dK += dS^T Q
    dQ          queries    Q, dO             K, V              dQ += dS K

S and dP are computed again in each kernel: 8 products instead of 5. In return nothing is added across CTAs: no atomic
additions, no float32 sum of dQ, and every result is deterministic.

A CTA pair owns 256 rows and computes every product together, with the right operand split between both shared memories:
S and dP split its rows, D splits its columns. So the right operand of D is loaded a second time, in columns.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from ....bwd.blocks import RowBlocks
from ....pipeline.smem import Tile
from ...mma import Major, SmemOperand, Umma
from ..config import Sm100BackwardSteps


class Gradient(enum.Enum):
    """The gradient that a kernel computes. Values: names of its left operands of S and dP, of the right ones, and of
    the right operand of the gradient; each is the name of a TMA map."""

    DV = ("k", ""), ("q", ""), "do"
    DK = ("k", "v"), ("q", "do"), "q"
    DQ = ("q", "do"), ("k", "v"), "k"

    @property
    def owns_keys(self) -> bool:
        """Whether a CTA owns keys, and not queries."""
        return self is not Gradient.DQ

    @property
    def needs_dp(self) -> bool:
        return self is not Gradient.DV


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100WideConfig(Sm100BackwardSteps):
    """Configuration of the generated code; the fields are the compile key."""

    gradient: Gradient = Gradient.DK
    column_unit: ClassVar[int] = 128  # columns of a pair's D, so that halves are whole panels

    @property
    def tile_m(self) -> int:
        """Rows of a step: queries, or keys of dQ. Also the queries of a block of row statistics."""
        return 64 * self.ctas

    @property
    def cluster_rows(self) -> int:
        """Rows that a CTA or a pair owns."""
        return self.cluster_tile_n

    @property
    def descending(self) -> bool:
        """True if CTAs start with the last block: the last queries of a causal problem see most keys."""
        return self.has_right and not self.gradient.owns_keys

    @property
    def has_packed_order(self) -> bool:
        return self.varlen

    @property
    def ordered_by_lists(self) -> bool:
        return False  # nothing is added across CTAs

    @property
    def reads_query_lists(self) -> bool:
        return self.has_blocks

    def _rows(self, is_query: bool) -> int:
        return self.tile_m // self.ctas if is_query is self.gradient.owns_keys else self.cta_tile_n

    @property
    def q_tile(self) -> Tile:
        return self._tile(self._rows(is_query=True), self.head_dim)

    @property
    def do_tile(self) -> Tile:
        return self._tile(self._rows(is_query=True), self.head_dim_v)

    @property
    def k_tile(self) -> Tile:
        return self._tile(self._rows(is_query=False), self.head_dim)

    @property
    def v_tile(self) -> Tile:
        return self._tile(self._rows(is_query=False), self.head_dim_v)

    def tile(self, name: str) -> Tile:
        """Tile of the TMA map `name`."""
        return getattr(self, f"{name}_tile")

    @property
    def grad_columns(self) -> int:
        """Columns of D, whole panels in each CTA of a pair."""
        return self.columns_v if self.gradient is Gradient.DV else self.columns

    @property
    def d_parts(self) -> list[int]:
        """Columns of a lane of tensor memory for each product that adds to D."""
        return [self.grad_columns]

    @property
    def lanes_of_row(self) -> int:
        """Lanes of tensor memory that a row has: 1, or 2 with half of the columns each."""
        return self.tile_m // self.lane_columns

    @property
    def grad_tile(self) -> Tile:
        """The gradient as it is stored."""
        return self._tile(self.cta_tile_n, self.head_dim_v if self.gradient is Gradient.DV else self.head_dim)

    @property
    def columns_tile(self) -> Tile:
        """Right operand of D: all rows of a step, this CTA's share of the columns."""
        return self._tile(self.tile_m, self.grad_columns // self.ctas)

    @property
    def stages(self) -> int:
        """Stages of S, of its right operand and of the right operand of D: two for dV, which has room for them."""
        return 1 if self.gradient.needs_dp else 2

    @property
    def weights_tile(self) -> Tile | None:
        """P or dS in shared memory; None if it overwrites S or dP in tensor memory."""
        return None

    @property
    def row_blocks(self) -> RowBlocks:
        """Configuration of the statistics kernel."""
        return RowBlocks.of(self, None)

    @property
    def scores(self) -> Umma:
        """S, with one row per owned row."""
        (left, _), (right, _), _ = self.gradient.value
        return self._product(left, right, self.head_dim)

    @property
    def dp(self) -> Umma:
        """dP, likewise."""
        (_, left), (_, right), _ = self.gradient.value
        return self._product(left, right, self.head_dim_v)

    def _product(self, left: str, right: str, k: int) -> Umma:
        a, b = (SmemOperand(self.tile(name), Major.K) for name in (left, right))
        return Umma(self.dtype, n=self.tile_m, k=k, b=b, a=a, m=self.cluster_rows, ctas=self.ctas)

    @property
    def grad(self) -> Umma:
        """D += P or dS times the rows of a step, with P or dS in tensor memory."""
        b = SmemOperand(self.columns_tile, Major.MN)
        return Umma(self.dtype, n=self.grad_columns, k=self.tile_m, b=b, m=self.cluster_rows, ctas=self.ctas)
