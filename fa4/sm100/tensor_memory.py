"""Size of tensor memory, and its addresses as operands; see `tmem`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.dsl import cutlass, llvm

if TYPE_CHECKING:
    from cutlass import Int32

COLUMNS = 512
LANES = 128


def pointer(address: Int32 | int):
    """LLVM pointer of an address, as tcgen05 operations take it."""
    return llvm.inttoptr(llvm.PointerType.get(6), cutlass.Int32(address).ir_value())
