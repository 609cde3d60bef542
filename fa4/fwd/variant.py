"""Compile-time configuration shared by all warp-specialised forward kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Float16

from ..core import variant
from .rows import padded_heads_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardVariant(variant.Variant):
    """Kind of problem, and tiling of the forward.

    packed: query heads packed into the rows of a tile (pack_gqa); 1 for none. tile_n: keys per block.
    rescale_threshold: O is rescaled if the row max grows by more than this, in powers of two; 0: at every growth.

    split: split-KV; out and lse are float32 with a leading axis of parts, and there is no sink. fixed_parts: all parts
    of all tiles have the same number of key blocks.
    """

    packed: int
    tile_n: int
    rescale_threshold: float
    smem_bytes: int
    split: bool = False
    fixed_parts: bool = False
    snake: ClassVar[bool] = False  # odd rounds of a persistent grid visit the CTAs in reverse order

    @property
    def slots(self) -> int:
        """Tile rows per query: `packed`, padded to a power of two."""
        return padded_heads_of(self.packed)

    @property
    def q_slots(self) -> int:
        """`Tile.slots` of Q."""
        return 1 if self.slots == self.packed else self.slots

    @property
    def pieces(self) -> int:
        """Number of separate TMA loads per key block (pages)."""
        return 1 if self.cache is None or self.kv_without_tma else self.cache.pieces(self.tile_n)

    @property
    def kv_bits(self) -> int:
        """Bits per element of k and v in global memory."""
        return 8 if self.has_8bit_kv else self.dtype.width

    @property
    def v_dtype(self) -> type:
        """Dtype of the operands P and V. 8-bit V: float16. Its conversion takes half as many instructions as to
        bfloat16, and each P from 2^-14 up to its bound of 2^rescale_threshold has three more significant bits."""
        return Float16 if self.has_8bit_kv else self.dtype

    @property
    def seq_bounded_k(self) -> bool:
        """True if TMA must write zeros past the keys of a sequence: memory there may hold NaN, and 0 * NaN is NaN."""
        return self.varlen_k or self.has_seqused_k
