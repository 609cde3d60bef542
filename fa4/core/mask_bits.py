"""Mask bits: one bit per unmasked element of 32 neighbours. An element costs a bit test instead of comparisons."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32


def apply_mask(x: list[Float32], first: Int32 | None, stop: Int32) -> list[Float32]:
    """Set neighbouring elements outside [first, stop) to -inf; no lower bound if `first` is None."""
    masked = []
    for column in range(0, len(x), 32):
        bits = mask_bits(first, stop, column)
        masked += [apply_mask_unless(bits, i, value) for i, value in enumerate(x[column : column + 32])]
    return masked


def mask_bits(first: Int32 | None, stop: Int32, column: int) -> Int32:
    """Return a word whose bit i is set if first <= column + i < stop; no lower bound if `first` is None."""
    bits = low_bits(stop - column)
    return bits if first is None else bits & ~low_bits(first - column)


def apply_mask_unless(bits: Int32, i: int, x: Float32) -> Float32:
    """Return x if bit i is set, else -inf."""
    return Float32(cutlass.select_(is_unmasked(bits, i), x, -Float32.inf))


def is_unmasked(bits: Int32, i: int) -> Boolean:
    """Whether bit i is set."""
    return (bits & (1 << i if i < 31 else -(1 << 31))) != 0


def low_bits(count: Int32) -> Int32:
    """Return a word with the lowest `count` bits set: none if count <= 0, all if count >= 32."""
    # PTX shifts clamp: 1 << 32 is 0, so minus one gives all ones.
    shifted = cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(1), cutlass.max(count, 0)]
    )
    return shifted - 1
