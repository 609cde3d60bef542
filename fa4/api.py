"""The public functions: the caller's arguments, checked, become one operator call. Every user-facing error is here."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import autograd as _autograd  # noqa: F401  (registers the gradients of the operator)
from . import dispatch, ops
from .device import chip_of
from .spec import AttentionSpec, Extent

WindowSize = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over padded batches, exact, with O(seqlen) memory.

    Key/value head h serves query heads h * g to h * g + g - 1, where g = heads_q / heads_kv (GQA, MQA).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); float16, bfloat16, float32 or float64, last axis contiguous.
        k: (batch, seqlen_k, heads_kv, head_dim), same dtype and device as q.
        v: (batch, seqlen_k, heads_kv, head_dim_v), same dtype and device as q.
        softmax_scale: factor on the logits; None means 1 / sqrt(head_dim).
        causal: query i sees key j only if j <= i + seqlen_k - seqlen_q (aligned bottom-right).
        window_size: (left, right); query i sees keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right. None, -1 or anything from 2^30 leaves a side open. With causal, both
            conditions hold.
        softcap: if positive, logits become softcap * tanh(logits / softcap).
        learnable_sink: (heads_q,) an extra logit per query head that takes probability but has no value.
        deterministic: gradients are bitwise reproducible; None follows
            `torch.are_deterministic_algorithms_enabled()`. The forward always is.
        return_lse: also return the log-sum-exp of each row's logits (with the sink's), which is differentiable.
        backend: "auto", or the name of a backend, which then obeys or raises.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and, if asked, lse (batch, heads_q, seqlen_q), natural
        logarithm, float32 (float64 for float64 inputs). A row that sees no key has out 0 and lse -inf (the sink,
        if there is one).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device, layout or value, or no backend can serve the call.
        NotImplementedError: forward-mode differentiation, or a derivative of a gradient.
    """
    watched = ops.watched(q, k, v, learnable_sink)
    _checker(_check_dense, watched)(_layout("q", q), _layout("k", k), _layout("v", v))
    flags = _check_flags(q, k, v, softmax_scale, causal, window_size, softcap, learnable_sink, deterministic, backend)
    out, lse = ops.forward(
        watched, q, k, v, learnable_sink, None, None, None, None, q.shape[1], k.shape[1], *flags, backend
    )
    return (out, lse) if return_lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over packed sequences of different lengths.

    Sequence b occupies rows cu_seqlens[b] to cu_seqlens[b + 1] of the packed tensors; attention stays within it. There
    may be more rows than cu_seqlens[-1], as in a batch padded to a fixed size: those of q have out 0 and lse -inf, and
    the gradients of all of them are 0. Arguments not listed here are those of `flash_attn_func`.

    Args:
        q: (total_q, heads_q, head_dim).
        k: (total_k, heads_kv, head_dim).
        v: (total_k, heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on q's device: 0, then the running sums of the lengths.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, an int or a 0-dim tensor; they size the launch and
            never change results. None, or a tensor on an accelerator (reading it would stall), means total_q, total_k.
        seqused_q, seqused_k: (batch,) int32: only the first so many rows of each sequence are used; masks align to
            these lengths, and the other rows of out are 0, of lse -inf, and have gradients 0.

    Returns:
        out (total_q, heads_q, head_dim_v) in q's dtype and, if asked, lse (heads_q, total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`.
    """
    watched = ops.watched(q, k, v, learnable_sink)
    _checker(_check_packed, watched)(_layout("q", q), _layout("k", k), _layout("v", v))
    flags = _check_flags(q, k, v, softmax_scale, causal, window_size, softcap, learnable_sink, deterministic, backend)
    _check_int32("cu_seqlens_q", cu_seqlens_q, q, None)
    _check_int32("cu_seqlens_k", cu_seqlens_k, q, cu_seqlens_q.shape[0])
    for name, seqused in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if seqused is not None:
            _check_int32(name, seqused, q, cu_seqlens_q.shape[0] - 1)
    max_seqlen_q = _max_seqlen("max_seqlen_q", max_seqlen_q, q.shape[0])
    max_seqlen_k = _max_seqlen("max_seqlen_k", max_seqlen_k, k.shape[0])
    if q.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere, looking would stall the device
        _check_lengths("q", cu_seqlens_q, seqused_q, max_seqlen_q, q.shape[0])
        _check_lengths("k", cu_seqlens_k, seqused_k, max_seqlen_k, k.shape[0])
    out, lse = ops.forward(
        watched,
        q,
        k,
        v,
        learnable_sink,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        *flags,
        backend,
    )
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> dispatch.Explanation:
    """Which backend and tiles a call with these arguments gets, and why not the backends preferred to it.

    Takes the arguments of `flash_attn_func` or `flash_attn_varlen_func` but `return_lse`, which changes nothing here.
    For packed q, k, v without cu_seqlens, answers as for one sequence. Runs nothing, reads no tensor, and returns a
    record that prints as text. Tensors on the "meta" device will do if only shapes are at hand.
    """
    packed = isinstance(q, Tensor) and q.ndim == 3
    check = _check_packed if packed else _check_dense
    check(_layout("q", q), _layout("k", k), _layout("v", v))
    flags = _check_flags(q, k, v, softmax_scale, causal, window_size, softcap, learnable_sink, deterministic, backend)
    if packed:
        max_seqlen_q = _max_seqlen("max_seqlen_q", max_seqlen_q, q.shape[0])
        max_seqlen_k = _max_seqlen("max_seqlen_k", max_seqlen_k, k.shape[0])
        extent = Extent(1 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k)
        cu_seqlens_q = q if cu_seqlens_q is None else cu_seqlens_q  # only its presence matters from here
    else:
        extent = Extent(q.shape[0], q.shape[1], k.shape[1])
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    _, fields = ops.problem(q, k, v, learnable_sink, *lengths, 0, 0, *flags)
    return dispatch.explain(AttentionSpec(*fields), extent, chip_of(q.device), backend)


class _Layout(NamedTuple):
    """What the checks look at in a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]


def _layout(name: str, x: Tensor) -> tuple:
    """The fields of a `_Layout`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has layout {x.layout}, expected torch.strided (for lengths, flash_attn_varlen_func)")
    return x.shape, x.dtype, x.device, x.stride()


def _checker(check, watched: bool):
    """`check`, which remembers the layouts that passed: a training loop calls with few, and looking again would take
    as long as a launch. Sizes under tracing may be symbols, which have no hash; those are checked every time."""
    return check.__wrapped__ if watched else check


def _s(x: Tensor | _Layout, first: int | None = None, rest: str = "") -> str:
    """A shape as text, (2, 7, 4, 64); with `first`, only the leading sizes and then `rest`."""
    sizes = [str(n) for n in x.shape[:first]] + ([rest] if rest else [])
    return f"({', '.join(sizes)})"


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.lru_cache(maxsize=4096)
def _check_dense(*layouts: tuple) -> None:
    q, k, v = (_Layout(*fields) for fields in layouts)
    _check_layouts(q, k, v, "(batch, seqlen, heads, head_dim)")
    if k.shape[0] != q.shape[0] or k.shape[2] == 0 or k.shape[3] != q.shape[3]:
        raise ValueError(f"k has shape {_s(k)}, expected ({q.shape[0]}, *, >0, {q.shape[3]}) to go with q {_s(q)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {_s(v)}, expected {_s(k, 3, '*')} to go with k {_s(k)}")


@functools.lru_cache(maxsize=4096)
def _check_packed(*layouts: tuple) -> None:
    q, k, v = (_Layout(*fields) for fields in layouts)
    _check_layouts(q, k, v, "(total, heads, head_dim)")
    if k.shape[1] == 0 or k.shape[2] != q.shape[2]:
        raise ValueError(f"k has shape {_s(k)}, expected (total_k, >0, {q.shape[2]}) to go with q {_s(q)}")
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


def _check_flags(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    learnable_sink: Tensor | None,
    deterministic: bool | None,
    backend: str,
) -> tuple[float, int | None, int | None, float, bool, bool]:
    """softmax_scale, window_left, window_right, softcap, deterministic, needs_backward: the operator's order."""
    if softmax_scale is None:
        softmax_scale = 1 / math.sqrt(q.shape[-1])
    else:
        _check_number("softmax_scale", softmax_scale)
    _check_number("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}, expected a finite number, 0 (off) or more")
    if not isinstance(causal, bool):
        raise TypeError(f"causal is a {type(causal).__name__}, expected a bool")
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is a {type(deterministic).__name__}, expected a bool or None")
    left, right = _window(window_size)
    if causal:
        right = 0
    dispatch.check_backend_name(backend)
    needs_backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if learnable_sink is not None:
        _check_sink(learnable_sink, q)
        needs_backward = needs_backward or (torch.is_grad_enabled() and learnable_sink.requires_grad)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if forward_ad._current_level >= 0:
        _check_tangents(q=q, k=k, v=v, learnable_sink=learnable_sink)
    return float(softmax_scale), left, right, float(softcap), deterministic, needs_backward


def _check_number(name: str, value: float) -> None:
    if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        # A tensor would be read on the host, and get no gradient.
        raise TypeError(f"{name} is a {type(value).__name__}, expected a float or an int")
    if not -math.inf < value < math.inf:  # (not math.isfinite: torch.compile may pass symbols)
        raise ValueError(f"{name} is {value}, expected a finite number")


def _check_tangents(**tensors: Tensor | None) -> None:
    """Operators without a rule for forward-mode differentiation drop tangents, as if they were 0."""
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name} carries a tangent, but fa4 attention has no forward-mode derivative")


_OPEN = 1 << 30  # wider than any sequence; device code adds row numbers to a side in 32 bits


def _window(window_size: WindowSize) -> tuple[int | None, int | None]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}, expected a pair (left, right)")
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < -1):
            raise ValueError(f"window_size is {window_size!r}, expected ints of 0 or more, or None or -1 for open")
    left, right = window_size
    return _side(left), _side(right)


def _side(side: int | None) -> int | None:
    return None if side is None or side == -1 or side >= _OPEN else side


def _check_sink(sink: Tensor, q: Tensor) -> None:
    if not isinstance(sink, Tensor):
        raise TypeError(f"learnable_sink is a {type(sink).__name__}, expected a torch.Tensor")
    if not sink.dtype.is_floating_point:
        raise TypeError(f"learnable_sink has dtype {sink.dtype}, expected a floating-point dtype")
    if sink.shape != (q.shape[-2],):
        raise ValueError(f"learnable_sink has shape {_s(sink)}, expected ({q.shape[-2]},): one logit per query head")
    if sink.device != q.device:
        raise ValueError(f"learnable_sink is on {sink.device}, expected {q.device} like q")


def _check_int32(name: str, x: Tensor, q: Tensor, length: int | None) -> None:
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


def _max_seqlen(name: str, value: int | Tensor | None, total: int) -> int:
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
    elif isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} is a {type(value).__name__}, expected an int or a 0-dim int tensor")
    if value < 0:
        raise ValueError(f"{name} is {value}, expected 0 or more")
    return value


def _check_lengths(side: str, cu_seqlens: Tensor, seqused: Tensor | None, max_seqlen: int, total: int) -> None:
    """What kernels must be able to rely on, checked where looking is free."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] > total or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens_{side} is {bounds}, expected 0 first, non-decreasing, at most {total} at the end")
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"max_seqlen_{side} is {max_seqlen}, expected at least {max(lengths)}, the longest sequence")
    if seqused is not None and any(not 0 <= used <= n for used, n in zip(seqused.tolist(), lengths)):
        raise ValueError(f"seqused_{side} is {seqused.tolist()}, expected 0 to the sequence lengths {lengths}")
