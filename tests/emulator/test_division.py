"""How CuTe DSL divides integers: `//` rounds down, and `%` has the dividend's sign, as PTX's rem.s32 has. But numbers
that come from a coordinate tensor are divided towards zero, in PTX already: see `core.arithmetic.apply`, which minds.
"""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

import cutlass.cute as cute
from cutlass import Int32

from fa4.emulator import emulate
from fa4.runtime import jit
from fa4.runtime.device import chip_of

DIVISORS = (3, 8, -3)


@cute.kernel
def divide(x: cute.Tensor, out: cute.Tensor, divisor: Int32):
    thread = cute.arch.thread_idx()[0]
    a, here = x[thread], thread - 16  # loaded, and made of what the compiler knows the range of
    coordinate = cute.make_identity_tensor((1, 64))[0, thread][1] - 16
    for i, b in enumerate((*DIVISORS, divisor)):
        out[i, 0, thread] = a // b
        out[i, 1, thread] = a % b
        out[i, 2, thread] = here // b
        out[i, 3, thread] = here % b
        out[i, 4, thread] = coordinate // b


@cute.jit
def launch(x: cute.Tensor, out: cute.Tensor, divisor: Int32, stream):
    divide(x, out, divisor).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def test_quotients_round_down_and_remainders_have_the_dividends_sign():
    x, out = torch.arange(-16, 16, dtype=torch.int32), torch.zeros(4, 5, 32, dtype=torch.int32)
    with emulate("sm_90a"):
        stand_ins = jit.fake_tensor(Int32, 1, align=4), jit.fake_tensor(Int32, 3, align=4), Int32(0)
        compiled = jit.compile_kernel(launch, *stand_ins, jit.current_stream(), chip=chip_of(x.device))
        compiled(x, out, -5)
    for row, b in zip(out, (*DIVISORS, -5)):
        assert torch.equal(row[0], x // b) and torch.equal(row[2], x // b), b
        assert torch.equal(row[1], torch.fmod(x, b)) and torch.equal(row[3], torch.fmod(x, b)), b
        assert torch.equal(row[4], torch.div(x, b, rounding_mode="trunc")), b
