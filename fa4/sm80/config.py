"""Compile-time configurations of the portable kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..bwd.blocks import Placement, RowBlocks
from ..bwd.variant import BackwardOptions
from ..core.variant import Variant
from ..fwd.variant import ForwardOptions
from ..runtime.dsl import cutlass
from .tiles import L2_GROUP_BYTES, LARGEST_L2_GROUP, BackwardTiles, ForwardTiles, padded, v_slice, v_slices

if TYPE_CHECKING:
    from cutlass import Int32


class Scalars(NamedTuple):
    """Scalar arguments of the forward's kernel."""

    softmax_scale: cutlass.Float32
    softcap: cutlass.Float32
    left: cutlass.Int32
    right: cutlass.Int32


class Sm80Config(Variant):
    """Configuration of the generated code; the fields are the compile key. Each direction has a field `tiles`."""

    __slots__ = ()

    tiles: ForwardTiles | BackwardTiles

    @property
    def dim(self) -> int:
        return padded(self.head_dim)

    @property
    def dim_v(self) -> int:
        return padded(self.head_dim_v)

    @property
    def threads(self) -> int:
        return 32 * self.tiles.warps

    @property
    def smem_bytes(self) -> int:
        return self.tiles.smem_bytes(self.head_dim, self.head_dim_v)

    def launch(self, ctas: Int32) -> dict:
        """Launch parameters for `ctas` CTAs."""
        return dict(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=self.tiles.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    def window(self, scalars: Any) -> tuple[Int32 | None, Int32 | None]:
        """Return the bounds of the window in the scalar arguments; None for an unbounded side."""
        return scalars.left if self.has_left else None, scalars.right if self.has_right else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm80ForwardConfig(Sm80Config, ForwardOptions):
    """All heads of a group are packed into the rows of a tile, or none."""

    tiles: ForwardTiles
    ctas: ClassVar[int] = 1
    persistent: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """Rows of a work tile."""
        return self.tiles.tile_m

    @property
    def tile_n(self) -> int:
        return self.tiles.tile_n

    @property
    def v_slices(self) -> int:
        """CTAs of a work tile: each has a slice of the columns of V and O."""
        return v_slices(self.head_dim_v)

    @property
    def dim_v(self) -> int:
        """Of a slice."""
        return v_slice(self.head_dim_v)


@dataclass(frozen=True, slots=True)
class Fragments(Placement):
    """Layout of the dQ accumulator of a block in the order of the mma fragments (`tensor_core`): value i of all
    threads, then value i + 1. So one addition of a warp covers 128 contiguous bytes. warps: grid over rows and columns.
    slices: the columns of each follow those of the last.
    """

    warps: tuple[int, int]
    slices: int = 1

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        width = self.columns // self.slices
        return first // width * width * self.tile_m + self._offset(row, first % width + within)

    def _offset(self, row: Int32 | int, column: Int32 | int) -> Int32 | int:
        """Offset in a slice."""
        warps_m, warps_n = self.warps
        warp = row // 16 % warps_m + column // 8 % warps_n * warps_m
        thread = 32 * warp + row % 8 * 4 + column % 8 // 2
        repetition = row // (16 * warps_m) + column // (8 * warps_n) * (self.tile_m // (16 * warps_m))
        i = 4 * repetition + row // 8 % 2 * 2 + column % 2
        return i * (32 * warps_m * warps_n) + thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm80BackwardConfig(Sm80Config, BackwardOptions):
    """A tile has the rows of all heads of a group."""

    tiles: BackwardTiles
    ctas: ClassVar[int] = 1
    descending: ClassVar[bool] = False

    @property
    def dim(self) -> int:
        return self.tiles.columns(self.head_dim)

    @property
    def dim_v(self) -> int:
        return self.tiles.columns(self.head_dim_v)

    @property
    def slice_dims(self) -> tuple[int, int]:
        """Columns of dQ and dK, and of dV, of a CTA."""
        return self.dim // self.tiles.slices, self.dim_v // self.tiles.slices

    @property
    def row_blocks(self) -> RowBlocks:
        """Configuration of the kernels before and after the main kernel."""
        slices = self.tiles.slices
        placement = Fragments(self.tile_m, self.dim, self.tiles.warps_q, slices)
        return RowBlocks.of(self, placement, packed=self.group, semaphores=slices if self.deterministic else 0)

    @property
    def smem_bytes(self) -> int:
        keep_bits_bytes = self.tiles.keep_bits_bytes if self.has_dropout else 0
        return self.tiles.smem_bytes(self.head_dim, self.head_dim_v) + keep_bits_bytes

    @property
    def tile_m(self) -> int:
        return self.tiles.tile_m

    @property
    def cluster_tile_n(self) -> int:
        """Keys of a CTA; there are no clusters."""
        return self.tiles.tile_n

    def l2_group(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32) -> Int32:
        """(head, sequence) pairs that advance together; if deterministic, their dQ accumulators stay in L2."""
        if not self.deterministic:
            return cutlass.Int32(4 if self.masked or self.has_blocks else 1)
        rows = L2_GROUP_BYTES // (4 * self.dim * self.group)
        return cutlass.max(cutlass.min(rows // cutlass.max(seqlen_q, 1), LARGEST_L2_GROUP), 1)

    @property
    def cta_tile_n(self) -> int:
        return self.cluster_tile_n

    @property
    def score_threads(self) -> int:
        """Threads that hold scores: all."""
        return self.threads
