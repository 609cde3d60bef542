"""Gradients of captured tensors, as kernels add them up.

An element that is chosen by sequence and head alone (a slope, a temperature, a number) gets its gradient from nearly
every pair. Each thread adds what it has of a step to a float of its own, one for each block of keys and query head:
always in the order of its steps, and nobody waits. torch sums these afterwards (`bwd.captured`). The gradient of every
other element (of a bias) is added where it lies; if one pair alone has it, the order is always the same there too.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..mods.graph import Scatter
from .constant import Constant
from .fragment_values import FragmentValues
from .rows import first_row_block
from .sequence import Rows
from .vec_io import add_unless_zero


@dataclass(frozen=True)
class CapturedGrads(Constant):
    """Where a thread adds gradients: of each scatter of a score's graph its tensor, or (heads_q, blocks of keys,
    threads) if `Graph.is_of_heads`. block: of keys, among those of all sequences. thread: of those that have scores."""

    targets: tuple
    block: Int32
    thread: Int32

    @staticmethod
    def of(targets: tuple | None, cfg, batch: Int32, keys: Rows, extent: Int32, n_block: Int32) -> CapturedGrads | None:
        """For a block of `cfg.cta_tile_n` keys of a sequence; keys: its rows, in a tensor of `extent`. None if nothing
        asks for gradients."""
        if not targets:
            return None
        first = first_row_block(batch, keys, extent, cfg.cta_tile_n, 1, cfg.varlen)
        return CapturedGrads(targets, first + n_block, Int32(cute.arch.thread_idx()[0]))

    def add(self, of: FragmentValues, weights: list[list[Float32]]) -> None:
        """What a step has; after `of.slopes`. weights: P of each element; where it is 0 nothing is added."""

        def value(scatter: Scatter, r: int, c: int) -> Float32:
            x, weight = of.value_at(scatter.value, r, c), weights[r][c]
            return x if of.of.is_harmless else Float32(cutlass.select_(weight == 0.0, Float32(0.0), x))

        lines, across = range(len(of.places.lines)), range(of.places.count)
        for scatter, target in zip(of.of.graph.scatters, self.targets):
            along_lines, along_across = of.index_varies(scatter.indices)
            if of.of.graph.is_of_heads(scatter):
                self._add_to_own(of, target, [_sum([value(scatter, r, c) for c in across]) for r in lines])
                continue
            if along_lines and along_across:
                groups = [[(r, c)] for c in across for r in lines]
            elif along_across:
                groups = [[(r, c) for r in lines] for c in across]
            else:
                groups = [[(r, c) for c in across] for r in lines]
            for group in groups:
                total = _sum([value(scatter, *at) for at in group])
                place = of.indices_at(scatter.indices, target, *group[0])
                place = place if len(place) > 1 else place[0]
                add_unless_zero(target.iterator + cute.crd2idx(place, target.layout), total)

    def _add_to_own(self, of: FragmentValues, target: cute.Tensor, of_lines: list[Float32]) -> None:
        if of.of.rows_per_query == 1:
            of_lines = [_sum(of_lines)]
        for row, total in zip(of.places.lines, of_lines):
            place = of.of.head_of(row), self.block, self.thread
            add_unless_zero(target.iterator + cute.crd2idx(place, target.layout), total)


def _sum(values: list[Float32]) -> Float32:
    """Of neighbours first: no long chain of additions that wait for each other."""
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]
