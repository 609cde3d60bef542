"""Traced mods in device code: a call's captured tensors and block lists, and its graphs bound to a tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..mods.ir.graph import Graph
from ..mods.ir.record import ModSpec
from ..runtime import jit
from .arithmetic import KINDS
from .constant import Constant
from .dropout import DropoutTensors
from .fragment_coords import FragmentCoords
from .fragment_values import FragmentValues


class BlockTensors(NamedTuple):
    """Block lists of one side of a block mask, as in `mods.frontend.blocks.BlockLists`, int32. counts: (batch or 1,
    heads or 1, blocks). lists: one more axis. order: order of the listing blocks, shaped like counts."""

    counts: cute.Tensor
    lists: cute.Tensor
    full_counts: cute.Tensor
    full_lists: cute.Tensor
    order: cute.Tensor


class ModTensors(NamedTuple):
    """Run-time values of a call's graphs: captured tensors and numbers, those of the score first; and block lists.

    blocks: lists over which loops iterate. of_queries: key blocks of each query block, if a backward reads them too.
    captured: destinations of the gradients of captured tensors, see `bwd.captured`. dropout: None if unused.
    """

    tensors: tuple
    numbers: tuple
    blocks: BlockTensors | None
    of_queries: BlockTensors | None = None
    captured: tuple | None = None
    dropout: DropoutTensors | None = None

    @staticmethod
    def of(given: tuple | None) -> ModTensors | None:
        """Return the record of a caller's tuple."""
        if given is None:
            return None
        tensors, numbers, *lists, captured, dropout = given
        blocks, of_queries = (None if side is None else BlockTensors(*side) for side in lists)
        dropout = None if dropout is None else DropoutTensors(*dropout)
        return ModTensors(tuple(tensors or ()), tuple(numbers or ()), blocks, of_queries, captured, dropout)

    @staticmethod
    def fake(mods: ModSpec | None, backward: bool = False, is_ordered: bool = False) -> ModTensors | None:
        """Return fake arguments for compilation. is_ordered: `of_queries` is present."""
        if mods is None:
            return None
        graphs = [graph for graph in (mods.score, mods.mask) if graph is not None]
        tensors = tuple(_fake_captured(tensor.dtype, tensor.rank) for graph in graphs for tensor in graph.tensors)
        numbers = tuple(KINDS[kind](0) for graph in graphs for kind in graph.numbers)

        def lists(used: bool) -> BlockTensors | None:
            return BlockTensors(*(jit.fake_tensor(Int32, rank, align=4) for rank in (3, 4, 3, 4, 3))) if used else None

        captured = _fake_gradients(mods) if backward and mods.trained else None
        dropout = DropoutTensors.fake() if mods.dropout else None
        blocks = lists(mods.block is not None), lists(is_ordered)
        return ModTensors(tensors or None, numbers or None, *blocks, captured, dropout)


# Device dtypes, as `mods.ir.tensors.for_kernels` converts them.
_DEVICE_DTYPES = {
    "float32": Float32, "float64": Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16,
    "int32": Int32, "int64": cutlass.Int64, "bool": cutlass.Uint8,
}  # fmt: skip


def _fake_captured(dtype: str, rank: int) -> cute.Tensor:
    device_dtype = _DEVICE_DTYPES.get(dtype, Int32)
    return jit.fake_tensor(device_dtype, max(rank, 1), contiguous=True, align=device_dtype.width // 8)


def _fake_gradients(mods: ModSpec) -> tuple:
    graph = mods.score
    assert graph is not None
    ranks = (3 if graph.is_per_head(scatter) else len(scatter.indices) for scatter in graph.scatters)
    return tuple(jit.fake_tensor(Float32, rank, contiguous=True, align=4) for rank in ranks)


def bind(
    mods: ModSpec | None,
    kernel_mods: ModTensors | None,
    batch: Int32,
    head: Int32,
    seqlens: tuple[Int32, Int32],
    packed: int = 1,
    rows_per_query: int | None = None,
) -> tuple[Traced | None, Traced | None]:
    """Bind the score_mod and the mask_mod to a tile's sequence and head; None for a missing one. See `Traced`."""
    if mods is None or kernel_mods is None:
        return None, None
    bound: list[Traced | None] = []
    tensors, numbers = kernel_mods.tensors, kernel_mods.numbers
    for graph in (mods.score, mods.mask):
        if graph is None:
            bound.append(None)
            continue
        captured, tensors = tensors[: len(graph.tensors)], tensors[len(graph.tensors) :]
        scalars, numbers = numbers[: len(graph.numbers)], numbers[len(graph.numbers) :]
        bound.append(Traced(graph, captured, scalars, batch, head, *seqlens, packed, rows_per_query or packed))
    return bound[0], bound[1]


@dataclass(frozen=True)
class Traced(Constant):
    """A graph bound to a tile. Row i is query i // rows_per_query of packed head `head` + i % rows_per_query; a padding
    row if that exceeds the `packed` heads."""

    graph: Graph
    tensors: tuple
    numbers: tuple
    batch: Int32
    head: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    packed: int
    rows_per_query: int

    def at(self, coords: FragmentCoords, scale: Float32 | None = None) -> FragmentValues:
        """Return the graph's values at a thread's fragment. scale: factor of the raw scores."""
        return FragmentValues(self, coords, scale)

    def head_of(self, row: Int32) -> Int32:
        if self.rows_per_query == 1:
            return self.head
        index = row % self.rows_per_query
        return self.head + (index if self.rows_per_query == self.packed else cutlass.min(index, self.packed - 1))

    @property
    def has_finite_grads(self) -> bool:
        """Whether gradients are finite at masked pairs and at pairs that do not exist, for any values there."""
        return self.graph.stays_finite(self.graph.dscore, *(scatter.value for scatter in self.graph.scatters))

    @property
    def has_finite_logits(self) -> bool:
        """Whether logits of rows that do not exist are finite, given that their scores are, and that their loads read
        captured elements of an existing row."""
        return self.graph.stays_finite(self.graph.result, trusts_loads=True)
