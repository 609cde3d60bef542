"""Every user-facing error: what the public functions check before anything runs."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch, env
from .spec import Flags

WindowSize = tuple[int | None, int | None]


class _Layout(NamedTuple):
    """What the checks look at in a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]


def layout(name: str, x: Tensor) -> tuple:
    """The fields of a `_Layout`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has layout {x.layout}, expected torch.strided (for lengths, flash_attn_varlen_func)")
    return x.shape, x.dtype, x.device, x.stride()


def _s(x: Tensor | _Layout, first: int | None = None, rest: str = "") -> str:
    """A shape as text, (2, 7, 4, 64); with `first`, only the leading sizes and then `rest`."""
    sizes = [str(n) for n in x.shape[:first]] + ([rest] if rest else [])
    return f"({', '.join(sizes)})"


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.lru_cache(maxsize=4096)
def dense(*layouts: tuple) -> None:
    """Padded q, k, v, as their `layout`s. Remembered: a training loop calls with few, and looking again would take as
    long as a launch. Sizes under tracing may be symbols, which have no hash: there, `dense.__wrapped__`."""
    q, k, v = (_Layout(*fields) for fields in layouts)
    _check_layouts(q, k, v, "(batch, seqlen, heads, head_dim)")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k has shape {_s(k)}, expected ({q.shape[0]}, *, *, {q.shape[3]}) to go with q {_s(q)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {_s(v)}, expected {_s(k, 3, '*')} to go with k {_s(k)}")


@functools.lru_cache(maxsize=4096)
def packed(*layouts: tuple) -> None:
    """Packed q, k, v, like `dense`."""
    q, k, v = (_Layout(*fields) for fields in layouts)
    _check_layouts(q, k, v, "(total, heads, head_dim)")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k has shape {_s(k)}, expected (total_k, *, {q.shape[2]}) to go with q {_s(q)}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v has shape {_s(v)}, expected {_s(k, 2, '*')} to go with k {_s(k)}")


def _check_layouts(q: _Layout, k: _Layout, v: _Layout, axes: str) -> None:
    ndim = axes.count(",") + 1
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != ndim:
            raise ValueError(f"{name} has {len(x.shape)} dimensions, shape {_s(x)}, expected {ndim}: {axes}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}, expected float16, bfloat16, float32 or float64")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, expected {q.dtype} like q")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, expected {q.device} like q")
        if x.shape[-1] == 0:
            raise ValueError(f"{name} has shape {_s(x)}, expected a last axis of at least 1")
        if x.stride[-1] != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} has stride {x.stride[-1]} on its last axis, expected 1: call {name}.contiguous()")
    if q.shape[-2] == 0 or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"q has {q.shape[-2]} heads, expected a positive multiple of k's {k.shape[-2]}")


def flags(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    sink: Tensor | None,
    deterministic: bool | None,
    backend: str,
    watched: bool,
) -> Flags:
    """The flags of the operator; checks all but q, k, v themselves."""
    needs_backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if sink is not None:
        _check_sink(sink, q)
        needs_backward = needs_backward or (torch.is_grad_enabled() and sink.requires_grad)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if forward_ad._current_level >= 0:
        _check_tangents(q=q, k=k, v=v, learnable_sink=sink)
    plain = (q.shape[-1], softmax_scale, causal, window_size, softcap, deterministic, needs_backward, backend)
    if not watched:
        try:
            return _plain_flags(*plain)
        except TypeError:  # something has no hash, or is wrong: either is told below
            pass
    return _plain_flags.__wrapped__(*plain)


@functools.lru_cache(maxsize=4096, typed=True)
def _plain_flags(
    head_dim: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    deterministic: bool,
    needs_backward: bool,
    backend: str,
) -> Flags:
    softmax_scale = 1 / math.sqrt(head_dim) if softmax_scale is None else _number("softmax_scale", softmax_scale)
    softcap = _number("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}, expected a finite number, 0 (off) or more")
    left, right = _window(window_size)
    if _bool("causal", causal, "a bool"):
        right = 0
    deterministic = _bool("deterministic", deterministic, "a bool or None")
    dispatch.check_backend_name(backend)
    return Flags(softmax_scale, left, right, softcap, deterministic, needs_backward, backend)


def _unwrapped(value: Any) -> Any:
    """A numpy scalar as Python's own; anything else as it is."""
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_numpy else value


_LARGEST = 3.4028234663852886e38  # of float32, in which kernels compute


def _number(name: str, value: float) -> float:
    if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) or isinstance(value, bool):
        value = _unwrapped(value)
    if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) or isinstance(value, bool):
        # A tensor would be read on the host, and get no gradient.
        raise TypeError(f"{name} is a {type(value).__name__}, expected a float or an int")
    if not -_LARGEST <= value <= _LARGEST:  # (no call of math: torch.compile may pass symbols)
        shown = value if isinstance(value, float) else "an integer of that size"
        raise ValueError(f"{name} is {shown}, expected a finite number, of float32's range")
    return float(value) if isinstance(value, int) else value


def _bool(name: str, value: bool, expected: str) -> bool:
    if not isinstance(value, bool):
        value = _unwrapped(value)
        if not isinstance(value, bool):
            raise TypeError(f"{name} is a {type(value).__name__}, expected {expected}")
    return value


def _check_tangents(**tensors: Tensor | None) -> None:
    """Operators without a rule for forward-mode differentiation drop tangents, as if they were 0."""
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name} carries a tangent, but fa4 attention has no forward-mode derivative")


_OPEN = 1 << 30  # wider than any sequence; device code adds row numbers to a side in 32 bits


def _window(window_size: WindowSize) -> tuple[int | None, int | None]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}, expected a pair (left, right)")
    left, right = window_size
    return _side(left, window_size), _side(right, window_size)


def _side(side: int | None, window_size: WindowSize) -> int | None:
    if side is None:
        return None
    if not isinstance(side, (int, torch.SymInt)):
        side = _unwrapped(side)
    if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)) or side < -1:
        raise ValueError(f"window_size is {window_size!r}, expected ints of 0 or more, or None or -1 for open")
    return None if side == -1 or side >= _OPEN else side


def _check_sink(sink: Tensor, q: Tensor) -> None:
    if not isinstance(sink, Tensor):
        raise TypeError(f"learnable_sink is a {type(sink).__name__}, expected a torch.Tensor")
    if sink.dtype not in _DTYPES:
        raise TypeError(f"learnable_sink has dtype {sink.dtype}, expected float16, bfloat16, float32 or float64")
    if sink.layout is not torch.strided:
        raise TypeError(f"learnable_sink has layout {sink.layout}, expected torch.strided")
    if sink.shape != (q.shape[-2],):
        raise ValueError(f"learnable_sink has shape {_s(sink)}, expected ({q.shape[-2]},): one logit per query head")
    if sink.device != q.device:
        raise ValueError(f"learnable_sink is on {sink.device}, expected {q.device} like q")


def int32(name: str, x: Tensor, q: Tensor, length: int | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected an int32 torch.Tensor")
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}, expected torch.int32")
    if x.ndim != 1 or (x.shape[0] < 1 if length is None else x.shape[0] != length):
        expected = "(batch + 1,)" if length is None else f"({length},)"
        raise ValueError(f"{name} has shape {_s(x)}, expected {expected}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, expected {q.device} like q")
    if not x.is_contiguous():
        raise ValueError(f"{name} has stride {x.stride(0)}, expected 1: call {name}.contiguous()")


def max_seqlen(name: str, value: int | Tensor | None, total: int) -> int:
    if value is None:
        return total
    if isinstance(value, Tensor):
        if value.ndim != 0 or value.dtype.is_floating_point:
            raise TypeError(
                f"{name} is a tensor of shape {_s(value)}, {value.dtype}, expected an int or a 0-dim int tensor"
            )
        if value.device.type != "cpu" or torch.compiler.is_compiling():
            return total
        value = int(value)
    elif not isinstance(value, (int, torch.SymInt)):
        value = _unwrapped(value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} is a {type(value).__name__}, expected an int or a 0-dim int tensor")
    if value < 0:
        raise ValueError(f"{name} is {value}, expected 0 or more")
    return value


def lengths(side: str, cu_seqlens: Tensor, seqused: Tensor | None, max_seqlen: int, total: int) -> None:
    """What kernels must be able to rely on, checked where looking is free, or where FA4_CHECK_LENGTHS=1 asks for it: on
    a GPU it waits for the device, so not while a graph is captured."""
    if cu_seqlens.device.type != "cpu":
        if env.CHECK_LENGTHS.get() != "1":
            return
        if cu_seqlens.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] > total or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens_{side} is {bounds}, expected 0 first, non-decreasing, at most {total} at the end")
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"max_seqlen_{side} is {max_seqlen}, expected at least {max(lengths)}, the longest sequence")
    if seqused is not None and any(not 0 <= used <= n for used, n in zip(seqused.tolist(), lengths)):
        raise ValueError(f"seqused_{side} is {seqused.tolist()}, expected 0 to the sequence lengths {lengths}")
