"""Accumulation of gradients of captured tensors in kernels.

Nearly every (query, key) pair contributes to an element that only sequence and head select (a slope, a temperature, a
number). Each thread adds its sum of an iteration to its own float, one per key block and query head: no thread waits,
and the order of additions is fixed. torch sums these floats afterwards (`bwd.captured`). Gradients of other elements
(of a bias) are added in place; the order is fixed there only if a single pair contributes to an element.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.constant import Constant
from ...core.fragment_values import FragmentValues
from ...core.rows import Rows, first_row_block
from ...core.vec_io import add_unless_zero
from ...mods.ir.graph import Scatter
from ..variant import BackwardOptions


@dataclass(frozen=True)
class CapturedGrads(Constant):
    """Destinations of a thread's gradients. targets: per scatter of the score's graph, the tensor, or (heads_q, key
    blocks, threads) if `Graph.is_per_head`. block: key block, counted over all sequences. thread: index among the
    threads with scores."""

    targets: tuple
    block: Int32
    thread: Int32

    @staticmethod
    def of(
        targets: tuple | None, cfg: BackwardOptions, batch: Int32, keys: Rows, extent: Int32, n_block: Int32
    ) -> CapturedGrads | None:
        """For key block `n_block` of a sequence. keys: its rows, in a tensor of `extent` rows.
        None if no captured tensor needs gradients."""
        if not targets:
            return None
        first = first_row_block(batch, keys, extent, cfg.cta_tile_n, 1, cfg.varlen)
        return CapturedGrads(targets, first + n_block, Int32(cute.arch.thread_idx()[0]))

    def add(self, values: FragmentValues, p: list[list[Float32]]) -> None:
        """Add an iteration's gradients, after `values.score_grads`. p: P of each element; add nothing where it is 0."""

        def value(scatter: Scatter, r: int, c: int) -> Float32:
            x, p_element = values.value_at(scatter.value, r, c), p[r][c]
            return x if values.traced.has_finite_grads else Float32(cutlass.select_(p_element == 0.0, Float32(0.0), x))

        rows, cols = range(len(values.coords.rows)), range(values.coords.count)
        for scatter, target in zip(values.traced.graph.scatters, self.targets):
            varies_by_row, varies_by_col = values.index_varies(scatter.indices)
            if values.traced.graph.is_per_head(scatter):
                self._add_to_own(values, target, [_sum([value(scatter, r, c) for c in cols]) for r in rows])
                continue
            if varies_by_row and varies_by_col:
                groups = [[(r, c)] for c in cols for r in rows]
            elif varies_by_col:
                groups = [[(r, c) for r in rows] for c in cols]
            else:
                groups = [[(r, c) for c in cols] for r in rows]
            for group in groups:
                total = _sum([value(scatter, *coord) for coord in group])
                index = values.indices_at(scatter.indices, target, *group[0])
                index = index if len(index) > 1 else index[0]
                add_unless_zero(target.iterator + cute.crd2idx(index, target.layout), total)

    def _add_to_own(self, values: FragmentValues, target: cute.Tensor, row_sums: list[Float32]) -> None:
        if values.traced.rows_per_query == 1:
            row_sums = [_sum(row_sums)]
        for row, total in zip(values.coords.rows, row_sums):
            index = values.traced.head_of(row), self.block, self.thread
            add_unless_zero(target.iterator + cute.crd2idx(index, target.layout), total)


def _sum(values: list[Float32]) -> Float32:
    """Sum neighbours first, to avoid a long chain of dependent additions."""
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]
