"""A small kernel in CuTe DSL whose machine code the tests read: a loop of exponentials, shared memory and a wait."""

from __future__ import annotations

from pathlib import Path

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from warpcheck.host.modules import entries, fatbins_in
from warpcheck.timing.sass.code import cubin_in, embedded_ptx


@cute.kernel
def _kernel(source: cute.Tensor, target: cute.Tensor, steps: Int32):
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    row = smem.allocate_tensor(Float32, cute.make_layout(128), 16)
    barrier = cute.recast_ptr(smem.allocate(8, 8), dtype=Int64)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 128)
    cute.arch.sync_threads()
    total = Float32(0.0)
    value = source[thread]
    for step in cutlass.range(steps, unroll=1):
        row[thread] = value
        cute.arch.mbarrier_arrive(barrier)
        cute.arch.mbarrier_wait(barrier, step % 2)
        value = cute.math.exp2(row[(thread + 1) % 128], fastmath=True) - value
        total += value
    target[thread] = total


@cute.jit
def launch(source: cute.Tensor, target: cute.Tensor, steps: Int32):
    _kernel(source, target, steps).launch(grid=(1, 1, 1), block=(128, 1, 1))


def exported(chip: str, directory: Path) -> Path:
    """The object file of the kernel for a chip like "sm_90a"."""
    gmem = cute.AddressSpace.gmem
    row = cute.runtime.make_fake_compact_tensor(Float32, (128,), stride_order=(0,), memspace=gmem)
    function = cute.compile(
        launch, row, row, Int32(4), options=f"--enable-tvm-ffi --gpu-arch {chip} --generate-line-info"
    )
    path = directory / "kernel.o"
    function.export_to_c(str(path), "kernel")
    return path


def compiled(chip: str, directory: Path) -> tuple[str, bytes, str]:
    """(PTX, cubin, entry) for a chip like "sm_90a". The directory is for files in between."""
    (binary,) = fatbins_in(exported(chip, directory).read_bytes())
    cubin = cubin_in(binary)
    ptx = embedded_ptx(cubin)
    assert ptx is not None
    return ptx, cubin, entries(ptx)[0]
