"""Compile-time configuration of the scores kernel, and the context of its roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...core.constant import Constant
from ...pipeline.kernel import Context
from ...pipeline.smem import Tile
from ...pipeline.tma import TmaMap
from ..wgmma import ROWS, Major, SmemOperand, Wgmma

BARRIER_BYTES = 512  # upper bound for all mbarriers
MOST_STAGES = 4
# Number of consumers -> registers per thread of (consumers, load warp).
REGS = {1: (240, 40), 2: (240, 24), 3: (160, 32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresConfig(Constant):
    """The fields are the compile key.

    dtype: of q and k. heads: a multiple of 8. tokens: rows of one consumer; tokens * heads are the columns of its
    product, at most 256. tile_n: keys of a block, a multiple of 64. page_size: 0 without pages.

    Raises:
        ValueError: the tiles do not fit in shared memory.
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    heads: int
    tokens: int
    consumers: int
    tile_n: int
    page_size: int
    has_k_descale: bool
    smem_bytes: int
    ctas: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(f"{self.rows} rows of {self.heads} heads leave no room for two key blocks")

    def sharers(self, name: str) -> int:
        """CTAs that load tiles of `name` together."""
        return 1

    @property
    def regs(self) -> tuple[int, int]:
        """Registers per thread of (consumers, load warp)."""
        return REGS[self.consumers]

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return self.consumers * self.tokens

    @property
    def columns(self) -> int:
        """Columns of a consumer's product: (row, head)."""
        return self.tokens * self.heads

    @property
    def q_tile(self) -> Tile:
        """Queries of one consumer."""
        return Tile(self.columns, self.head_dim, self.dtype.width)

    @property
    def k_tile(self) -> Tile:
        return Tile(self.tile_n, self.head_dim, self.dtype.width, pieces=self.pieces)

    @property
    def pieces(self) -> int:
        """Parts of a key block in different pages."""
        return self.tile_n // self.page_size if 0 < self.page_size < self.tile_n else 1

    @property
    def stages(self) -> int:
        free = self.smem_bytes - BARRIER_BYTES - self.consumers * self.q_tile.nbytes
        return min(free // self.k_tile.nbytes, MOST_STAGES)

    @property
    def kq(self) -> Wgmma:
        """S^T = K Q^T: 64 keys by the consumer's (row, head) pairs. So the sum over heads is within four threads."""
        k = SmemOperand(self.k_tile, Major.K, self.stages, self.k_tile.nbytes)
        q = SmemOperand(self.q_tile, Major.K, self.consumers, self.q_tile.nbytes)
        return Wgmma(self.dtype, n=self.columns, k=self.head_dim, b=q, a=k)

    @property
    def parts(self) -> int:
        """Products of a key block."""
        return self.tile_n // ROWS


class ScoresTensors(NamedTuple):
    """Tensors of a launch.

    q: (rows * heads, head_dim). k: (key rows, head_dim), pages one after the other. Both as uint8 if e4m3. weights:
    (rows, heads) float32. scores: (rows of the launch, columns) float32. k_descale: (key rows,) float32, or None.
    q_begin: (batch + 1,), k_begin: (batch,), counts: (rows,), the keys that each row sees, sequences: (rows,), the
    index of each row's sequence, all int32. page_table: (batch, pages) int32, or None.
    """

    q: cute.Tensor
    k: cute.Tensor
    weights: cute.Tensor
    scores: cute.Tensor
    k_descale: cute.Tensor | None
    q_begin: cute.Tensor
    k_begin: cute.Tensor
    counts: cute.Tensor
    sequences: cute.Tensor
    page_table: cute.Tensor | None


class Range(NamedTuple):
    """Numbers of a launch. first, stop: rows. tiles: of rows. splits: CTAs for the keys of a tile. split_blocks: key
    blocks of each."""

    first: Int32
    stop: Int32
    tiles: Int32
    splits: Int32
    split_blocks: Int32


class Maps(NamedTuple):
    """TMA maps of (rows, columns)."""

    q: TmaMap
    k: TmaMap


class ScoresArguments(NamedTuple):
    """Run-time arguments of the kernel."""

    maps: Maps
    tensors: ScoresTensors
    range: Range


@dataclass(frozen=True, slots=True)
class ScoresContext(Context):
    """Context of the roles."""

    args: ScoresArguments
    cfg: ScoresConfig  # type: ignore[assignment]  # no attention problem, so no `Variant`


class Work(NamedTuple):
    """Rows and key blocks of a CTA. first: its first row. sequence, last_sequence: those of its rows, inclusive."""

    first: Int32
    first_block: Int32
    sequence: Int32
    last_sequence: Int32

    @staticmethod
    def here(context: ScoresContext) -> Work:
        """Return the work of this CTA. Last rows come first: with a causal mask these see the most keys."""
        tensors, launch = context.args.tensors, context.args.range
        index = Int32(cute.arch.block_idx()[0])
        tile = launch.tiles - 1 - index % launch.tiles
        first = launch.first + tile * context.cfg.rows
        last = cutlass.min(first + context.cfg.rows, launch.stop) - 1
        batch = tensors.k_begin.shape[0]
        last_sequence = cutlass.min(tensors.sequences[last], batch - 1)
        return Work(first, index // launch.tiles * launch.split_blocks, tensors.sequences[first], last_sequence)


class Keys(NamedTuple):
    """Keys of one sequence for a CTA. first, stop: rows of the CTA in the sequence. count: most keys that one of them
    sees. blocks: key blocks of the CTA from `first_block` on, 0 if these rows see none of them."""

    sequence: Int32
    first: Int32
    stop: Int32
    count: Int32
    first_block: Int32
    blocks: Int32

    @staticmethod
    def of(context: ScoresContext, work: Work, sequence: Int32) -> Keys:
        tensors, launch, cfg = context.args.tensors, context.args.range, context.cfg
        first = cutlass.max(tensors.q_begin[sequence], work.first)
        stop = cutlass.min(tensors.q_begin[sequence + 1], cutlass.min(work.first + cfg.rows, launch.stop))
        last = cutlass.max(stop - 1, work.first)  # of a sequence without rows: any row
        count = Int32(cutlass.select_(stop > first, tensors.counts[last], Int32(0)))
        blocks = cute.ceil_div(count, cfg.tile_n) - work.first_block
        blocks = cutlass.max(cutlass.min(blocks, launch.split_blocks), 0)
        return Keys(sequence, first, stop, count, work.first_block, blocks)
