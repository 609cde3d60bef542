"""Compile-time configuration of the Blackwell forward, the shapes that follow from it, and the context of the roles."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from ...fwd.variant import ForwardVariant, KvLoad, OutStore
from ...pipeline.smem import Tile
from ...runtime.dsl import cutlass
from ...runtime.spec import MX_BLOCK
from ..mma import CHUNK_BLOCKS, CHUNK_BYTES, CHUNK_COLUMNS, Major, SmemOperand, Umma, k_per_mma
from ..tensor_memory import COLUMNS, LANES

BARRIER_BYTES = 512  # upper bound of all mbarriers, for the smem budget

UPCONVERTED_STAGES = 3  # 16-bit K/V stages that the products read, if K and V are 8-bit


class Schedule(enum.Enum):
    """How CTAs get their work tiles."""

    SINGLE = "one tile a CTA or pair"
    PERSISTENT = "as many CTAs or pairs as fit, each strides through the tiles"
    DYNAMIC = "a CTA or pair a tile, but those that run take over the tiles of those that have not started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100ForwardConfig(ForwardVariant):
    """Configuration of the generated code; the fields are the compile key.

    polynomial: pairs of every 16 (words of four, if P is in shared memory) whose exp2 runs on the FMA units.
    sawtooth: every other work tile of a CTA takes its unmasked key blocks in ascending order, because the tile before
        it read those last.
    q_tiles: Q tiles of one CTA; two of them ping-pong.
    s_stages: S of a Q tile in tensor memory. With two, the next S is computed while softmax works on this one.
    direct_store: store O from tensor memory through registers to global memory, without staging. Used if few rows of a
        tile are written, if the output is float32, or if K and V need the shared memory. Otherwise the number of
        packed heads must divide 128.
    per_sm: CTAs that share an SM, so that the softmax of one overlaps the products of the other.
    loads_maximum: loads of S from tensor memory give the row max, too, where nothing changes or masks S (sm_103).
    ctas: 1, or 2 for a CTA pair. A Q tile of a pair has 256 rows, 128 in each CTA's tensor memory. Both CTAs compute
        every product together: each loads and holds half of K's rows and half of V's columns of a key block.

    Raises:
        ValueError: the fields contradict each other.
    """

    schedule: Schedule
    polynomial: int
    sawtooth: bool
    ctas: int
    q_tiles: int = 2
    s_stages: int = 1
    tile_n: int = 128
    direct_store: bool = False
    per_sm: int = 1
    loads_maximum: bool = False
    has_cvt_e2m1: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rows_per_query != self.packed_heads and not self.direct_store:
            raise ValueError(f"{self.packed_heads} packed heads do not divide {LANES}, and O is not stored directly")
        is_simple = self.direct_store and self.q_tiles == self.per_sm == 1
        if (self.converts_kv or self.kv_load is KvLoad.GATHER) and not is_simple:
            raise ValueError("a CTA that converts or gathers keys takes one Q tile, stores O directly, shares no SM")
        if self.kv_load is KvLoad.GATHER and (self.kv8_stages or self.kv_stages) < 6:
            raise ValueError("the gather role needs six stages: three key blocks of K and V")
        if self.split and not self.direct_store:
            raise ValueError("split-KV parts are float32 and must be stored directly")
        if self.q_tiles * self.s_stages > 2:
            raise ValueError("two Q tiles take one S each")
        if self.has_block_scales and not self.p_in_smem:
            raise ValueError("blocks of numbers have scales only where P is in shared memory: two Q tiles of one CTA")

    @property
    def tile_m(self) -> int:
        """Rows of one Q tile in one CTA: one per lane of tensor memory."""
        return LANES

    @property
    def p_in_smem(self) -> bool:
        """True if P goes to shared memory instead of over S, so that S is free as soon as softmax has loaded it. With P
        in e4m3, products can read both operands from there."""
        return self.operands is not None and self.q_tiles == 2 and self.ctas == 1

    @property
    def drops_8bit_p(self) -> bool:
        """True if dropout applies to P in e4m3."""
        return self.operands is not None and self.has_dropout

    @property
    def s_ahead(self) -> bool:
        """True if S of the next key block precedes O += P V of this one."""
        return self.s_stages > 1 or self.p_in_smem

    @property
    def p_tile(self) -> Tile:
        """P of a Q tile, in shared memory."""
        return Tile(self.tile_m, self.tile_n, self.operand_bits)

    @property
    def p_bytes(self) -> int:
        """Shared-memory bytes of P."""
        return self.q_tiles * self.p_tile.nbytes if self.p_in_smem else 0

    @property
    def scale_chunks(self) -> int:
        """Chunks of scales of a Q tile, and of a K/V stage: see `block_scales`."""
        return -(-self.head_dim // (MX_BLOCK * CHUNK_BLOCKS)) if self.has_block_scales else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a Q tile, and of a K/V stage."""
        return self.scale_chunks * CHUNK_BYTES

    @property
    def v_scale_bytes(self) -> int:
        """Bytes of the scales of V of a key block."""
        return CHUNK_BYTES if self.has_block_scales else 0

    @property
    def scale_columns(self) -> int:
        """Tensor-memory columns of the scales of a Q tile, and of a K/V stage."""
        return self.scale_chunks * CHUNK_COLUMNS

    @property
    def p_head(self) -> int:
        """Keys of the P head, which PV reads before the P tail is stored."""
        step = k_per_mma(self.operand_bits)
        return self.tile_n // 4 * 3 // step * step

    @property
    def cta_rows(self) -> int:
        """Rows of all Q tiles of one CTA."""
        return self.q_tiles * self.tile_m

    @property
    def rows(self) -> int:
        """Rows of a work tile."""
        return self.ctas * self.cta_rows

    @property
    def q_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim, self.operand_bits, slots=self.q_slots)

    @property
    def k_tile(self) -> Tile:
        """Keys of a block that this CTA loads, in the loaded type."""
        return Tile(self.tile_n // self.ctas, self.head_dim, self.kv_bits, pieces=self.pieces)

    @property
    def v_tile(self) -> Tile:
        """Columns of V that this CTA loads for a block, in the loaded type."""
        columns = self.head_dim_v if self.ctas == 1 else self.head_dim_v_padded // self.ctas
        return Tile(self.tile_n, columns, self.kv_bits, pieces=self.pieces)

    @property
    def k_operand(self) -> Tile:
        """K as the product reads it."""
        return Tile(self.tile_n // self.ctas, self.head_dim, self.operand_bits)

    @property
    def v_operand(self) -> Tile:
        return Tile(self.tile_n, self.v_tile.columns, self.operand_bits)

    @property
    def o_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim_v, self.dtype_bits)

    @property
    def kv_stage_bytes(self) -> int:
        """Bytes of a K/V stage that a product reads."""
        return max(self.k_operand.nbytes, self.v_operand.nbytes)

    @property
    def kv8_stage_bytes(self) -> int:
        """Bytes of a stage of 8-bit K or V."""
        return max(self.k_tile.nbytes, self.v_tile.nbytes)

    @property
    def kv_load(self) -> KvLoad:
        """Rows with scales are fetched."""
        return KvLoad.FETCH if self.is_nvfp4 else super(Sm100ForwardConfig, self).kv_load

    @property
    def kv8_stages(self) -> int:
        """Stages of the ring of 8-bit K and V: all shared memory that the 16-bit ring leaves, at most 16."""
        if not self.converts_kv or self.kv_load is KvLoad.FETCH:
            return 0
        used = self.q_tiles * self.q_tile.nbytes + self.kv_stages * self.kv_stage_bytes
        return min(self._smem_left(used) // self.kv8_stage_bytes, 16)

    @property
    def rows_bytes(self) -> int:
        """Bytes of one float per row of all Q tiles."""
        return 4 * self.cta_rows

    @property
    def s_buffers(self) -> int:
        """S of all Q tiles."""
        return self.q_tiles * self.s_stages

    @property
    def out_store(self) -> OutStore:
        """O is staged over Q if separate buffers would leave fewer than two K/V stages."""
        if self.direct_store:
            return OutStore.DIRECT
        stages = self._kv_stages(self.q_tiles * (self.q_tile.nbytes + self.o_tile.nbytes))
        return OutStore.TMA if stages >= 2 else OutStore.TMA_OVER_Q

    @property
    def o_step(self) -> int:
        """Bytes between the staged O of two Q tiles."""
        return self.q_tile.nbytes if self.out_store is OutStore.TMA_OVER_Q else self.o_tile.nbytes

    @property
    def kv_stages(self) -> int:
        """Stages of the ring that K and V share."""
        if self.converts_kv:
            return UPCONVERTED_STAGES
        if self.direct_store:
            return min(self._kv_stages(self.q_tiles * self.q_tile.nbytes), 16)
        used = self.q_tiles * max(self.q_tile.nbytes, self.o_tile.nbytes)
        if self.out_store is OutStore.TMA:
            used = self.q_tiles * (self.q_tile.nbytes + self.o_tile.nbytes)
        return min(self._kv_stages(used), 8)

    def _kv_stages(self, used: int) -> int:
        stages = self._smem_left(used) // (self.kv_stage_bytes + self.scale_bytes)
        if not self.has_block_scales:
            return stages
        columns = self.tile_n + self.o_columns + self.scale_columns + CHUNK_COLUMNS  # of a Q tile, with scales of P
        return min(stages, (COLUMNS - self.q_tiles * columns) // self.scale_columns)

    def _smem_left(self, used: int) -> int:
        used += self.p_bytes + self.q_tiles * self.scale_bytes + (1 + self.s_stages) * self.rows_bytes + BARRIER_BYTES
        return self.smem_bytes - used

    @property
    def loaded_dtype(self) -> type[cutlass.Numeric]:
        """Type of the elements of Q, and of K and V unless they are upconverted, as TMA loads them."""
        return self.dtype if self.operands is None else cutlass.Uint8

    def elements(self, nbytes: int) -> int:
        """Number of elements of `loaded_dtype` in `nbytes`."""
        return 8 * nbytes // self.loaded_dtype.width

    @property
    def o_columns(self) -> int:
        """Tensor-memory columns of O of one Q tile."""
        return self.head_dim_v_padded if self.ctas == 2 else -(-self.head_dim_v // 64) * 64

    @property
    def head_dim_v_padded(self) -> int:
        """Columns of the PV product, a multiple of 16 in each CTA as tcgen05.mma requires."""
        return -(-self.head_dim_v // (16 * self.ctas)) * 16 * self.ctas

    @property
    def qk(self) -> Umma:
        """S = Q K^T."""
        q, k = SmemOperand(self.q_tile, Major.K), SmemOperand(self.k_operand, Major.K)
        return self._product(self.operand_dtype, n=self.tile_n, k=self.head_dim, b=k, a=q)

    @property
    def pv(self) -> Umma:
        """O += P V."""
        v = SmemOperand(self.v_operand, Major.MN)
        p = SmemOperand(self.p_tile, Major.K) if self.p_in_smem else None
        return self._product(self.v_dtype, n=self.head_dim_v_padded, k=self.tile_n, b=v, a=p)

    def _product(self, dtype: type[cutlass.Numeric], **shape: Any) -> Umma:
        m, ctas = self.ctas * self.tile_m, self.ctas
        return Umma(dtype, **shape, m=m, ctas=ctas, is_scaled=self.has_block_scales)

    @property
    def largest_p(self) -> int:
        """For e4m3 5, since O is rescaled in tensor memory: by 7, a forward of 16k keys is predicted to take 1.3 times
        as long. Of normal inputs, rounding P is the same error of out by both, 2.5 percent without `core.line`."""
        return 0 if self.operands is None else 5

    @property
    def persistent(self) -> bool:
        return self.schedule is Schedule.PERSISTENT

    @property
    def seq_bounded_q(self) -> bool:
        """True if TMA maps of Q and O end with the sequence (`sequence.seq_bounded_tma`): packed sequences follow each
        other. Unused rows of a sequence need no bound, because their output is zero whatever they hold."""
        return self.varlen

    @property
    def seq_bounded_o(self) -> bool:
        return self.seq_bounded_q
