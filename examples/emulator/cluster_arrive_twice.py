"""Every CTA of a cluster arrives early at the cluster barrier, to wait later, and a helper has a barrier in between.

ISA 9.7.13.3: an arrival is followed by a wait before the next one. Here the wait of the helper may end with the early
arrivals, before the other CTA has initialised the mbarrier that is arrived at next, and the last wait has no arrival.

    warpcheck run --chip sm_100a -- examples/emulator/cluster_arrive_twice.py [--repaired]
"""

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.jit
def initialise(barrier: cute.Pointer, thread: cutlass.Int32):
    """An mbarrier for one arrival, known to the whole cluster when it returns."""
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)  # and here
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()  # found here
    cute.arch.cluster_wait()


@cute.kernel
def signal_kernel(out: cute.Tensor, repaired: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    barrier = cutlass.memory.SmemAllocator().allocate_array(cutlass.Int64)
    if cutlass.const_expr(not repaired):
        cute.arch.cluster_arrive_relaxed()  # and here
    initialise(barrier, thread)
    if cutlass.const_expr(not repaired):
        cute.arch.cluster_wait()  # found here
    if thread == 0:
        cute.arch.mbarrier_arrive(barrier, 1 - rank)  # found here
    cute.arch.mbarrier_wait(barrier, 0)
    out[rank, thread] = 1.0


@cute.jit
def signal(out: cute.Tensor, repaired: cutlass.Constexpr):
    signal_kernel(out, repaired).launch(grid=(2, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1))


if __name__ == "__main__":
    out = torch.zeros(2, 32, device="cuda")
    signal(from_dlpack(out), "--repaired" in sys.argv)
    assert out.eq(1).all()
    print("right")
