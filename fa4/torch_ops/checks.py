"""Checks of the public functions' arguments: every user-facing error is raised here, before anything runs."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import warnings
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..runtime import dispatch, env, nvfp4
from ..runtime.spec import AttentionInputs, Flags
from ..runtime.torch_internals import carries_tangent

WindowSize = tuple[int | None, int | None]


class Options(NamedTuple):
    """Options of a call besides its tensors and lengths, as the caller wrote them."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: WindowSize = (None, None)
    softcap: float = 0.0
    deterministic: bool | None = None
    backend: str = "auto"


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def call(
    packed: bool, inputs: AttentionInputs, options: Options, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> tuple[AttentionInputs, Flags]:
    """Check a call and return the operator's arguments. `inputs`: tensors and lengths as the caller passed them.
    dtypes: those that q, k and v may have."""
    # (No _replace below: the compiler of torch 2.8 does not know it.)
    q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k = inputs
    check_tensors(packed, q, k, v, dtypes)
    call_flags = flags(q, k, v, sink, options)
    if packed:
        bounds = check_int32("cu_seqlens_q", cu_seqlens_q, q, None).shape[0]
        check_int32("cu_seqlens_k", cu_seqlens_k, q, bounds)
    batch = bounds - 1 if packed else q.shape[0]
    for name, seqused in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if seqused is not None:
            check_int32(name, seqused, q, batch)
    if packed:
        max_seqlen_q = max_seqlen("max_seqlen_q", max_seqlen_q, q.shape[0])
        max_seqlen_k = max_seqlen("max_seqlen_k", max_seqlen_k, k.shape[0])
    else:
        max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    return AttentionInputs(q, k, v, sink, *lengths), call_flags


def shown(x: Tensor, first: int | None = None, rest: str = "") -> str:
    """Format a shape, (2, 7, 4, 64); with `first`, only the leading sizes and then `rest`."""
    sizes = [str(n) for n in x.shape[:first]] + ([rest] if rest else [])
    return f"({', '.join(sizes)})"


def check_tensors(packed: bool, q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Check padded or packed q, k, v."""
    ndim, axes = (3, "(total, heads, head_dim)") if packed else (4, "(batch, seqlen, heads, head_dim)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor")
        if x.layout is not torch.strided:
            raise TypeError(
                f"{name} has layout {x.layout}, expected torch.strided (for lengths, flash_attn_varlen_func)"
            )
        if len(x.shape) != ndim:
            raise ValueError(f"{name} has {len(x.shape)} dimensions, shape {shown(x)}, expected {ndim}: {axes}")
        check_like(name, x, q, "q", dtypes=dtypes)
    if q.shape[-2] == 0 or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"q has {q.shape[-2]} heads, expected a positive multiple of k's {k.shape[-2]}")
    if k.shape[-1] != q.shape[-1] or not (packed or k.shape[0] == q.shape[0]):
        rows = "total_k" if packed else f"{q.shape[0]}, *"
        raise ValueError(f"k has shape {shown(k)}, expected ({rows}, *, {q.shape[-1]}) to go with q {shown(q)}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v has shape {shown(v)}, expected {shown(k, -1, '*')} to go with k {shown(k)}")
    if not (packed or torch.compiler.is_compiling()):
        warn_of_axes(q, k)


_warned_of_axes = False
_PACKAGE = __name__.partition(".")[0] + "."


def warn_of_axes(q: Tensor, k: Tensor, by_flex: bool = False) -> None:
    """Warn once, at the caller's line, if heads and rows of q and k, (batch, seqlen, heads, head_dim), seem swapped:
    both have more than one row and more heads than rows, and k has over 128 heads, or 64 for small head_dim and batch
    (a large batch may be image windows). by_flex: the caller passed transposed tensors."""
    global _warned_of_axes
    (batch, rows_q, heads_q, dim), (_, rows, heads, _) = q.shape, k.shape
    most = 64 if dim <= 64 and batch <= 256 else 128
    if _warned_of_axes or not (heads > max(most, rows) and heads_q > rows_q and min(rows, rows_q) > 1):
        return
    _warned_of_axes = True
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    names, repair = ("q", "k", "fa4"), "call q.transpose(1, 2), likewise k and v"
    axes = "(batch, seqlen, heads, head_dim)", "(batch, heads, seqlen, head_dim)"
    if by_flex:
        names, repair = ("query", "key", "fa4.flex_attention"), "call fa4.flash_attn_func"
        q, k, axes = q.transpose(1, 2), k.transpose(1, 2), axes[::-1]
    text = f"{names[0]} has shape {shown(q)} and {names[1]} {shown(k)}, which {names[2]} takes for {axes[0]}: {heads} "
    warnings.warn(f"{text}heads of {rows} keys. If they are {axes[1]}, {repair}. Said once.", stacklevel=level)


def refuse_nested(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse nested tensors that are not jagged: they have no shape to check. Querying it is an internal error of
    torch; querying strides in C++ aborts the process."""
    try:
        if not (q.is_nested or k.is_nested or v.is_nested):
            return
    except AttributeError:  # not a tensor: other checks report it
        return
    for name, x in (("q", q), ("k", k), ("v", v)):
        if getattr(x, "is_nested", False) and x.layout is torch.strided:
            raise TypeError(
                f"{name} is a nested tensor of layout torch.strided, expected layout torch.jagged: "
                "torch.nested.nested_tensor(tensors, layout=torch.jagged)"
            )


def check_like(
    name: str, x: Tensor, q: Tensor, like: str, any_dtype: bool = False, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> None:
    """Check dtype (one of `dtypes`), device and last axis of a strided or jagged tensor. like: the caller's name of q.
    any_dtype: x may have another dtype than q."""
    check_dtype(name, x, dtypes)
    if x.dtype != q.dtype and not any_dtype:
        raise TypeError(f"{name} has dtype {x.dtype}, expected {q.dtype} like {like}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, expected {q.device} like {like}")
    if x.shape[-1] == 0:
        raise ValueError(f"{name} has shape {shown(x)}, expected a last axis of at least 1")
    step = (x if x.layout is torch.strided else x.values()).stride(-1)
    if step != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} has stride {step} on its last axis, expected 1: call {name}.contiguous()")


def flags(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, options: Options) -> Flags:
    """Return the operator's flags; checks everything but q, k, v themselves."""
    softmax_scale, causal, window_size, softcap, deterministic, backend = options
    if sink is not None:
        check_sink("learnable_sink", sink, q)
    for name, x in (("q", q), ("k", k), ("v", v), ("learnable_sink", sink)):
        if x is not None and carries_tangent(x):  # operators without a forward-mode rule would drop it, as if it were 0
            raise NotImplementedError(f"{name} carries a tangent, but fa4 attention has no forward-mode derivative")
    softmax_scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else number("softmax_scale", softmax_scale)
    softcap = cap("softcap", softcap)
    left, right = window(causal, window_size)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    deterministic = boolean("deterministic", deterministic, "a bool or None")
    dispatch.check_backend_name(backend)
    trains = q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    needs_backward = torch.is_grad_enabled() and trains
    return Flags(softmax_scale, left, right, softcap, deterministic, needs_backward, backend)


def _unwrapped(value: Any) -> Any:
    """Convert a numpy scalar to a Python one; return anything else unchanged."""
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_numpy else value


_LARGEST = 3.4028234663852886e38  # largest float32: kernels compute in float32


def number(name: str, value: float) -> float:
    """Check a finite number."""
    if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) or isinstance(value, bool):
        value = _unwrapped(value)
    if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) or isinstance(value, bool):
        # A tensor would be read on the host, and get no gradient.
        raise TypeError(f"{name} is a {type(value).__name__}, expected a float or an int")
    if not -_LARGEST <= value <= _LARGEST:  # (no call of math: torch.compile may pass symbols)
        shown = value if isinstance(value, float) else "an integer of that size"
        raise ValueError(f"{name} is {shown}, expected a finite number, of float32's range")
    return float(value) if isinstance(value, int) else value


def cap(name: str, value: float) -> float:
    """Check a softcap; 0 means none."""
    value = number(name, value)
    if value < 0:
        raise ValueError(f"{name} is {value}, expected a finite number, 0 (off) or more")
    return value


def probability(name: str, value: float) -> float:
    """Check a number from 0 to 1."""
    value = number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}, expected a number from 0 to 1")
    return value


Seed: TypeAlias = int | tuple[int, int] | Tensor


def seed(name: str, value: Seed, device: torch.device) -> Tensor:
    """Return seed and offset as a tensor, (2,) int64 on the device."""
    if isinstance(value, Tensor):
        if value.dtype != torch.int64 or value.shape != (2,):
            raise ValueError(
                f"{name} is a tensor of shape {shown(value)}, {value.dtype}, expected (2,), torch.int64: a seed and an "
                "offset"
            )
        if value.device != device:
            raise ValueError(f"{name} is on {value.device}, expected {device} like q")
        return value.contiguous()
    given = value if isinstance(value, (tuple, list)) else (value, 0)
    both = [x if isinstance(x, int) else _unwrapped(x) for x in given]
    if len(both) != 2 or any(isinstance(x, bool) or not isinstance(x, int) for x in both):
        raise TypeError(f"{name} is {value!r}, expected an int, a pair of ints, or an int64 torch.Tensor of both")
    if not all(-(1 << 63) <= x < 1 << 64 for x in both):
        raise ValueError(f"{name} is {value!r}, expected ints of 64 bits")
    return torch.tensor([x if x < 1 << 63 else x - (1 << 64) for x in both], dtype=torch.int64, device=device)


def drops_nothing(p: float) -> bool:
    """Whether dropout is off, and p needs no check."""
    return isinstance(p, (float, int)) and p == 0


class Dropout(NamedTuple):
    """Dropout arguments of a call, as the caller wrote them."""

    p: float = 0.0
    seed: Seed | None = None

    def checked(self, device: torch.device) -> tuple[float, Tensor | None]:
        """Return the probability and (seed, offset), drawn from the device's generator if not given; None for p = 0."""
        p = probability("dropout_p", self.p)
        if not p:
            return p, None
        if self.seed is None:
            return p, torch.randint(1 << 62, (2,), dtype=torch.int64, device=device)
        return p, seed("dropout_seed", self.seed, device)


def count(name: str, value: int, expected: str = "an int") -> int:
    """Check a non-negative integer."""
    if not isinstance(value, (int, torch.SymInt)):
        value = _unwrapped(value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} is a {type(value).__name__}, expected {expected}")
    if value < 0:
        raise ValueError(f"{name} is {value}, expected 0 or more")
    return value


def boolean(name: str, value: bool, expected: str) -> bool:
    if not isinstance(value, bool):
        value = _unwrapped(value)
        if not isinstance(value, bool):
            raise TypeError(f"{name} is a {type(value).__name__}, expected {expected}")
    return value


_OPEN = 1 << 30  # wider than any sequence; device code adds row numbers to a side in 32 bits


def window(causal: bool, window_size: WindowSize) -> tuple[int | None, int | None]:
    """Return the sides of a spec's window."""
    left, right = _window(window_size)
    return left, 0 if boolean("causal", causal, "a bool") else right


def _window(window_size: WindowSize) -> tuple[int | None, int | None]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}, expected a pair (left, right)")
    sides: list[int | None] = []
    for side in window_size:
        if not (side is None or isinstance(side, (int, torch.SymInt))):
            side = _unwrapped(side)
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)) or side < -1):
            raise ValueError(f"window_size is {window_size!r}, expected ints of 0 or more, or None or -1 for open")
        sides.append(None if side is None or side == -1 or side >= _OPEN else side)
    return sides[0], sides[1]


def check_plain(name: str, x: Any, q: Tensor, expected: str = "a torch.Tensor", like: str = "q") -> None:
    """Raise unless x is a strided tensor on q's device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected {expected}")
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor, expected a plain one")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has layout {x.layout}, expected torch.strided")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, expected {q.device} like {like}")


def check_dtype(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raise unless x has one of `dtypes`: those that attention supports, or a call's choice of them."""
    if x.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise TypeError(f"{name} has dtype {x.dtype}, expected {expected}")


def check_e2m1_scales(label: str, scales: Any, name: str, x: Tensor) -> None:
    """Raise unless `scales` may stand beside e2m1 numbers x: one of e4m3 for each 16 columns."""
    check_plain(label, scales, x, f"{nvfp4.SCALE_DTYPE} scales of {name}, as fa4.quantize(..., 'nvfp4') returns", name)
    check_dtype(label, scales, (nvfp4.SCALE_DTYPE,))
    columns = nvfp4.PER_BYTE * x.shape[-1]
    if columns % nvfp4.COLUMNS:
        raise ValueError(f"{name} has {columns} columns of 4 bits, expected a multiple of {nvfp4.COLUMNS}")
    expected = (*x.shape[:-1], columns // nvfp4.COLUMNS)
    if scales.shape != expected:
        raise ValueError(f"{label} has shape {shown(scales)}, expected {expected} beside {name} {shown(x)}")


def check_sink(name: str, sink: Tensor, q: Tensor) -> None:
    """Raise unless a sink has one logit for each query head."""
    check_plain(name, sink, q)
    check_dtype(name, sink)
    if sink.shape != (q.shape[-2],):
        raise ValueError(f"{name} has shape {shown(sink)}, expected ({q.shape[-2]},): one logit per query head")


def check_int32(name: str, x: Tensor | None, q: Tensor, length: int | None, like: str = "q") -> Tensor:
    """Check and return (length,) int32 on q's device; None: any length from 1. like: the caller's name of q."""
    check_plain(name, x, q, "an int32 torch.Tensor", like)
    assert x is not None
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}, expected torch.int32")
    if x.ndim != 1 or (x.shape[0] < 1 if length is None else x.shape[0] != length):
        expected = "(batch + 1,)" if length is None else f"({length},)"
        raise ValueError(f"{name} has shape {shown(x)}, expected {expected}")
    if not x.is_contiguous():
        raise ValueError(f"{name} has stride {x.stride(0)}, expected 1: call {name}.contiguous()")
    return x


def max_seqlen(name: str, value: int | Tensor | None, total: int) -> int:
    if value is None:
        return total
    if isinstance(value, Tensor):
        if value.ndim != 0 or value.dtype.is_floating_point:
            raise TypeError(
                f"{name} is a tensor of shape {shown(value)}, {value.dtype}, expected an int or a 0-dim int tensor"
            )
        if value.device.type != "cpu" or torch.compiler.is_compiling():
            return total
        value = int(value)
    return count(name, value, "an int or a 0-dim int tensor")


def lengths(inputs: AttentionInputs) -> None:
    """Check the lengths that kernels rely on, where reading is free, or where FA4_CHECK_LENGTHS=1 requests it. On a GPU
    this synchronises, so it is skipped during graph capture."""
    q, k, _, _, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k = inputs
    if not checks_lengths(q.device.type):
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        if seqused_k is not None:
            _check_used("k", seqused_k, [k.shape[1]] * q.shape[0])
        return
    _check_lengths("q", cu_seqlens_q, seqused_q, max_seqlen_q, q.shape[0])
    _check_lengths("k", cu_seqlens_k, seqused_k, max_seqlen_k, k.shape[0])


def checks_lengths(device: str) -> bool:
    """Whether values of tensors on this device type are checked."""
    if device == "cpu":
        return True
    return _checks_everywhere() and not (device == "cuda" and torch.cuda.is_current_stream_capturing())


@functools.cache
def _checks_everywhere() -> bool:
    """Whether FA4_CHECK_LENGTHS=1, read once: reading the environment takes a fifth of a launch."""
    return env.CHECK_LENGTHS.get() == "1"


def lengths_of(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """Return the lengths of the sequences of a packed tensor with `total` rows; raise if they are none."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] > total or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"{name} is {bounds}, expected 0 first, non-decreasing, at most {total} at the end")
    return [b - a for a, b in itertools.pairwise(bounds)]


def _check_lengths(side: str, cu_seqlens: Tensor, seqused: Tensor | None, max_seqlen: int, total: int) -> None:
    lengths = lengths_of(f"cu_seqlens_{side}", cu_seqlens, total)
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"max_seqlen_{side} is {max_seqlen}, expected at least {max(lengths)}, the longest sequence")
    if seqused is not None:
        _check_used(side, seqused, lengths)


def _check_used(side: str, seqused: Tensor, lengths: list[int]) -> None:
    if any(not 0 <= used <= n for used, n in zip(seqused.tolist(), lengths)):
        raise ValueError(f"seqused_{side} is {seqused.tolist()}, expected 0 to the sequence lengths {lengths}")
