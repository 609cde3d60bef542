"""Run-time arguments of the scores kernel, the context of its roles, and the work of a CTA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...pipeline.kernel import Context
from ...pipeline.tma import TmaMap
from .config import ScoresConfig


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
    sees. begin: row of k of the first key, without pages. blocks: key blocks of the CTA from `first_block` on, 0 if
    these rows see none of them."""

    sequence: Int32
    first: Int32
    stop: Int32
    count: Int32
    begin: Int32
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
        return Keys(sequence, first, stop, count, tensors.k_begin[sequence], work.first_block, blocks)
