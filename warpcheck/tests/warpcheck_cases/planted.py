"""A small pipeline in CuTe DSL, and the mistakes that can be planted in it.

One producer warp copies rows to shared memory and hands them to the consumer warps through two mbarriers; the
consumers double them. Each mistake is what a tired author makes.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

ROWS, COLUMNS = 6, 32


@cute.kernel
def pipeline(source: cute.Tensor, result: cute.Tensor, mistake: cutlass.Constexpr[str]):
    lane, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    row = smem.allocate_tensor(cutlass.Float32, cute.make_layout(COLUMNS))
    barriers = smem.allocate_array(cutlass.Int64, 2)
    full, free = barriers, barriers + 1
    if lane == 0:
        cute.arch.mbarrier_init(full, 32)
        cute.arch.mbarrier_init(free, 33 if const_expr(mistake == "deadlock") else 32)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if lane < 32:
        for i in range(ROWS):
            cute.arch.mbarrier_wait(free, (i + 1) % 2)
            row[lane] = source[i, lane]
            cute.arch.mbarrier_arrive(full)
    else:
        for i in range(ROWS):
            if const_expr(mistake != "missing wait"):
                cute.arch.mbarrier_wait(full, i % 2)
            if const_expr(mistake == "early release"):
                cute.arch.mbarrier_arrive(free)
            target = i + 1 if const_expr(mistake == "out of bounds") else i
            result[target, lane - 32] = row[lane - 32] * 2.0
            if const_expr(mistake != "early release"):
                cute.arch.mbarrier_arrive(free)


@cute.jit
def run_pipeline(source: cute.Tensor, result: cute.Tensor, mistake: cutlass.Constexpr[str]):
    pipeline(source, result, mistake).launch(grid=(1, 1, 1), block=(64, 1, 1))


@cute.kernel
def unwaited_copy(source: cute.Tensor, result: cute.Tensor, waits: cutlass.Constexpr[bool]):
    lane, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    row = smem.allocate_tensor(cutlass.Float32, cute.make_layout(COLUMNS), byte_alignment=16)
    atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), cutlass.Float32, num_bits_per_copy=32)
    cute.copy(atom, cute.local_tile(source, (1,), (lane,)), cute.local_tile(row, (1,), (lane,)))
    cute.arch.cp_async_commit_group()
    if const_expr(waits):
        cute.arch.cp_async_wait_group(0)
    result[lane] = row[lane]


@cute.jit
def run_unwaited_copy(source: cute.Tensor, result: cute.Tensor, waits: cutlass.Constexpr[bool]):
    unwaited_copy(source, result, waits).launch(grid=(1, 1, 1), block=(COLUMNS, 1, 1))


@cute.kernel
def sum_kernel(source: cute.Tensor, result: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    cute.arch.atomic_add(result.iterator.llvm_ptr, source[row, lane])


@cute.jit
def run_sum(source: cute.Tensor, result: cute.Tensor):
    """All elements into one, in any order."""
    sum_kernel(source, result).launch(grid=(source.shape[0], 1, 1), block=(COLUMNS, 1, 1))
