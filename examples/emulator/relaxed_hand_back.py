"""A warp stores a tile by a bulk copy, waits until the copy has read it, and gives its place back by a relaxed arrival.

The next load overwrites the place. ISA 8.8: only a release pattern, here `mbarrier.arrive` with `.release`, orders what
a thread has done or waited for before what others do after the wait; a relaxed arrival orders nothing. In practice the
copy is over when its thread goes on, so that this is a letter.

    warpcheck run --chip sm_100a -- examples/emulator/relaxed_hand_back.py [--repaired]
"""

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from cutlass.cutlass_dsl import dsl_user_op

ELEMENTS = 256


@dsl_user_op
def arrive(barrier: cute.Pointer, how: str, *, loc=None, ip=None):
    text = f"mbarrier.arrive.{how}.cta.shared::cta.b64 _, [$0];"
    address = barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    llvm.inline_asm(None, [address], text, "r", has_side_effects=True, loc=loc, ip=ip)


@cute.kernel
def turns_kernel(x: cute.Tensor, first: cute.Tensor, second: cute.Tensor, repaired: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    tile = smem.allocate_tensor(cutlass.Float32, cute.make_layout(ELEMENTS), byte_alignment=128)
    barriers = smem.allocate_array(cutlass.Int64, 2)
    full, empty = barriers, barriers + 1
    if thread == 0:
        cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init(empty, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread < 32:
        for i in cutlass.range_constexpr(ELEMENTS // 32):
            tile[i * 32 + thread] = cutlass.Float32(1.0)  # and here
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if thread == 0:
            store = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), cutlass.Float32, num_bits_per_copy=ELEMENTS * 32)
            cute.copy(store, tile, first)  # and here
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            arrive(empty, "release" if repaired else "relaxed")
    elif thread == 32:
        cute.arch.mbarrier_wait(empty, 0)
        cute.arch.mbarrier_arrive_and_expect_tx(full, ELEMENTS * 4)
        load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32, num_bits_per_copy=ELEMENTS * 32)
        cute.copy(load, x, tile, mbar_ptr=full)  # found here
    cute.arch.mbarrier_wait(full, 0)
    for i in cutlass.range_constexpr(ELEMENTS // 64):
        second[i * 64 + thread] = tile[i * 64 + thread]


@cute.jit
def turns(x: cute.Tensor, first: cute.Tensor, second: cute.Tensor, repaired: cutlass.Constexpr):
    turns_kernel(x, first, second, repaired).launch(grid=(1, 1, 1), block=(64, 1, 1))


if __name__ == "__main__":
    x = torch.randn(ELEMENTS, device="cuda")
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    turns(*map(from_dlpack, (x, first, second)), "--repaired" in sys.argv)
    torch.testing.assert_close(first, torch.ones_like(x))
    torch.testing.assert_close(second, x)
    print("right")
