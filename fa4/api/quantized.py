"""Quantisation to e4m3 and e2m1 with scales, for attention on such tensors and caches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime import nvfp4
from ..runtime.spec import MX_BLOCK
from ..torch_ops import checks, e2m1, recipes
from ..torch_ops.descales import check_scales

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Quantized(NamedTuple):
    """Numbers of 8 or 4 bits and their scales: x ~= data * scales."""

    data: Tensor
    scales: Tensor


def quantize(
    x: Tensor,
    recipe: str,
    *,
    axis: str = "head_dim",
    heads: int | None = None,
    smooth: bool = False,
    rotate: bool = False,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
) -> Quantized:
    """Round q, k or v to e4m3 or e2m1, with a scale for each group of numbers: x ~= data * scales.

    | recipe | a scale for | shape of scales | dtype |
    |---|---|---|---|
    | "tensor" | all of x | () | float32 |
    | "head" | a head of a sequence | (batch, heads) | float32 |
    | "block128" | 128 tokens of a head | (batch, ceil(seqlen / 128), heads) | float32 |
    | "mxfp8" | 32 columns of a token | (batch, seqlen, heads, head_dim / 32) | float8_e8m0fnu |
    | "mxfp8", axis="tokens" | 32 tokens of a column | (batch, ceil(seqlen / 32), heads, head_dim) | float8_e8m0fnu |
    | "nvfp4" | 16 columns of a token | (batch, seqlen, heads, head_dim / 16) | float8_e4m3fn |
    | "nvfp4", axis="tokens" | 16 tokens of a column | (batch, ceil(seqlen / 16), heads, head_dim) | float8_e4m3fn |

    A float32 scale is the largest magnitude of its group, amax, divided by 448, the largest e4m3 number; it is at least
    2^-126, and 1 for a group of zeros. An E8M0 scale follows the OCP MX specification: 2^(floor(log2(amax)) - 8), at
    least 2^-127; numbers above 448 times the scale saturate. Numbers are rounded to nearest even. A group with an inf
    or a NaN has scale NaN, so that all of it dequantises to NaN. There is no host synchronisation and no gradient.

    For mxfp8 and nvfp4, quantise q and k along head_dim, and v along tokens: each along the axis that its product sums
    over. The rows of a key/value cache have nvfp4 along head_dim, v too.

    Data of "nvfp4" is e2m1, two numbers a byte: two columns, the even one in the low half, or with axis="tokens" two
    tokens of a column, where an odd last token has a 0 beside it. A scale is amax / 6 rounded to e4m3, from 2^-9 to
    448. There is no further factor: for numbers above 2688, divide x and multiply softmax_scale (of q and k) or out (of
    v).

    Args:
        x: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim); float16, bfloat16 or float32, any
            strides. A cache: its pages may be the batch, but not with smooth.
        recipe: "tensor", "head", "block128", "mxfp8" or "nvfp4".
        axis: "head_dim" or "tokens": the axis of the blocks of "mxfp8" and "nvfp4". Packed tensors have no "nvfp4"
            along tokens.
        heads: number of heads that scales have, for "head" and "block128"; neighbouring heads share a scale.
            `heads=heads_kv` gives q the shape of scales that k has. None: one scale for each head of x.
        smooth: for k. First subtract the mean over the tokens of each sequence and head. Softmax does not change if a
            constant is added to all scores of a row, and q times the mean is one; so out stays the same, if there is no
            softcap, score_mod or learnable_sink. lse is then lower by softmax_scale * q @ mean (add it back where
            needed). The outliers of k are often alike for all tokens, and this removes them.
        rotate: for q and k, both. First multiply by an orthogonal matrix over head_dim: fixed signs, then the Hadamard
            matrix. q k^T stays the same, and outlier columns are spread over all columns. head_dim must be a power of
            two.
        cu_seqlens: (batch + 1,) int32 of a packed x. Scales of "block128" and of "mxfp8" along tokens are then
            (total // n + batch, ...) for blocks of n tokens: block j of sequence b has index cu_seqlens[b] // n + b +
            j. Not needed for "tensor", "nvfp4", and "mxfp8" along head_dim, unless smooth.
        seqused: (batch,) int32, the rows of each sequence that are used. Other rows count in no scale and become 0.

    Returns:
        data (float8_e4m3fn, shape of x; of "nvfp4" float4_e2m1fn_x2, half the columns, or along tokens ceil(seqlen / 2)
        rows) and scales, contiguous; a named tuple.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
    """
    _check(x, recipe, axis, heads, cu_seqlens, seqused)
    smooth, rotate = (checks.boolean(name, y, "a bool") for name, y in (("smooth", smooth), ("rotate", rotate)))
    needs_bounds = smooth or recipe in ("head", "block128") or (recipe, axis) == ("mxfp8", "tokens")
    if x.ndim == 3 and cu_seqlens is None and needs_bounds:
        by = "smooth" if smooth else f"recipe {recipe!r}"
        raise ValueError(f"cu_seqlens is None, expected an int32 torch.Tensor: {by} of a packed x is per sequence")
    if rotate and x.shape[-1] & (x.shape[-1] - 1):
        raise ValueError(f"x has head_dim {x.shape[-1]}, expected a power of two with rotate")
    data, scales = recipes.quantized(x, recipe, heads, axis, cu_seqlens, seqused, smooth=smooth, rotate=rotate)
    if recipe == "nvfp4":
        return Quantized(recipes.as_e2m1(data), scales)
    return Quantized(data, recipes.as_e8m0(scales) if recipe == "mxfp8" else scales)


def _check(
    x: Tensor, recipe: str, axis: str, heads: int | None, cu_seqlens: Tensor | None, seqused: Tensor | None
) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}, expected a torch.Tensor")
    checks.check_plain("x", x, x)
    checks.check_dtype("x", x, _DTYPES)
    if recipe not in recipes.RECIPES:
        raise ValueError(f"recipe is {recipe!r}, expected {_listed(recipes.RECIPES)}")
    if axis not in recipes.AXES:
        raise ValueError(f"axis is {axis!r}, expected {_listed(recipes.AXES)}")
    if axis == "tokens" and recipe not in ("mxfp8", "nvfp4"):
        raise ValueError(f"axis is 'tokens' with recipe {recipe!r}, expected recipe 'mxfp8' or 'nvfp4'")
    if x.ndim not in (3, 4) or x.shape[-1] == 0:
        axes = "(batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
        raise ValueError(f"x has shape {checks.shown(x)}, expected {axes}")
    if x.ndim == 3 and (recipe, axis) == ("nvfp4", "tokens"):
        padded = "(batch, seqlen, heads, head_dim) for recipe 'nvfp4' along tokens"
        raise ValueError(f"x has shape {checks.shown(x)}, expected {padded}")
    if heads is not None:
        if recipe not in ("head", "block128"):
            raise ValueError(f"heads is given with recipe {recipe!r}, expected recipe 'head' or 'block128'")
        if checks.count("heads", heads) == 0 or x.shape[-2] % heads:
            raise ValueError(f"heads is {heads}, expected a divisor of x's {x.shape[-2]} heads")
    columns = {"mxfp8": MX_BLOCK, "nvfp4": nvfp4.COLUMNS}.get(recipe, 1)
    if axis == "head_dim" and x.shape[-1] % columns:
        raise ValueError(f"x has head_dim {x.shape[-1]}, expected a multiple of {columns} for recipe {recipe!r}")
    _check_bounds(x, cu_seqlens, "x")
    if seqused is not None:
        if x.ndim == 3 and cu_seqlens is None:
            raise ValueError("seqused is given without cu_seqlens, expected both for a packed x")
        checks.check_int32("seqused", seqused, x, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, "x")


def _check_bounds(x: Tensor, cu_seqlens: Tensor | None, name: str) -> None:
    if cu_seqlens is None:
        return
    if x.ndim == 4:
        raise ValueError(
            f"cu_seqlens is given with {name} of shape {checks.shown(x)}, expected (total, heads, head_dim)"
        )
    checks.check_int32("cu_seqlens", cu_seqlens, x, None, name)


def _listed(names: tuple[str, ...]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


def dequantize(
    data: Tensor,
    scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    cu_seqlens: Tensor | None = None,
    seqlen: int | None = None,
) -> Tensor:
    """Return data * scales of `fa4.quantize`, computed in float32 and rounded to dtype.

    The dtype and shape of scales tell the recipe. With E8M0 scales the product is exact in float32, and in bfloat16.
    E2M1 numbers times their scales are exact in float16, too.

    Args:
        data: float8_e4m3fn, (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim); or float4_e2m1fn_x2
            with half as many columns, for 16 columns a scale, or half as many rows, for 16 tokens a scale.
        scales: as `fa4.quantize` returns them.
        dtype: float16, bfloat16, float32 or float64.
        cu_seqlens: (batch + 1,) int32 of packed data.
        seqlen: of float4_e2m1fn_x2 along tokens, the number of tokens, if it is odd; None: two a byte.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device.
    """
    if not isinstance(data, Tensor):
        raise TypeError(f"data is a {type(data).__name__}, expected a torch.Tensor")
    checks.check_plain("data", data, data)
    checks.check_dtype("data", data, (recipes.E4M3, nvfp4.DTYPE))
    if dtype not in checks.DTYPES:
        raise TypeError(f"dtype is {dtype}, expected float16, bfloat16, float32 or float64")
    if data.ndim not in (3, 4):
        axes = "(batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
        raise ValueError(f"data has shape {checks.shown(data)}, expected {axes}")
    _check_bounds(data, cu_seqlens, "data")
    along_tokens = data.dtype == nvfp4.DTYPE and data.ndim == 4 and _last_size(scales) == data.shape[-1]
    if seqlen is not None and not along_tokens:
        raise ValueError(
            "seqlen is given, expected None: only data of recipe 'nvfp4' along tokens has no other sign of it"
        )
    if data.dtype == nvfp4.DTYPE and not along_tokens:
        checks.check_e2m1_scales("scales", scales, "data", data)
        return nvfp4.values(data.view(torch.uint8), scales, dtype)
    if along_tokens:
        most = nvfp4.PER_BYTE * data.shape[1]
        tokens = most if seqlen is None else checks.count("seqlen", seqlen)
        if nvfp4.bytes_of(tokens) != data.shape[1]:
            raise ValueError(
                f"seqlen is {tokens}, expected {max(most - 1, 0)} or {most} with data {checks.shown(data)}"
            )
        e2m1.check_scales_of_tokens("scales", scales, "data", data, tokens)
        return nvfp4.values_of_tokens(data.view(torch.uint8), scales, tokens, dtype)
    checks.check_plain("scales", scales, data, like="data")
    if data.ndim == 3 and cu_seqlens is None and scales.ndim > 1 and scales.shape[:-1] != data.shape[:-1]:
        raise ValueError(
            "cu_seqlens is None, expected an int32 torch.Tensor: these scales of packed data are per sequence"
        )
    all_heads, batch = data.shape[-2], data.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    divisors = tuple(n for n in range(1, all_heads + 1) if all_heads % n == 0)
    check_scales("scales", scales, "data", data, batch, divisors)
    return recipes.dequantized(data, scales, dtype, cu_seqlens)


def _last_size(scales: Tensor) -> int | None:
    """Return the last size of scales, None if they are no such tensor."""
    return scales.shape[-1] if isinstance(scales, Tensor) and scales.ndim == 4 else None
