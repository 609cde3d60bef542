"""The smallest of kernels, compiled for a chip, and which chip the code in it is for."""

import struct
import tempfile
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from warpcheck.host.modules import fatbins_in

from fa4.runtime import jit
from fa4.runtime.device import Chip


@cute.kernel
def _scale(a: cute.Tensor, x: cutlass.Float32):
    i, _, _ = cute.arch.thread_idx()
    if i < a.shape[0]:
        a[i, 0] = a[i, 0] * x


@cute.jit
def _host(a: cute.Tensor, x: cutlass.Float32, stream):
    _scale(a, x).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def scale_kernel(chip: Chip) -> Any:
    """What `jit.compile_kernel` returns."""
    tensor = jit.fake_tensor(cutlass.Float32, 2)
    return jit.compile_kernel(_host, tensor, cutlass.Float32(0), jit.current_stream(), chip=chip)


def chip_in_code(chip: Chip) -> int:
    """10 * major + minor of the machine code that the compiler made for `chip`."""
    kernel = scale_kernel(chip)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernel.o")
        kernel.export_to_c(str(path), "kernel")
        (binary,) = fatbins_in(path.read_bytes())
    header_bytes = struct.unpack_from("<IHH", binary)[2]
    kind = struct.unpack_from("<H", binary, header_bytes)[0]
    assert kind == 2, "the first part of the binary is not machine code"
    return struct.unpack_from("<I", binary, header_bytes + 28)[0]
