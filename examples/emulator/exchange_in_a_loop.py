"""Two warps exchange a value per step through shared memory, with one barrier a step.

The barrier orders the write of a step before the reads of the same step. Nothing orders these reads before the write of
the next step: a warp that is ahead overwrites what its partner has yet to read (ISA 8.7.1).

    warpcheck run --chip sm_100a -- examples/emulator/exchange_in_a_loop.py [--repaired]
"""

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

THREADS, STEPS = 64, 6


@cute.kernel
def largest_kernel(x: cute.Tensor, out: cute.Tensor, repaired: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    slots = 2 if cutlass.const_expr(repaired) else 1
    layout = cute.make_layout((slots, THREADS), stride=(THREADS, 1))
    exchange = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, layout)
    largest = x[0, thread]
    for step in cutlass.range(STEPS):
        largest = cute.arch.fmax(largest, x[step, thread])
        exchange[step % slots, thread] = largest  # found here
        cute.arch.sync_threads()
        largest = cute.arch.fmax(largest, exchange[step % slots, thread ^ 32])  # and here
    out[thread] = largest


@cute.jit
def find_largest(x: cute.Tensor, out: cute.Tensor, repaired: cutlass.Constexpr):
    largest_kernel(x, out, repaired).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


if __name__ == "__main__":
    x = torch.randn(STEPS, THREADS, device="cuda")
    out = torch.zeros(THREADS, device="cuda")
    find_largest(from_dlpack(x), from_dlpack(out), "--repaired" in sys.argv)
    expected = x.amax(0)
    torch.testing.assert_close(out, torch.maximum(expected, expected.roll(32)))
    print("right")
