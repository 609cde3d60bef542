"""What the generated code of the portable kernels depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
from cutlass import Int32

from ..bwd.blocks import Placement, RowBlocks
from ..core.mask import Window
from ..core.variant import Variant
from .tiles import LARGEST_L2_GROUP, SHARED_BYTES, BackwardTiles, ForwardTiles, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Variant):
    """Everything the generated code depends on; its fields are the compile key."""

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
        """The shape of a launch of `ctas` blocks."""
        return dict(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=self.tiles.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    def window(self, left: Int32, right: Int32) -> Window:
        return Window(left if self.has_left else None, right if self.has_right else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardConfig(Config):
    """packed: heads of a group that are rows of one tile: all or 1. split: the keys of a tile are shared among blocks;
    out and lse have a leading axis of parts and are float32, and there is no sink. fixed_parts: each of a number of
    blocks that is the same for all tiles."""

    ctas: ClassVar[int] = 1
    persistent: ClassVar[bool] = False
    snake: ClassVar[bool] = False

    packed: int = 1
    split: bool = False
    fixed_parts: bool = False

    @property
    def rows(self) -> int:
        """Of a work tile."""
        return self.tiles.tile_m

    @property
    def tile_n(self) -> int:
        return self.tiles.tile_n


@dataclass(frozen=True, slots=True)
class Fragments(Placement):
    """A `Placement` of a block's dQ as the warps' accumulators hold it (`tensor_core`): the i-th value of every thread,
    then the next, so that an addition of a warp covers 128 contiguous bytes. warps: their grid over rows and columns.
    """

    warps: tuple[int, int]

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        column, (down, across) = first + within, self.warps
        warp = row // 16 % down + column // 8 % across * down
        thread = 32 * warp + row % 8 * 4 + column % 8 // 2
        repetition = row // (16 * down) + column // (8 * across) * (self.tile_m // (16 * down))
        value = 4 * repetition + row // 8 % 2 * 2 + column % 2
        return value * (32 * down * across) + thread


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardConfig(Config):
    """The rows of a tile are those of all heads of a group."""

    ctas: ClassVar[int] = 1
    descending: ClassVar[bool] = False

    @property
    def row_blocks(self) -> RowBlocks:
        """What the kernels around the main one depend on."""
        return RowBlocks(
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            self.tiles.tile_m,
            Fragments(self.tiles.tile_m, self.dim, self.tiles.warps_q),
            self.varlen,
            self.has_sink,
            self.has_dlse,
            packed=self.group,
            semaphores=1 if self.deterministic else 0,
            list_rows=self.mods.block[0] * self.group if self.ordered_by_lists else 0,
        )

    @property
    def smem_bytes(self) -> int:
        words = self.tiles.words_bytes if self.has_dropout else 0
        return self.tiles.smem_bytes(self.head_dim, self.head_dim_v) + words

    @property
    def tile_m(self) -> int:
        return self.tiles.tile_m

    @property
    def cluster_tile_n(self) -> int:
        """Keys of a CTA."""
        return self.tiles.tile_n

    def l2_group(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32) -> Int32:
        """Pairs that advance together; in a deterministic problem their sums of dQ stay in L2."""
        if not self.deterministic:
            return Int32(4 if self.masked or self.has_blocks else 1)
        rows = SHARED_BYTES // (4 * padded(self.head_dim) * self.group)
        return cutlass.max(cutlass.min(rows // cutlass.max(seqlen_q, 1), LARGEST_L2_GROUP), 1)

    @property
    def cta_tile_n(self) -> int:
        return self.cluster_tile_n

    @property
    def score_threads(self) -> int:
        """Threads that have scores."""
        return self.threads
