"""What the generated backward depends on, and the shapes that follow from it.

Everything works on transposed scores: S^T = K Q^T has keys as rows, so that P^T and dS^T, written back to tensor
memory, are the left operands of dV = P^T dO and dK = dS^T Q.

A pair of CTAs (`ctas` = 2) owns two blocks of keys and computes every product together. The right operand of a
product is split between the two, so that each reads half of it from its own shared memory: S^T and dP^T take half of
the queries of Q and dO, dV and dK half of the columns, which is why a pair loads Q and dO both ways. For dQ the queries
are split: each CTA holds dS^T of both blocks' keys for its half of them, the other half going to the other CTA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...bwd.blocks import RowBlocks
from ...bwd.variant import Variant
from ...pipeline.smem import Tile
from ..mma import Major, SmemOperand, Umma
from .placement import CHUNK, LANES, Chunks, Columns

TILE_N = 128  # keys of one CTA, and queries of a step unless noted
HALVES = 2  # compute warpgroups, each with its half of a step's queries
CHUNK_BYTES = 4 * LANES * CHUNK
DQ_STAGES = 2
ROW_STAGES = 2
BARRIER_BYTES = 512  # upper bound of all mbarriers, for the smem budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Variant):
    """Everything the generated code depends on; its fields are the compile key.

    ctas: 1, or 2 that work as a pair. polynomial: pairs of every 16 whose exp2 runs on the FMA units.
    """

    ctas: int
    polynomial: int
    smem_bytes: int
    column_unit: ClassVar[int] = CHUNK
    cta_tile_n: ClassVar[int] = TILE_N

    @property
    def cluster_tile_n(self) -> int:
        """Keys of a CTA, or of a pair."""
        return self.ctas * self.cta_tile_n

    @property
    def tile_m(self) -> int:
        """Query rows of one step: half of them where dK is too wide for tensor memory to hold whole scores too."""
        return 64 if self.columns > 128 else 128

    @property
    def half(self) -> int:
        """Queries of one compute warpgroup in a step."""
        return self.tile_m // HALVES

    def _tile(self, rows: int, columns: int) -> Tile:
        return Tile(rows, columns, self.dtype.width)

    def elements(self, nbytes: int) -> int:
        """How many elements of q, k, v or dout they are."""
        return 8 * nbytes // self.dtype.width

    @property
    def q_tile(self) -> Tile:
        return self._tile(self.tile_m // self.ctas, self.head_dim)

    @property
    def do_tile(self) -> Tile:
        return self._tile(self.tile_m // self.ctas, self.head_dim_v)

    @property
    def q_columns(self) -> Tile:
        """All queries of a step, and of a pair's columns this CTA's; likewise below."""
        return self._tile(self.tile_m, self.columns // self.ctas)

    @property
    def do_columns(self) -> Tile:
        return self._tile(self.tile_m, self.columns_v // self.ctas)

    @property
    def k_columns(self) -> Tile:
        return self._tile(self.cluster_tile_n, self.columns // self.ctas)

    @property
    def dk_tile(self) -> Tile:
        return self.k_tile

    @property
    def dv_tile(self) -> Tile:
        return self.v_tile

    @property
    def ds_tile(self) -> Tile:
        """dS^T for dQ, a row per key: of a pair's keys all, of its queries this CTA's half."""
        return self._tile(self.cluster_tile_n, self.tile_m // self.ctas)

    @property
    def q_stages(self) -> int:
        """A pair has no room for more than one, and with Q held twice needs no more: S^T has long read its copy."""
        return 3 - self.ctas

    @property
    def do_stages(self) -> int:
        """A second stage where there is room for it."""
        if self.ctas == 2:
            return 1
        held = self.k_tile.nbytes + self.v_tile.nbytes + self.q_stages * self.q_tile.nbytes
        held += ROW_STAGES * self.rows_bytes + self.ds_tile.nbytes + DQ_STAGES * CHUNK_BYTES + BARRIER_BYTES
        return 2 if held + 2 * self.do_tile.nbytes <= self.smem_bytes else 1

    @property
    def dq_over_dp(self) -> bool:
        """Tensor memory has columns of its own for (all of) dQ only if head dims are small. A pair's dQ fits between
        the halves of dS, so that it can be computed before dK."""
        return self.columns > 64 or self.columns_v > 64

    @property
    def dq_columns(self) -> int:
        """Tensor-memory columns of dQ; a pair's has half the queries, and half of the columns beside the other half."""
        return self.tile_m if self.dq_transposed else self.columns // self.ctas

    @property
    def dq_transposed(self) -> bool:
        """dQ^T = K^T dS^T instead of dQ = dS K: columns of Q as lanes, 128 of them and then 64. The step's 64 queries
        would fill only half of the lanes, and tensor memory has no room for them."""
        return self.tile_m < LANES

    @property
    def dq_parts(self) -> int:
        """Stages of dQ's channel: what lies over dP is handed over by itself, for the next dP waits for its place."""
        return 2 if self.dq_transposed else 1

    @property
    def row_blocks(self) -> RowBlocks:
        """What the kernels around the main one depend on."""
        transposed = Columns(self.tile_m, self.columns)
        placement = transposed if self.dq_transposed else Chunks(self.tile_m, self.columns, self.ctas)
        return RowBlocks(
            self.dtype, self.head_dim, self.head_dim_v, self.tile_m, placement, self.varlen, self.has_sink,
            self.has_dlse, semaphores=self.ctas if self.deterministic else 0,
            list_rows=self.mods.block[0] if self.ordered_by_lists else 0,
        )  # fmt: skip

    @property
    def scores(self) -> Umma:
        """S^T = K Q^T."""
        q = SmemOperand(self.q_tile, Major.K)
        return self._umma(n=self.tile_m, k=self.head_dim, b=q, a=SmemOperand(self.k_tile, Major.K))

    @property
    def dp(self) -> Umma:
        """dP^T = V dO^T."""
        do = SmemOperand(self.do_tile, Major.K)
        return self._umma(n=self.tile_m, k=self.head_dim_v, b=do, a=SmemOperand(self.v_tile, Major.K))

    @property
    def dv(self) -> Umma:
        """dV += P^T dO, P^T from tensor memory."""
        return self._umma(n=self.columns_v, k=self.tile_m, b=SmemOperand(self.do_columns, Major.MN))

    @property
    def dk(self) -> Umma:
        """dK += dS^T Q, dS^T from tensor memory."""
        return self._umma(n=self.columns, k=self.tile_m, b=SmemOperand(self.q_columns, Major.MN))

    @property
    def dq(self) -> Umma:
        """dQ = dS K, both from shared memory, keys reduced."""
        k, ds = SmemOperand(self.k_columns, Major.MN), SmemOperand(self.ds_tile, Major.MN)
        return Umma(self.dtype, n=self.columns, k=self.cluster_tile_n, b=k, a=ds, ctas=self.ctas)

    def _umma(self, n: int, k: int, b: SmemOperand, a: SmemOperand | None = None) -> Umma:
        """A product with a row for each key."""
        return Umma(self.dtype, n=n, k=k, b=b, a=a, m=self.cluster_tile_n, ctas=self.ctas)

    def dq_transpose(self, lanes: int) -> Umma:
        """`lanes` rows of dQ^T = K^T dS^T."""
        k = SmemOperand(self.k_tile, Major.MN)
        return Umma(self.dtype, n=self.tile_m, k=TILE_N, b=SmemOperand(self.ds_tile, Major.MN), a=k, m=lanes)
