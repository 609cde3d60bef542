"""What the generated backward depends on, and the shapes that follow from it.

Everything works on transposed scores: S^T = K Q^T has keys as rows, so that P^T and dS^T, written back to tensor
memory, are the left operands of dV = P^T dO and dK = dS^T Q.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass

from ..constant import Constant
from ..mma import Major, SmemOperand, Umma
from ..smem import Tile

TILE_N = 128  # keys of one CTA
LANES = 128  # of tensor memory: the keys of transposed scores, the queries (or columns) of dQ
HALVES = 2  # compute warpgroups, each with its half of a step's queries
CHUNK = 32  # tensor-memory columns of dQ that one bulk addition takes; head dims are padded to whole chunks
CHUNK_BYTES = 4 * LANES * CHUNK
DQ_STAGES = 2
BARRIER_BYTES = 512  # upper bound of all mbarriers, for the smem budget


@dataclass(frozen=True, slots=True)
class Config(Constant):
    """Everything the generated code depends on; its fields are the compile key.

    group: query heads of one key/value head. polynomial: pairs of every 16 whose exp2 runs on the FMA units.
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int
    group: int
    has_left: bool
    has_right: bool
    has_softcap: bool
    has_sink: bool
    has_dlse: bool
    varlen: bool
    has_seqused_q: bool
    has_seqused_k: bool
    deterministic: bool
    polynomial: int
    smem_bytes: int

    @property
    def columns(self) -> int:
        """head_dim in whole chunks: what the products compute; tiles are zero past head_dim."""
        return -(-self.head_dim // CHUNK) * CHUNK

    @property
    def columns_v(self) -> int:
        return -(-self.head_dim_v // CHUNK) * CHUNK

    @property
    def tile_m(self) -> int:
        """Query rows of one step: half of them where dK is too wide for tensor memory to hold whole scores too."""
        return 64 if self.columns > 128 else 128

    @property
    def half(self) -> int:
        """Queries of one compute warpgroup in a step."""
        return self.tile_m // HALVES

    @property
    def q_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim)

    @property
    def k_tile(self) -> Tile:
        return Tile(TILE_N, self.head_dim)

    @property
    def v_tile(self) -> Tile:
        return Tile(TILE_N, self.head_dim_v)

    @property
    def do_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim_v)

    @property
    def dk_tile(self) -> Tile:
        return self.k_tile

    @property
    def dv_tile(self) -> Tile:
        return self.v_tile

    @property
    def ds_tile(self) -> Tile:
        """dS^T, a row per key."""
        return Tile(TILE_N, self.tile_m)

    @property
    def q_stages(self) -> int:
        return 2

    @property
    def do_stages(self) -> int:
        """A second stage where there is room for it."""
        held = self.k_tile.nbytes + self.v_tile.nbytes + self.q_stages * (self.q_tile.nbytes + self.rows_bytes)
        held += self.ds_tile.nbytes + DQ_STAGES * CHUNK_BYTES + BARRIER_BYTES
        return 2 if held + 2 * self.do_tile.nbytes <= self.smem_bytes else 1

    @property
    def rows_bytes(self) -> int:
        """A step's row statistics: two floats for each query."""
        return 2 * 4 * self.tile_m

    @property
    def dq_over_dp(self) -> bool:
        """Tensor memory has columns of its own for (all of) dQ only if head dims are small."""
        return self.columns > 64 or self.columns_v > 64

    @property
    def dq_transposed(self) -> bool:
        """dQ^T = K^T dS^T instead of dQ = dS K: columns of Q as lanes, 128 of them and then 64. The step's 64 queries
        would fill only half of the lanes, and tensor memory has no room for them."""
        return self.tile_m < LANES

    @property
    def ragged(self) -> bool:
        """A sequence's data may end before its tensor's rows do; see `work.ragged`."""
        return self.varlen or self.has_seqused_q or self.has_seqused_k

    @property
    def descending(self) -> bool:
        """Whether CTAs take key blocks from last to first. In a deterministic causal problem that is the order in
        which blocks add to dQ: the last block, seen by the fewest queries, adds at its diagonal at once, the one before
        it follows a step behind, and nobody waits for long."""
        return self.deterministic and self.has_right

    @property
    def scores(self) -> Umma:
        """S^T = K Q^T."""
        q = SmemOperand(self.q_tile, Major.K)
        return Umma(self.dtype, n=self.tile_m, k=self.head_dim, b=q, a=SmemOperand(self.k_tile, Major.K))

    @property
    def dp(self) -> Umma:
        """dP^T = V dO^T."""
        do = SmemOperand(self.do_tile, Major.K)
        return Umma(self.dtype, n=self.tile_m, k=self.head_dim_v, b=do, a=SmemOperand(self.v_tile, Major.K))

    @property
    def dv(self) -> Umma:
        """dV += P^T dO, P^T from tensor memory."""
        return Umma(self.dtype, n=self.columns_v, k=self.tile_m, b=SmemOperand(self.do_tile, Major.MN))

    @property
    def dk(self) -> Umma:
        """dK += dS^T Q, dS^T from tensor memory."""
        return Umma(self.dtype, n=self.columns, k=self.tile_m, b=SmemOperand(self.q_tile, Major.MN))

    @property
    def dq(self) -> Umma:
        """dQ = dS K, both from shared memory, keys reduced."""
        k = SmemOperand(self.k_tile, Major.MN)
        return Umma(self.dtype, n=self.columns, k=TILE_N, b=k, a=SmemOperand(self.ds_tile, Major.MN))

    def dq_transpose(self, lanes: int) -> Umma:
        """`lanes` rows of dQ^T = K^T dS^T."""
        k = SmemOperand(self.k_tile, Major.MN)
        return Umma(self.dtype, n=self.tile_m, k=TILE_N, b=SmemOperand(self.ds_tile, Major.MN), a=k, m=lanes)
