"""Scales of bfloat16 queries whose products take float16: those with 8-bit rows, which become float16.

A row is divided by the power of two that brings its largest element to between 2^14 and 2^15; scores are multiplied by
it later, as float32. Elements down to 2^-29 of the largest stay exact, the others have an error of at most 2^-40 of it:
far below the float32 rounding of the sums. e4m3 and int8 are exact in float16, and their conversion takes a quarter
of the instructions of that to bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.vec_io import as_float, bits, pack_half

_ONE = 1 << 23  # step of a float's exponent field
_LARGEST = 14  # power of two of a row's largest scaled element


def largest(words: Iterable[Int32]) -> Float32:
    """Return the largest magnitude of pairs of bfloat16."""
    pair = functools.reduce(_max_pair, (word & 0x7FFF7FFF for word in words))
    return cute.arch.fmax(*_floats(pair))


def scale_of(row_max: Float32) -> tuple[Float32, Float32]:
    """Return the scale of a row with this largest magnitude, and its inverse."""
    exponent = bits(row_max) & (0xFF * _ONE)
    exponent = cutlass.max(cutlass.min(exponent, 254 * _ONE), 20 * _ONE)  # of infinity; its inverse is a float
    scale = as_float(exponent - _LARGEST * _ONE)
    return scale, as_float(254 * _ONE - bits(scale))


def scaled(words: Iterable[Int32], inverse: Float32, dtype: type[cutlass.Numeric]) -> list[Int32]:
    """Multiply pairs of bfloat16 and round them to `dtype`."""
    pairs = [_floats(word) for word in words]
    return [pack_half(low * inverse, high * inverse, dtype) for low, high in pairs]


def _floats(word: Int32) -> tuple[Float32, Float32]:
    """The two bfloat16 of a word."""
    return as_float(word << 16), as_float(word & -0x10000)


def _max_pair(a: Int32, b: Int32) -> Int32:
    return cute.arch.inline_ptx("max.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])
