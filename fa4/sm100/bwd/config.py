"""Compile-time configuration of the Blackwell backward, the shapes that follow from it, and the context of the roles.

Scores are transposed: S^T = K Q^T has keys as rows. So P^T and dS^T, written back to tensor memory, are the left
operands of dV = P^T dO and dK = dS^T Q.

A CTA pair (`ctas` = 2) owns two key blocks and computes every product together. The right operand of a product is
split: each CTA holds half of it in shared memory. S^T and dP^T split the queries of Q and dO, dV and dK split the
columns, so a pair loads Q and dO in both layouts. dQ splits the queries: each CTA holds dS^T of both key blocks for its
half of the queries, and sends the other half to the other CTA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...bwd.blocks import Placement, RowBlocks
from ...bwd.variant import BackwardVariant
from ...pipeline.smem import Tile
from ...runtime.dsl import cutlass
from ...runtime.spec import P_EXPONENT
from ..mma import CHUNK_BYTES as SCALE_BYTES
from ..mma import CHUNK_COLUMNS as SCALE_COLUMNS
from ..mma import Major, SmemOperand, Umma
from ..tensor_memory import LANES

if TYPE_CHECKING:
    from cutlass import Int32

TILE_N = 128  # keys of one CTA; also queries of a step, unless noted
HALVES = 2  # compute warpgroups; each takes half of the queries of a step
CHUNK = 32  # TMEM columns of dQ per bulk addition; head dims are padded to whole chunks
CHUNK_BYTES = 4 * LANES * CHUNK
DQ_STAGES = 2
ROW_STAGES = 2
BARRIER_BYTES = 512  # upper bound of all mbarriers, for the smem budget


@dataclass(frozen=True, slots=True)
class Chunks(Placement):
    """A lane is a query: chunks of shape (CHUNK / 4, lane, 4). Each CTA of a pair has half of the queries; its lanes 64
    to 127 hold the second half of the columns of lanes 0 to 63."""

    ctas: int

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        lane, chunk = row, first // CHUNK
        if self.ctas == 2:
            queries, chunks = self.tile_m // 2, self.columns // 2 // CHUNK
            lane = row % queries + chunk // chunks * queries
            chunk = row // queries * chunks + chunk % chunks
        return chunk * (LANES * CHUNK) + within // 4 * (4 * LANES) + 4 * lane + within % 4


@dataclass(frozen=True, slots=True)
class Columns(Placement):
    """A lane is a column of Q: shape (query / 4, column, 4), first LANES columns, then the others."""

    rows: ClassVar[int] = 4

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        begin, width = 0, LANES
        if first >= LANES:
            begin, first, width = self.tile_m * LANES, first - LANES, self.columns - LANES
        return begin + (row // 4 * width + first + within) * 4 + row % 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100BackwardSteps(BackwardVariant):
    """What the Blackwell backwards have in common: a step computes scores of a CTA's 128 lanes with `tile_m` columns,
    half of them in each compute warpgroup.

    ctas: 1, or 2 for a CTA pair. polynomial: pairs of every 16 whose exp2 runs on the FMA units.
    """

    ctas: int
    polynomial: int
    smem_bytes: int
    cta_tile_n: ClassVar[int] = TILE_N

    @property
    def cluster_tile_n(self) -> int:
        """Keys of a CTA or of a CTA pair."""
        return self.ctas * self.cta_tile_n

    @property
    def lane_columns(self) -> int:
        """Columns of a step that a lane of tensor memory has."""
        return self.tile_m

    @property
    def half(self) -> int:
        """Columns of a thread in a step: of a lane, one compute warpgroup has half."""
        return self.lane_columns // HALVES

    def _tile(self, rows: int, columns: int) -> Tile:
        return Tile(rows, columns, self.operand_bits)

    @property
    def loaded_dtype(self) -> type[cutlass.Numeric]:
        """Type of the elements that TMA loads."""
        return self.dtype if self.operands is None else cutlass.Uint8

    def elements(self, nbytes: int) -> int:
        """Number of elements of `loaded_dtype` in `nbytes`."""
        return 8 * nbytes // self.loaded_dtype.width

    @property
    def ds_dtype(self) -> type[cutlass.Numeric]:
        """Type of dS as the products read it."""
        return self.dtype


def unpacked_columns(cfg: Sm100BackwardSteps) -> int:
    """Columns of half a step's scores that its packed P or dS does not take."""
    return cfg.half - cfg.half * cfg.operand_bits // 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100BackwardConfig(Sm100BackwardSteps):
    """Configuration of the generated code; the fields are the compile key.

    wide_ds: of 8-bit operands, dS is e5m2 instead of e4m3. It is 2^8 P (f dP - delta), see `spec.GradientOperands`: of
    many keys P may be so small that e4m3 has no numbers for it.
    """

    column_unit: ClassVar[int] = CHUNK
    wide_ds: bool = False

    @property
    def ds_dtype(self) -> type[cutlass.Numeric]:
        if self.operands is None:
            return self.dtype
        return cutlass.Float8E5M2 if self.wide_ds else cutlass.Float8E4M3FN

    @property
    def tile_m(self) -> int:
        """Query rows of one step: 128, or 64 if dK is too wide for tensor memory to also hold 128 columns of scores."""
        return 64 if self.columns > 128 else 128

    @property
    def q_tile(self) -> Tile:
        return self._tile(self.tile_m // self.ctas, self.head_dim)

    @property
    def do_tile(self) -> Tile:
        return self._tile(self.tile_m // self.ctas, self.head_dim_v)

    @property
    def q_columns(self) -> Tile:
        """Q in the second layout: all queries of a step, this CTA's share of the columns. Likewise below."""
        return self._tile(self.tile_m, self.columns // self.ctas)

    @property
    def do_columns(self) -> Tile:
        return self._tile(self.tile_m, self.columns_v // self.ctas)

    @property
    def k_columns(self) -> Tile:
        return self._tile(self.cluster_tile_n, self.columns // self.ctas)

    @property
    def dk_tile(self) -> Tile:
        return Tile(self.cta_tile_n, self.head_dim, self.dtype_bits)

    @property
    def dv_tile(self) -> Tile:
        return Tile(self.cta_tile_n, self.head_dim_v, self.dtype_bits)

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of the memory of K and of V, from which dK and dV are stored."""
        return max(self.k_tile.nbytes, self.dk_tile.nbytes), max(self.v_tile.nbytes, self.dv_tile.nbytes)

    @property
    def ds_tile(self) -> Tile:
        """dS^T for dQ, one row per key: all keys of a pair, this CTA's half of the queries."""
        return self._tile(self.cluster_tile_n, self.tile_m // self.ctas)

    @property
    def scale_chunks(self) -> dict[str, int]:
        """Chunks of scales of each tile that has any: of its rows, and of its columns where a product reduces rows."""
        return dict(K=2, V=1, Q=2, dO=2) if self.has_block_scales else {}

    def scale_bytes(self, name: str) -> int:
        """Bytes of the scales of a tile."""
        return SCALE_BYTES * self.scale_chunks.get(name, 0)

    def scale_columns(self, name: str) -> int:
        """Tensor-memory columns of the scales of a tile."""
        return SCALE_COLUMNS * self.scale_chunks[name]

    @property
    def q_stages(self) -> int:
        """Two, or one for a pair: it has no room for more, and S^T releases its copy of Q early."""
        return 3 - self.ctas

    @property
    def do_stages(self) -> int:
        """Two if there is room, else one."""
        if self.ctas == 2:
            return 1
        used = sum(self.kv_bytes) + self.q_stages * self.q_tile.nbytes
        used += self.scale_bytes("K") + self.scale_bytes("V")
        used += self.q_stages * self.scale_bytes("Q") + 2 * self.scale_bytes("dO")
        used += ROW_STAGES * self.rows_bytes + self.ds_tile.nbytes + DQ_STAGES * CHUNK_BYTES + BARRIER_BYTES
        return 2 if used + 2 * self.do_tile.nbytes <= self.smem_bytes else 1

    @property
    def dq_over_dp(self) -> bool:
        """True if dQ aliases dP: only small head dims leave it other columns. A pair's dQ fits between the halves of
        dS, so it can be computed before dK."""
        return self.columns > 64 or self.columns_v > 64

    @property
    def dq_columns(self) -> int:
        """Tensor-memory columns of dQ. A CTA of a pair has half of the queries; lanes 64 to 127 hold the second half of
        the columns."""
        return self.tile_m if self.dq_transposed else self.columns // self.ctas

    @property
    def chunks_together(self) -> int:
        """Chunks of dQ that are staged together. With an order, 16-bit products of 64 columns leave little time to
        shared memory: predicted at 16k full 1124 and causal 1032 TFLOP/s, chunk by chunk 1081 and 1012. Elsewhere each
        chunk should start early: d = 128 causal 1584, together 1566."""
        is_short = self.deterministic and self.operands is None and self.columns <= 64
        return DQ_STAGES if is_short else 1

    @property
    def dq_transposed(self) -> bool:
        """True if dQ^T = K^T dS^T replaces dQ = dS K: columns of Q are lanes, 128 and then 64. The 64 queries of a step
        would fill only half of the lanes, and tensor memory has no room for that."""
        return self.tile_m < LANES

    @property
    def dq_parts(self) -> int:
        """Stages of the dQ channel: 2 if the part that aliases dP has its own, because the next dP waits for it."""
        return 2 if self.dq_transposed else 1

    @property
    def row_blocks(self) -> RowBlocks:
        """Configuration of the kernels before and after the main kernel."""
        transposed = Columns(self.tile_m, self.columns)
        placement = transposed if self.dq_transposed else Chunks(self.tile_m, self.columns, self.ctas)
        exponent = 0 if self.operands is None else P_EXPONENT
        semaphores = self.ctas if self.deterministic else 0
        return RowBlocks.of(self, placement, semaphores=semaphores, weight_exponent=exponent)

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
        """dV += P^T dO, with P^T in tensor memory."""
        return self._umma(n=self.columns_v, k=self.tile_m, b=SmemOperand(self.do_columns, Major.MN))

    @property
    def dk(self) -> Umma:
        """dK += dS^T Q, with dS^T in tensor memory."""
        b = SmemOperand(self.q_columns, Major.MN)
        return replace(self._umma(n=self.columns, k=self.tile_m, b=b), a_dtype=self.ds_dtype)

    @property
    def dq(self) -> Umma:
        """dQ = dS K, reduced over keys, both operands in shared memory."""
        k, ds = SmemOperand(self.k_columns, Major.MN), SmemOperand(self.ds_tile, Major.MN)
        umma = Umma(self.operand_dtype, n=self.columns, k=self.cluster_tile_n, b=k, a=ds, ctas=self.ctas)
        return replace(umma, a_dtype=self.ds_dtype, is_scaled=self.has_block_scales)

    def _umma(self, n: int, k: int, b: SmemOperand, a: SmemOperand | None = None) -> Umma:
        """Product with one row per key."""
        umma = Umma(self.operand_dtype, n=n, k=k, b=b, a=a, m=self.cluster_tile_n, ctas=self.ctas)
        return replace(umma, is_scaled=self.has_block_scales)

    def dq_transpose(self, lanes: int) -> Umma:
        """dQ^T = K^T dS^T, `lanes` rows of it."""
        k = SmemOperand(self.k_tile, Major.MN)
        return Umma(self.dtype, n=self.tile_m, k=TILE_N, b=SmemOperand(self.ds_tile, Major.MN), a=k, m=lanes)
