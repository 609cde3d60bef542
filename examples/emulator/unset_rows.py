"""Rows past the end of a tensor are not loaded, and are worked through like the others: how often the last loop of
their threads turns depends on shared memory that nobody has written.

Nothing of such a row is stored, and the count is at most PARTS whatever was there, so that the result is right; only
the time of those turns is left to chance. ISA 8.2.6: such memory holds an unknown value.

    warpcheck run --chip sm_100a -- examples/emulator/unset_rows.py [--repaired]
"""

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

PARTS, TILE = 4, 8


@cute.kernel
def sum_kernel(x: cute.Tensor, out: cute.Tensor, repaired: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    row, part = thread % TILE, thread // TILE
    smem = cutlass.memory.SmemAllocator()
    tile = smem.allocate_tensor(cutlass.Float32, cute.make_layout((PARTS, TILE)), byte_alignment=16)
    if row < x.shape[1]:
        tile[part, row] = x[part, row]
    elif cutlass.const_expr(repaired):
        tile[part, row] = -cutlass.Float32.inf
    cute.arch.sync_threads()
    last = cutlass.Int32(-1)
    for s in cutlass.range_constexpr(PARTS):
        if tile[s, row] != -cutlass.Float32.inf:
            last = s
    total = cutlass.Float32(0.0)
    for s in cutlass.range(last + 1, unroll=1):
        total += tile[s, row]
    if part == 0 and row < x.shape[1]:
        out[row] = total


@cute.jit  # found here: of the loop above, the compiler gives this line as the place
def sum_rows(x: cute.Tensor, out: cute.Tensor, repaired: cutlass.Constexpr):
    sum_kernel(x, out, repaired).launch(grid=(1, 1, 1), block=(PARTS * TILE, 1, 1))


if __name__ == "__main__":
    x = torch.randn(PARTS, 5, device="cuda")
    out = torch.zeros(5, device="cuda")
    sum_rows(from_dlpack(x), from_dlpack(out), "--repaired" in sys.argv)
    torch.testing.assert_close(out, x.sum(0))
    print("right")
