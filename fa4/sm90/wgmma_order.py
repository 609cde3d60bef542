"""Order of a wgmma and the instructions around it."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ..core.vec_io import bits


def wait(pending: int) -> None:
    """Whole warpgroup: wait until at most `pending` of its latest wgmma groups are unfinished."""
    warpgroup.wait_group(pending)


def settle(a: cute.Tensor) -> None:
    """Write the registers of A here. Without it the compiler may compute some of them between the fence of the next
    product and the product."""
    packed = cute.recast_tensor(a, Int32)
    for i in range(cute.size(packed)):
        packed[i] = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[packed[i]])


def pin(*values: Float32) -> None:
    """Keep the arithmetic that produces these values before the following instructions.

    ptxas treats a wgmma wait as free and moves arithmetic behind it, so arithmetic that should overlap a product runs
    after it. ptxas does not move an instruction with a side effect. So this tests for a bit pattern that no arithmetic
    produces (a special NaN) and traps on it.
    """
    tests = "".join(
        f"setp.eq{'.or' * (i > 0)}.b32 p, {{$r{i}}}, 0x7fc0fa40{', p' * (i > 0)}; " for i in range(len(values))
    )
    cute.arch.inline_ptx(f"{{ .reg .pred p; {tests}@p trap; }}", read_only_args=[bits(value) for value in values])
