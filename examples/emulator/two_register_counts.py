"""The idle warp of a warpgroup gives back more registers than its neighbours.

Warps with little to do share a warpgroup, and each branch has a `setmaxnreg` of its own. ISA 9.7.19.5: all warps of a
warpgroup execute the same `setmaxnreg`, else the behaviour is undefined.

    warpcheck run --chip sm_100a -- examples/emulator/two_register_counts.py [--repaired]
"""

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

IDLE = 7  # the last warp of the second warpgroup


@cute.kernel
def double_kernel(x: cute.Tensor, repaired: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if cutlass.const_expr(repaired):
        if warp >= 4:
            cute.arch.setmaxregister_decrease(32)
    else:
        if warp == IDLE:
            cute.arch.setmaxregister_decrease(24)  # found here
        elif warp >= 4:
            cute.arch.setmaxregister_decrease(32)  # and here
    if warp < IDLE:
        x[thread] = 2 * x[thread]


@cute.jit
def double(x: cute.Tensor, repaired: cutlass.Constexpr):
    double_kernel(x, repaired).launch(grid=(1, 1, 1), block=(256, 1, 1), min_blocks_per_mp=1)


if __name__ == "__main__":
    x = torch.randn(224, device="cuda")
    expected = 2 * x
    double(from_dlpack(x), "--repaired" in sys.argv)
    torch.testing.assert_close(x, expected)
    print("right")
