"""Traced functions in device code: a call's captured tensors and block lists, and its graphs bound to a tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import jit
from ..mods.graph import Graph
from ..mods.record import ModSpec
from .arithmetic import KINDS
from .constant import Constant
from .dropout import DropoutTensors
from .fragment_coords import FragmentCoords
from .fragment_values import FragmentValues


class BlockTensors(NamedTuple):
    """The lists of one side of a block mask, as `mods.blocks.BlockLists` has them: counts (batch or 1, heads or 1,
    blocks) and lists, one axis more, int32. order: of the listing blocks, like counts."""

    counts: cute.Tensor
    lists: cute.Tensor
    full_counts: cute.Tensor
    full_lists: cute.Tensor
    order: cute.Tensor


class ModTensors(NamedTuple):
    """What fills a call's graphs: captured tensors and numbers, the score's first; and the block mask's lists.

    blocks: the lists that loops walk. of_queries: where additions to blocks of queries take turns, the blocks of keys
    of each. captured: what gradients of captured tensors are added to, see `captured`. dropout: there if there is any.
    """

    tensors: tuple
    numbers: tuple
    blocks: BlockTensors | None
    of_queries: BlockTensors | None = None
    captured: tuple | None = None
    dropout: DropoutTensors | None = None

    @staticmethod
    def of(given: tuple | None) -> ModTensors | None:
        """The record of a caller's plain tuple."""
        if given is None:
            return None
        tensors, numbers, *lists, captured, dropout = given
        sides = (None if side is None else BlockTensors(*side) for side in lists)
        dropout = None if dropout is None else DropoutTensors(*dropout)
        return ModTensors(tuple(tensors or ()), tuple(numbers or ()), *sides, captured, dropout)

    @staticmethod
    def fake(mods: ModSpec | None, backward: bool = False, is_ordered: bool = False) -> ModTensors | None:
        """Stand-ins for compilation; is_ordered: there is `of_queries`."""
        if mods is None:
            return None
        graphs = [graph for graph in (mods.score, mods.mask) if graph is not None]
        tensors = tuple(_fake_captured(tensor.dtype, tensor.rank) for graph in graphs for tensor in graph.tensors)
        numbers = tuple(KINDS[kind](0) for graph in graphs for kind in graph.numbers)

        def lists(there: bool) -> BlockTensors | None:
            return BlockTensors(*(jit.fake_tensor(Int32, rank, align=4) for rank in (3, 4, 3, 4, 3))) if there else None

        captured = _fake_gradients(mods) if backward and mods.trained else None
        dropout = DropoutTensors.fake() if mods.dropout else None
        blocks = lists(mods.block is not None), lists(is_ordered)
        return ModTensors(tensors or None, numbers or None, *blocks, captured, dropout)


# The dtypes that `mods.tensors.for_kernels` leaves or makes of others.
_STORED = {
    "float32": Float32, "float64": Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16,
    "int32": Int32, "int64": cutlass.Int64, "bool": cutlass.Uint8,
}  # fmt: skip


def _fake_captured(dtype: str, rank: int) -> cute.Tensor:
    stored = _STORED.get(dtype, Int32)
    return jit.fake_tensor(stored, max(rank, 1), contiguous=True, align=stored.width // 8)


def _fake_gradients(mods: ModSpec) -> tuple:
    graph = mods.score
    assert graph is not None
    ranks = (3 if graph.is_of_heads(scatter) else len(scatter.indices) for scatter in graph.scatters)
    return tuple(jit.fake_tensor(Float32, rank, contiguous=True, align=4) for rank in ranks)


def bind(
    mods: ModSpec | None,
    filled: ModTensors | None,
    batch: Int32,
    head: Int32,
    seqlens: tuple[Int32, Int32],
    packed: int = 1,
    rows_per_query: int | None = None,
) -> tuple[Traced | None, Traced | None]:
    """The score and the mask of a tile's sequence and head, or None; see `Traced`."""
    if mods is None or filled is None:
        return None, None
    bound, tensors, numbers = [], filled.tensors, filled.numbers
    for graph in (mods.score, mods.mask):
        if graph is None:
            bound.append(None)
            continue
        own, tensors = tensors[: len(graph.tensors)], tensors[len(graph.tensors) :]
        given, numbers = numbers[: len(graph.numbers)], numbers[len(graph.numbers) :]
        bound.append(Traced(graph, own, given, batch, head, *seqlens, packed, rows_per_query or packed))
    return bound[0], bound[1]


@dataclass(frozen=True)
class Traced(Constant):
    """A graph with what fills it in a tile: row i is query i // rows_per_query, and of `packed` heads, the first of
    which is `head`, the (i % rows_per_query)-th; of none of them where there are more rows than heads."""

    graph: Graph
    tensors: tuple
    numbers: tuple
    batch: Int32
    head: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    packed: int
    rows_per_query: int

    def at(self, places: FragmentCoords, scale: Float32 | None = None) -> FragmentValues:
        """The graph at a thread's elements. scale: what raw scores are multiplied by first."""
        return FragmentValues(self, places, scale)

    def head_of(self, row: Int32) -> Int32:
        if self.rows_per_query == 1:
            return self.head
        place = row % self.rows_per_query
        return self.head + (place if self.rows_per_query == self.packed else cutlass.min(place, self.packed - 1))

    @property
    def is_harmless(self) -> bool:
        """Whether gradients are finite on whatever pairs that are hidden or do not exist may hold."""
        return self.graph.stays_finite(self.graph.dscore, *(scatter.value for scatter in self.graph.scatters))

    @property
    def gives_numbers(self) -> bool:
        """Whether the logits of rows that do not exist are finite: their scores are, and they read captured elements of
        a row that exists."""
        return self.graph.stays_finite(self.graph.result, trusts_loads=True)
