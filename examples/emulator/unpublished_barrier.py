"""A thread initialises an mbarrier, another one starts a copy that completes it, with `bar.sync` between the two.

That orders the threads, and not the copy's unit, which works by the asynchronous proxy. ISA 9.7.13.4: the thread that
initialised has to execute `fence.mbarrier_init` (or a proxy fence) before the barrier is handed over.

    warpcheck run --chip sm_100a -- examples/emulator/unpublished_barrier.py [--repaired]
"""

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

ELEMENTS = 256


@cute.kernel
def copy_kernel(x: cute.Tensor, out: cute.Tensor, repaired: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    tile = smem.allocate_tensor(cutlass.Float32, cute.make_layout(ELEMENTS), byte_alignment=128)
    barrier = smem.allocate_array(cutlass.Int64)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)  # and here
        if cutlass.const_expr(repaired):
            cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread == 32:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, ELEMENTS * 4)
        copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32, num_bits_per_copy=ELEMENTS * 32)
        cute.copy(copy, x, tile, mbar_ptr=barrier)  # found here
    cute.arch.mbarrier_wait(barrier, 0)
    for i in cutlass.range_constexpr(ELEMENTS // 64):
        out[i * 64 + thread] = tile[i * 64 + thread]


@cute.jit
def copy(x: cute.Tensor, out: cute.Tensor, repaired: cutlass.Constexpr):
    copy_kernel(x, out, repaired).launch(grid=(1, 1, 1), block=(64, 1, 1))


if __name__ == "__main__":
    x = torch.randn(ELEMENTS, device="cuda")
    out = torch.zeros_like(x)
    copy(from_dlpack(x), from_dlpack(out), "--repaired" in sys.argv)
    torch.testing.assert_close(out, x)
    print("right")
