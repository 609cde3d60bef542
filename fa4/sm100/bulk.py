"""One-dimensional bulk copies: a stretch of global memory to shared memory, and shared memory added to global."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm


def bulk_load(source: cute.Pointer, place: cute.Pointer, nbytes: int, barrier: cute.Pointer) -> None:
    """One thread: start copying `nbytes` (a multiple of 16) to shared memory; they are counted on `barrier`."""
    nvvm.cp_async_bulk_shared_cluster_global(
        place.llvm_ptr, source.llvm_ptr, barrier.llvm_ptr, Int32(nbytes).ir_value()
    )


def bulk_add(place: cute.Pointer, target: cute.Pointer, nbytes: int) -> None:
    """One thread: start adding float32 numbers in shared memory to global ones; a bulk group commits and waits."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), place.toint(), Int32(nbytes)],
    )
