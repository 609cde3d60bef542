"""Compile-time configuration shared by all warp-specialised forward kernels."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..core import variant
from ..pipeline.smem import Tile
from ..runtime.dsl import cutlass
from ..runtime.spec import AttentionSpec


def padded_heads_of(packed: int) -> int:
    """Tile rows per query with pack_gqa: the number of packed heads, padded to a power of two."""
    return 1 << (packed - 1).bit_length()


class OutStore(enum.Enum):
    """How O gets to global memory."""

    TMA = "by TMA from a buffer of its own in shared memory"
    TMA_OVER_Q = "by TMA from the shared memory of Q"
    DIRECT = "from registers"


class KvLoad(enum.Enum):
    """How K and V get to shared memory."""

    TMA = "by TMA"
    ROWS = "by TMA, any four rows at a time"
    GATHER = "row by row, copied by the gather role"
    FETCH = "row by row, numbers of 8 or 4 bits loaded into registers and converted there"


class Schedule(enum.Enum):
    """Assignment of work tiles to CTAs."""

    SINGLE = "one tile a CTA"
    PACKED = "one tile a CTA, for packed sequences only as many as their rows may need"
    PERSISTENT = "as many CTAs as fit, each takes tiles in snake order"
    COUNTED = "as many CTAs as fit, each takes the next tile by a counter"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions(variant.Variant):
    """Kind of problem of a forward on any chip.

    packed_heads: query heads packed into the rows of a tile (pack_gqa); 1 for none. split: split-KV; out and lse are
    float32 with a leading axis of parts, and there is no sink. fixed_parts: all parts of all tiles have the same number
    of key blocks.
    """

    packed_heads: int = 1
    split: bool = False
    fixed_parts: bool = False

    @property
    def has_counter(self) -> bool:
        """Whether the CTAs of a persistent grid take tiles by a counter, so late CTAs have no tiles of their own."""
        return False

    @property
    def snake(self) -> bool:
        """Whether odd rounds of a persistent grid visit the CTAs in reverse order."""
        return False

    @property
    def merges_l2_groups(self) -> bool:
        """Whether the last L2 group has all (batch, head) pairs that are left, see `LaunchSizes.most_l2_groups`."""
        return self.snake or self.has_counter

    @staticmethod
    def options(spec: AttentionSpec, packed_heads: int, splits: int) -> dict[str, Any]:
        """Return the fields by name, for a record that extends this one."""
        split = splits > 1
        fields = variant.Variant.fields(spec)
        fields["has_sink"] &= not split  # the combine kernel adds it
        return fields | dict(packed_heads=packed_heads, split=split, fixed_parts=split and spec.batch_invariant)


Config = TypeVar("Config", bound=ForwardOptions)

RESCALE_THRESHOLD_8BIT = 8.75  # of P in e4m3, see `ForwardVariant.largest_p`
LARGEST_P_4BIT = math.log2(448 * 6)  # of P in e2m1 with scales of e4m3: the largest numbers of both
RESCALE_THRESHOLD_4BIT = LARGEST_P_4BIT + 2**-10  # at each growth, apart from roundings of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardVariant(ForwardOptions):
    """Kind of problem, and tiling of the forward.

    tile_n: keys per block. rescale_threshold: O is rescaled if the row max grows by more than this, in powers of two;
    0: at every growth. one_block: a window and the queries of a consumer are so few that one block of tile_n keys holds
    all keys that a consumer sees. The block begins with the first key within the window of its first query.
    """

    tile_n: int
    rescale_threshold: float
    smem_bytes: int
    one_block: bool = False
    loads_v: ClassVar[bool] = True  # False: V is the first columns of K
    has_cvt_e2m1: ClassVar[bool] = False  # whether the chip converts e2m1 to float16

    if TYPE_CHECKING:  # defined by each chip's configuration; see `Variant.ctas`

        @property
        def rows(self) -> int:
            """Rows of a work tile."""

        @property
        def persistent(self) -> bool:
            """Whether the grid has as many CTAs as fit, and each takes several work tiles."""

        @property
        def out_store(self) -> OutStore: ...

        @property
        def seq_bounded_q(self) -> bool:
            """Whether the TMA map of Q ends with the sequence."""

        @property
        def seq_bounded_o(self) -> bool:
            """Whether the TMA map of O ends with the sequence."""

        @property
        def q_tile(self) -> Tile: ...

        @property
        def k_tile(self) -> Tile: ...

        @property
        def v_tile(self) -> Tile: ...

        @property
        def o_tile(self) -> Tile: ...

    @property
    def rows_per_query(self) -> int:
        """Tile rows per query: `packed_heads`, padded to a power of two."""
        return padded_heads_of(self.packed_heads)

    @property
    def q_slots(self) -> int:
        """`Tile.slots` of Q."""
        return 1 if self.rows_per_query == self.packed_heads else self.rows_per_query

    @property
    def kv_load(self) -> KvLoad:
        return KvLoad.GATHER if self.cache is not None and self.cache.is_scattered else KvLoad.TMA

    @property
    def pieces(self) -> int:
        """Number of separate TMA loads per key block (pages)."""
        return 1 if self.cache is None or self.kv_load is not KvLoad.TMA else self.cache.pieces(self.tile_n)

    @property
    def kv_bits(self) -> int:
        """Bits per element of k and v in global memory."""
        if self.converts_kv:
            return self.cache.bits
        return 8 if self.operands is not None else self.dtype_bits

    @property
    def v_dtype(self) -> type[cutlass.Numeric]:
        """Dtype of the operands P and V. 8-bit V: float16. Its conversion takes half as many instructions as to
        bfloat16, and each P from 2^-14 up to its bound of 2^rescale_threshold has three more significant bits. But
        factors inside rows may be beyond the range of float16. Without an instruction of the chip, the conversion of
        4-bit numbers to bfloat16 is the shorter one."""
        if not self.converts_kv or self.cache.has_scaled_rows or (self.is_nvfp4 and not self.has_cvt_e2m1):
            return self.operand_dtype
        return cutlass.Float16

    @property
    def largest_p(self) -> float:
        """Logarithm to base 2 of a row's largest P, when O was rescaled last. The largest number of e4m3 is 448, so P
        in e4m3 may grow to 2^8.75 before the next time. A P of at most 2^-10 is rounded to 0. With more, fewer weights
        become 0; with less, O is rescaled more seldom."""
        return 0

    @property
    def rounds_largest_p(self) -> bool:
        """Whether the largest P of a row may be rounded."""
        return True

    @property
    def has_kv_maps(self) -> bool:
        """Whether TMA loads K and V."""
        return self.kv_load in (KvLoad.TMA, KvLoad.ROWS)

    @property
    def seq_bounded_k(self) -> bool:
        """True if TMA must write zeros past the keys of a sequence: memory there may hold NaN, and 0 * NaN is NaN."""
        return self.varlen_k or self.has_seqused_k


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchingVariant(ForwardVariant):
    """A forward that fetches all 8-bit rows, and whose operands all have `v_dtype`."""

    @property
    def kv_load(self) -> KvLoad:
        return KvLoad.FETCH if self.converts_kv else super(FetchingVariant, self).kv_load

    @property
    def scales_q(self) -> bool:
        """True if Q gets another dtype than that of the call, see `device.q_scales`."""
        return self.dtype is not self.v_dtype
