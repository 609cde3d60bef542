"""Quantisation to e4m3, and to e2m1 (`runtime.nvfp4`): recipes, their scales, and the layout of scales beside a tensor.

A scale is a factor on 8-bit numbers: x ~= data * scale. Tensors are padded, (batch, seqlen, heads, head_dim), or
packed, (total, heads, head_dim). All functions are torch operators without a synchronisation, so torch.compile fuses
them.

Blocks of packed tensors are counted within each sequence. Block j of sequence b has index
cu_seqlens[b] // block + b + j. This index follows from cu_seqlens alone, and total // block + batch entries are enough:
ceil(n / block) <= n // block + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..runtime import nvfp4
from ..runtime.spec import E8M0_ONE, MX_BLOCK

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
EIGHT_BIT = frozenset((E4M3, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))
# A call with one of these is a call of `low_precision`, which takes e4m3 and e2m1 alone and names the others.
LOW = EIGHT_BIT | {nvfp4.DTYPE}
RECIPES = ("tensor", "head", "block128", "mxfp8", "nvfp4")
AXES = ("head_dim", "tokens")
TOKENS_OF_BLOCK = 128
LARGEST = 448.0  # of e4m3
_SMALLEST_SCALE = 2.0**-126
_EXPONENT_OF_LARGEST = 8  # emax of e4m3 in the MX specification
_MANTISSA, _NON_FINITE = 23, 255  # bits of a float32 significand; exponent field of inf and NaN


def token_blocks(shape: Sequence[int], batch: int, block: int) -> tuple[int, ...]:
    """Return the leading sizes of scales with one entry per `block` tokens, of a padded or packed tensor."""
    if len(shape) == 4:
        return shape[0], -(-shape[1] // block)
    return (shape[0] // block + batch,)


def sequence_of_rows(total: int, cu_seqlens: Tensor) -> Tensor:
    """Return the sequence of each packed row, (total,) int64; the number of sequences for rows past the last one."""
    rows = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, rows, right=True) - 1


def _entries(total: int, cu_seqlens: Tensor, block: int | None) -> tuple[int, Tensor]:
    """Return how many scales packed rows have, and the index of each row's; one past the last for rows of no
    sequence. block: None means one scale per sequence."""
    batch, sequence = cu_seqlens.shape[0] - 1, sequence_of_rows(total, cu_seqlens)
    if block is None:
        return batch, sequence
    first, count = cu_seqlens.long()[sequence], total // block + batch
    rows = torch.arange(total, device=cu_seqlens.device)
    index = first // block + sequence + (rows - first) // block
    return count, torch.where(sequence == batch, count, index)


def used_rows(shape: Sequence[int], cu_seqlens: Tensor | None, seqused: Tensor | None) -> Tensor | None:
    """Return which rows belong to a sequence and are used: bool (batch, seqlen) or (total,); None if all do."""
    if cu_seqlens is None:
        return None if seqused is None else torch.arange(shape[1], device=seqused.device) < seqused[:, None]
    sequence = sequence_of_rows(shape[0], cu_seqlens)
    used = sequence < cu_seqlens.shape[0] - 1
    if seqused is None:
        return used
    ends = torch.cat((cu_seqlens[:-1] + seqused, cu_seqlens[-1:]))
    return used & (torch.arange(shape[0], device=cu_seqlens.device) < ends[sequence])


def mean_of_tokens(x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> Tensor:
    """Return the mean over a sequence's used tokens, per head and column, as a row for each row of x (broadcastable).
    Rows that are not used are 0 in x."""
    if cu_seqlens is None:
        count = torch.full((), x.shape[1], device=x.device) if seqused is None else seqused[:, None, None, None]
        return x.sum(1, keepdim=True) / count.clamp(min=1)
    sequence = sequence_of_rows(x.shape[0], cu_seqlens)
    count = cu_seqlens.diff() if seqused is None else seqused
    sums = x.new_zeros(cu_seqlens.shape[0], *x.shape[1:]).index_add_(0, sequence, x)
    return (sums / functional.pad(count, (0, 1)).clamp(min=1)[:, None, None])[sequence]


def rotated(x: Tensor) -> Tensor:
    """Return x D H for float32 x: D has fixed signs, H is the orthogonal Hadamard matrix of the last axis's size, a
    power of two. Sums of two numbers, in log2(head_dim) steps: no product that a GPU may round to TF32."""
    columns = torch.arange(x.shape[-1], device=x.device)
    signs = 1 - 2 * ((columns * 2654435761 >> 16) & 1)  # bits of a multiplicative hash
    x, shape, step = x * signs, x.shape, 1
    while step < shape[-1]:
        a, b = x.reshape(*shape[:-1], -1, 2, step).unbind(-2)
        x, step = torch.stack((a + b, a - b), -2), 2 * step
    return x.reshape(shape) * shape[-1] ** -0.5


def _largest(x: Tensor, cu_seqlens: Tensor | None, block: int | None) -> Tensor:
    """Return the largest entries over rows: of each sequence, or of each `block` tokens. x >= 0, with rows in its first
    axis (packed) or its second."""
    if cu_seqlens is not None:
        count, index = _entries(x.shape[0], cu_seqlens, block)
        index = index.view(-1, *[1] * (x.ndim - 1)).expand_as(x)
        return x.new_zeros(count + 1, *x.shape[1:]).scatter_reduce_(0, index, x, "amax")[:-1]
    if block is None:
        return x.amax(1) if x.shape[1] else x.new_zeros(x.shape[0], *x.shape[2:])
    padding = (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % block)
    return functional.pad(x, padding).unflatten(1, (-1, block)).amax(2)


def _scales(largest: Tensor, power_of_two: bool) -> Tensor:
    """Return float32 scales of groups of numbers with these largest magnitudes: largest / 448, 1 for a group of zeros,
    NaN for a group with an inf or a NaN. power_of_two: the next power of two at or above."""
    scales = (largest / LARGEST).clamp(min=_SMALLEST_SCALE)
    if power_of_two:
        fraction = (1 << _MANTISSA) - 1
        scales = ((scales.view(torch.int32) + fraction) & ~fraction).view(torch.float32)
    scales = torch.where(largest == 0, 1.0, scales)
    return torch.where(largest.isfinite(), scales, torch.nan)


def _e8m0(largest: Tensor) -> Tensor:
    """Return E8M0 scales as uint8: 2^(floor(log2(largest)) - 8), at least 2^-127; NaN for a group with an inf or a NaN.

    Source: OCP Microscaling Formats (MX) v1.0, section 6.3.
    """
    exponent = largest.contiguous().view(torch.int32) >> _MANTISSA
    scales = torch.where(exponent == _NON_FINITE, _NON_FINITE, (exponent - _EXPONENT_OF_LARGEST).clamp(min=0))
    return scales.to(torch.uint8)


def _of_e8m0(scales: Tensor) -> Tensor:
    """Return E8M0 scales, or their bits as uint8, as float32 numbers."""
    bits = scales.view(torch.uint8).int()
    smallest, nan = 1 << (_MANTISSA - 1), 0x7FC00000  # 2^-127 is subnormal in float32
    return torch.where(bits == 0, smallest, torch.where(bits == _NON_FINITE, nan, bits << _MANTISSA)).view(
        torch.float32
    )


library = torch.library.Library("fa4", "FRAGMENT")
library.define("as_e8m0(Tensor bits) -> Tensor")
library.impl("as_e8m0", lambda bits: bits.clone().view(E8M0), "CompositeExplicitAutograd")
torch.library.register_fake("fa4::as_e8m0", lambda bits: bits.new_empty(bits.shape, dtype=E8M0), lib=library)


library.define("as_e2m1(Tensor bits) -> Tensor")
library.impl("as_e2m1", lambda bits: bits.clone().view(nvfp4.DTYPE), "CompositeExplicitAutograd")
torch.library.register_fake("fa4::as_e2m1", lambda bits: bits.new_empty(bits.shape, dtype=nvfp4.DTYPE), lib=library)


def as_e8m0(bits: Tensor) -> Tensor:
    """Return uint8 bits as E8M0 numbers. In compiled code by an operator: torch's code generators lack the dtype."""
    return torch.ops.fa4.as_e8m0(bits) if torch.compiler.is_compiling() else bits.view(E8M0)


def as_e2m1(bits: Tensor) -> Tensor:
    """Return uint8 bits as pairs of E2M1 numbers, likewise."""
    return torch.ops.fa4.as_e2m1(bits) if torch.compiler.is_compiling() else bits.view(nvfp4.DTYPE)


def quantized(
    x: Tensor,
    recipe: str,
    heads: int | None = None,
    axis: str = "head_dim",
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    *,
    power_of_two: bool = False,
    smooth: bool = False,
    rotate: bool = False,
    square: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return data and scales of checked arguments: see `fa4.quantize`. E8M0 scales and E2M1 data are uint8 here.
    power_of_two: see `_scales`. square: of "mxfp8", a block of 32 tokens and 32 columns has one scale. Rows that are
    not used become 0, and count in no scale."""
    x = x.detach().float()
    used = used_rows(x.shape, cu_seqlens, seqused)
    if used is not None:
        x = torch.where(used[..., None, None], x, 0.0)
    if smooth:
        x = x - mean_of_tokens(x, cu_seqlens, seqused)
        x = x if used is None else torch.where(used[..., None, None], x, 0.0)
    if rotate:
        x = rotated(x)
    if recipe == "nvfp4":
        return nvfp4.quantised(x) if axis == "head_dim" else nvfp4.quantised_along_tokens(x)
    magnitude = x.abs()
    magnitude = torch.where(magnitude.isnan(), torch.inf, magnitude)  # a maximum keeps inf on every device
    if recipe == "mxfp8":
        of_blocks, along_columns = magnitude, axis == "head_dim"
        if along_columns or square:
            padding = 0, -x.shape[-1] % MX_BLOCK
            of_blocks = functional.pad(magnitude, padding).unflatten(-1, (-1, MX_BLOCK)).amax(-1)
        if square or not along_columns:
            of_blocks = _largest(of_blocks, cu_seqlens, MX_BLOCK)
        scales = _e8m0(of_blocks)
        if square and along_columns:
            scales = _of_tokens(scales, x.shape, MX_BLOCK, cu_seqlens)
        elif square:
            scales = scales.repeat_interleave(MX_BLOCK, -1)[..., : x.shape[-1]]
    elif recipe == "tensor":
        scales = _scales(magnitude.amax() if magnitude.numel() else magnitude.new_zeros(()), power_of_two)
    else:
        of_rows = magnitude.amax(-1)
        if heads is not None and heads != x.shape[-2]:
            of_rows = of_rows.unflatten(-1, (heads, -1)).amax(-1)
        block = None if recipe == "head" else TOKENS_OF_BLOCK
        scales = _scales(_largest(of_rows, cu_seqlens, block), power_of_two)
    data = (x / spread(scales, x.shape, cu_seqlens)).clamp(-LARGEST, LARGEST).to(E4M3)
    return data.contiguous(), scales


def expected_shapes(shape: Sequence[int], batch: int, heads: Sequence[int]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the shapes that scales may have beside a tensor of this shape, by recipe; "tokens" is mxfp8 along tokens.
    heads: the numbers of heads that scales may have."""
    lead, blocks = shape[:-1], token_blocks(shape, batch, TOKENS_OF_BLOCK)
    columns = shape[-1] // MX_BLOCK
    return {
        "tensor": ((), (1,)),
        "head": tuple((batch, n) for n in heads),
        "block128": tuple((*blocks, n) for n in heads),
        "mxfp8": ((*lead, columns),) if columns * MX_BLOCK == shape[-1] else (),
        "tokens": ((*token_blocks(shape, batch, MX_BLOCK), *shape[-2:]),),
    }


def ones(shape: Sequence[int], batch: int, axis: str, device: torch.device) -> Tensor:
    """Return scales of recipe "mxfp8" that are 1, as uint8, of a tensor of this shape."""
    (of_blocks,) = expected_shapes(shape, batch, ())["mxfp8" if axis == "head_dim" else "tokens"]
    return torch.full(of_blocks, E8M0_ONE, dtype=torch.uint8, device=device)


def spread(scales: Tensor, shape: Sequence[int], cu_seqlens: Tensor | None = None) -> Tensor:
    """Return scales as float32 factors that broadcast to a tensor of this shape, whose `expected_shapes`
    has theirs. E8M0 scales may be uint8."""
    is_mx = scales.dtype != torch.float32
    factors = _of_e8m0(scales) if is_mx else scales
    if factors.ndim < 2:
        return factors.view(())
    if is_mx and scales.shape[-1] != shape[-1]:
        return factors.repeat_interleave(MX_BLOCK, -1)
    if not is_mx:
        factors = factors.repeat_interleave(shape[-2] // scales.shape[-1], -1)[..., None]
    if len(shape) == 4 and scales.ndim == 2:
        return factors[:, None]
    by_sequence = cu_seqlens is not None and not is_mx and scales.shape[0] == cu_seqlens.shape[0] - 1
    block = None if by_sequence else MX_BLOCK if is_mx else TOKENS_OF_BLOCK
    return _of_tokens(factors, shape, block, cu_seqlens)


def _of_tokens(entries: Tensor, shape: Sequence[int], block: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return entries of blocks of tokens, or with None of packed sequences, as an entry of each token of a tensor of
    this shape; for rows of no sequence any finite entry, as their numbers are 0."""
    if len(shape) == 3:
        assert cu_seqlens is not None
        _, index = _entries(shape[0], cu_seqlens, block)
        return torch.cat((entries, entries.new_ones(1, *entries.shape[1:])))[index]
    assert block is not None
    return entries.repeat_interleave(block, 1)[:, : shape[1]]


def dequantized(data: Tensor, scales: Tensor | None, dtype: torch.dtype, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return data * scales, computed in float32 and rounded once to dtype."""
    as_dtype = data.to(dtype)
    if scales is None:
        return as_dtype
    factors = spread(scales, data.shape, cu_seqlens)
    if torch.finfo(dtype).bits > 16:
        return as_dtype * factors
    # 16 bits hold an e4m3 number exactly. The multiplication is in float32 and writes 16 bits: no copy in float32. A
    # factor without dimensions would be rounded to 16 bits first.
    return torch.mul(as_dtype, factors if factors.ndim else factors.view(1), out=torch.empty_like(as_dtype))
