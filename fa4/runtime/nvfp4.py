"""NVFP4: numbers of 4 bits (E2M1), and an E4M3 scale for each 16 columns of a row, or 16 tokens of a column.

    x ~= number * scale, exactly a number of at most six significant bits

Bits of a number: sign, two of the exponent, one of the significand; the magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A
byte holds two columns, or two tokens of a column, the even one in its low half. torch has a dtype for such bytes
(`DTYPE`) and can view and copy them, but not index them by a tensor. So these functions take the bytes as uint8.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

DTYPE = torch.float4_e2m1fn_x2  # an element is a byte, of two columns
SCALE_DTYPE = torch.float8_e4m3fn
COLUMNS = 16  # with the same scale, or tokens
PER_BYTE = 2  # columns or tokens
BYTES_OF_NUMBER = 1 / PER_BYTE + 1 / COLUMNS  # with its part of the scale
LARGEST = 6.0
LARGEST_SCALE, SMALLEST_SCALE = 448.0, 2.0**-9

# Magnitudes between two numbers, rounded to the even one, whose significand bit is 0: a tie rounds down to it (codes 0,
# 2, 4, 6 below), or up.
TIES_DOWN, TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


def columns_of(x: Tensor) -> int:
    """Return the columns of q, k or v, whatever its dtype."""
    return PER_BYTE * x.shape[-1] if x.dtype is DTYPE else x.shape[-1]


def bytes_of(tokens: int) -> int:
    """Return the rows of bytes that hold the numbers of so many tokens, two a byte."""
    return -(-tokens // PER_BYTE)


def groups_of(tokens: int) -> int:
    """Return the rows of scales of so many tokens."""
    return -(-tokens // COLUMNS)


def values(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return number * scale, (..., columns), rounded to dtype, of codes (..., columns / 2) uint8 and scales (...,
    columns / 16) float8_e4m3fn."""
    numbers = _numbers(torch.stack((codes & 15, codes >> 4), -1).flatten(-2))
    return (numbers.unflatten(-1, (-1, COLUMNS)) * scales.float()[..., None]).flatten(-2).to(dtype)


def values_of_tokens(codes: Tensor, scales: Tensor, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return number * scale, (batch, tokens, heads, columns), of codes (batch, `bytes_of(tokens)`, heads, columns)
    uint8 and scales (batch, `groups_of(tokens)`, heads, columns) float8_e4m3fn."""
    numbers = _numbers(torch.stack((codes & 15, codes >> 4), 2).flatten(1, 2)[:, :tokens])
    return (numbers * scales.float().repeat_interleave(COLUMNS, 1)[:, :tokens]).to(dtype)


def _numbers(code: Tensor) -> Tensor:
    """Return the float32 numbers of codes, one an element."""
    code = code.int()
    magnitude = code & 7
    doubled = torch.where(magnitude < 4, magnitude, (2 | magnitude & 1) << (magnitude >> 1).clamp(min=1) - 1)
    return torch.where(code < 8, 0.5, -0.5) * doubled


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (..., columns / 2) uint8 and scales (..., columns / 16) float8_e4m3fn of x (..., columns).

    A scale is the largest magnitude of its group divided by 6, rounded to e4m3, in its range of positive numbers; NaN
    for a group with an inf or a NaN. Numbers are x / scale rounded to nearest even; magnitudes above 6 become 6.
    """
    groups = x.float().unflatten(-1, (x.shape[-1] // COLUMNS, COLUMNS))
    magnitude = groups.abs()
    largest = torch.where(magnitude.isnan(), torch.inf, magnitude).amax(-1)  # a maximum keeps inf on every device
    # (By a number, a GPU would multiply by its rounded inverse.)
    scales = (largest / torch.full_like(largest, LARGEST)).clamp(SMALLEST_SCALE, LARGEST_SCALE)
    scales = torch.where(largest.isfinite(), scales, torch.nan).to(SCALE_DTYPE)
    relative = magnitude / scales.float()[..., None]
    code = (groups < 0).to(torch.uint8) << 3
    for bound in TIES_DOWN:
        code += relative > bound
    for bound in TIES_UP:
        code += relative >= bound
    code = code.flatten(-2)
    return code[..., ::2] | code[..., 1::2] << 4, scales


def quantised_along_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales, as `values_of_tokens` takes them, of x (batch, tokens, heads, columns). Numbers behind
    the last token are 0."""
    tokens = x.shape[1]
    columns = functional.pad(x.transpose(1, -1), (0, -tokens % COLUMNS))
    codes, scales = (y.transpose(1, -1) for y in quantised(columns))
    # (contiguous() would keep the strides of an empty tensor)
    codes, scales = (y.clone(memory_format=torch.contiguous_format) for y in (codes[:, : bytes_of(tokens)], scales))
    return codes, scales
