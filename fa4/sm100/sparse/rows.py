"""Rows of K and V that a thread of the load role gathers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...bwd.device.list_work import SparseWork
from ...bwd.lists import SparseContext
from ...core.constant import Constant
from ...pipeline.tma import tma_gather

ROWS = 4  # of an instruction


@dataclass(frozen=True)
class RowNumbers(Constant):
    """Numbers of the rows that this thread loads: four neighbours of a list for each of its groups."""

    values: cute.Tensor
    groups: int

    @staticmethod
    def of(groups: int) -> RowNumbers:
        return RowNumbers(cute.make_rmem_tensor(groups * ROWS, Int32), groups)

    def load(self, context: SparseContext, work: SparseWork, firsts: list[Int32]) -> None:
        """Load the numbers. firsts: of each group, the index in the list of its first row."""
        heads = cute.size(context.args.tensors.k, mode=[1])
        for group, first in enumerate(firsts):
            for i in range(ROWS):
                self.values[group * ROWS + i] = work.key_row(context, first + i) * heads + work.head

    def copy(self, other: RowNumbers) -> None:
        for i in range(self.groups * ROWS):
            self.values[i] = other.values[i]

    def of_group(self, group: int) -> list[Int32]:
        return [self.values[group * ROWS + i] for i in range(ROWS)]


@cute.jit
def gather_if(
    exists: Boolean,
    descriptor: Int64,
    rows: list[Int32],
    column: Int32,
    address: Int32,
    barrier: cute.Pointer,
    ctas: cutlass.Constexpr[int],
):
    """`tma_gather` of the threads that have rows."""
    if exists:
        tma_gather(descriptor, rows, column, address, barrier, ctas)
