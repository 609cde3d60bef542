"""What the forwards of warp roles have in common at compile time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Float16

from ..core import variant
from .rows import slots_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(variant.Variant):
    """A kind of problem and how a forward works on it.

    packed: query heads that are neighbouring rows of a tile, 1 for none. tile_n: keys of one block.
    rescale_threshold: growth of a row's maximum, in powers of two, that O tolerates before it is rescaled; 0 rescales
    at every growth.

    split: the keys of a work tile are shared among CTAs; out and lse have a leading axis of parts and are float32, and
    there is no sink. fixed_parts: each of a number of key blocks that is the same for all tiles.
    """

    packed: int
    tile_n: int
    rescale_threshold: float
    smem_bytes: int
    split: bool = False
    fixed_parts: bool = False
    snake: ClassVar[bool] = False  # every other lap of a persistent grid goes through its CTAs backwards

    @property
    def slots(self) -> int:
        """Rows of a tile that a query takes."""
        return slots_of(self.packed)

    @property
    def q_slots(self) -> int:
        """`Tile.slots` of Q."""
        return 1 if self.slots == self.packed else self.slots

    @property
    def pieces(self) -> int:
        """Stretches of a key block that are loaded by themselves."""
        return 1 if self.cache is None or self.plain_keys else self.cache.pieces(self.tile_n)

    @property
    def bits_of_keys(self) -> int:
        """Of an element of k or v, as it is loaded."""
        return 8 if self.has_bytes else self.dtype.width

    @property
    def v_dtype(self) -> type:
        """Of P and V as operands. Those of 8 bits are converted to float16 in half as many instructions as to bfloat16,
        and P, at most 2^rescale_threshold, keeps three bits more of each weight that it has from 2^-14 on."""
        return Float16 if self.has_bytes else self.dtype

    @property
    def seq_bounded_k(self) -> bool:
        """Rows after a sequence's keys may hold anything, and 0 * NaN is NaN: TMA puts zeros there."""
        return self.varlen_k or self.has_seqused_k
