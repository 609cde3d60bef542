"""2^x for P in e4m3, for a share of the elements: a line between powers of two, without the special-function unit.

The numbers of e4m3 are 6 to 12 percent apart. So 2^f on [0, 1) is taken as the line 1 + f. A float's bits are that line
already: n in the exponent field, f in the significand. So x, in fixed-point notation with n + 15 before the point, is a
float16 number. It comes from one multiply-add and one conversion: a subnormal float16 number has an integer as its
bits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..runtime.spec import LINE_SHIFT
from .vec_io import floats_of_f16x2

_FRACTION_BITS = 6  # of the line: with its 5 bits before the point, all that a subnormal float16 number holds
_UNIT = 2.0 ** (_FRACTION_BITS - 24)  # 1.0 of the fixed-point number, in subnormal float16 numbers


class Line:
    """2^(s * scale + offset) for e4m3, as float16 numbers, by a line between powers of two. Below 2^-15 it is 0; at
    most 2^16. has_packed_fma: of the chip."""

    def __init__(self, scale: Float32, offset: Float32, has_packed_fma: bool = True):
        self.has_packed_fma = has_packed_fma
        self.scale = scale * _UNIT
        self.offset = offset * _UNIT + (15 + LINE_SHIFT) * _UNIT

    def pair(self, s: Float32, t: Float32) -> Int32:
        """Return two results, packed."""
        if self.has_packed_fma:
            x, y = cute.arch.fma_packed_f32x2((s, t), (self.scale, self.scale), (self.offset, self.offset))
        else:
            x, y = s * self.scale + self.offset, t * self.scale + self.offset
        return cute.arch.inline_ptx(
            f"""{{
            .reg .b32 fixed;
            cvt.rn.relu.f16x2.f32 fixed, {{$r1}}, {{$r0}};
            shl.b32 {{$w0}}, fixed, {10 - _FRACTION_BITS};
            }}""",
            write_only_types=[Int32],
            read_only_args=[x, y],
        )

    def value(self, s: Float32) -> Float32:
        """Return one result, as a float."""
        return floats_of_f16x2(self.pair(s, s))[0]


def in_sum(line: Line, line_max: Float32, row_max: Float32, largest_p: Float32) -> Float32:
    """Return what the sum of P has of a row's largest P. line_max: largest score of the row whose P is on the line."""
    return Float32(cutlass.select_(line_max == row_max, line.value(row_max), largest_p))


def is_in_share(index: int, share: int, of: int = 16) -> bool:
    """True if element `index` is one of the `share` of every `of`, which are spread evenly."""
    return (index + 1) * share // of > index * share // of
