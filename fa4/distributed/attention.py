"""Public function of context parallelism: checks, choice of the method, autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime import dispatch
from ..runtime.device import chip_of
from ..runtime.spec import AttentionSpec, Flags, Saved
from ..torch_ops import checks
from ..torch_ops.checks import Options, WindowSize
from . import gather, ring
from .agree import agreeing
from .group_rank import GroupRank, check_lengths, host_values
from .parts import PackedParts, PaddedParts, Parts

_MODULES = {"ring": ring, "all-gather": gather}
METHODS = tuple(_MODULES)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    method: str = "ring",
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `fa4.flash_attn_func` over sequences split over ranks. Every rank of the group calls it.

    Args:
        q, k, v: this rank's part, as `shard` returns it: (batch, seqlen / ranks, heads, head_dim), or packed
            (total / ranks, heads, head_dim).
        group: the process group; None is the default group.
        method: "ring" or "all-gather".
        cu_seqlens: for packed parts, (batch + 1,) int32 of the whole sequences, equal on every rank. Each length is a
            multiple of 2 * ranks.
        max_seqlen: an upper bound of the whole sequences' lengths; None is the number of all rows.
        window_size: (left, None) with causal=True and the method "all-gather" only.

    The other arguments are those of `flash_attn_func`. The gradient of a sink is this rank's share: sum it over
    ranks, like the gradient of any parameter.

    Returns:
        this rank's out, like q with head_dim_v; with return_lse also lse, (batch, heads_q, rows) or (heads_q, rows).

    Raises:
        TypeError, ValueError: as `flash_attn_func`; queries and keys differ in length, a length does not divide into
            chunks, or (in groups of gloo or MPI, and with FA4_CHECK_LENGTHS=1) another rank got other arguments. All
            errors are raised before the first message.
        NotImplementedError: the method does not support the window.
    """
    group_rank = GroupRank.of(group)
    with agreeing(group_rank) as arguments:
        if method not in METHODS:
            raise ValueError(f"method is {method!r}, expected one of {METHODS}")
        options = Options(softmax_scale, causal, window_size, softcap, deterministic, backend)
        parts = _checked(q, k, v, learnable_sink, cu_seqlens, max_seqlen, options, group_rank, method)
        return_lse = checks.boolean("return_lse", return_lse, "a bool")
        arguments |= _common_arguments(q, k, v, learnable_sink, cu_seqlens, parts.flags, method)
    out, lse = _ContextParallel.apply(q, k, v, learnable_sink, parts, method)
    return (out, lse) if return_lse else out


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    options: Options,
    group_rank: GroupRank,
    method: str,
) -> Parts:
    """Check all arguments, and return the parts of the call."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if getattr(x, "is_nested", False):
            raise TypeError(
                f"{name} is a nested tensor, expected a plain one: sequences may be packed, with cu_seqlens"
            )
        if hasattr(x, "placements"):
            raise TypeError(f"{name} is a DTensor, expected this rank's plain tensor: to_local() returns it")
    padded = isinstance(q, Tensor) and q.ndim == 4
    checks.check_tensors(not padded, q, k, v)
    flags = checks.flags(q, k, v, sink, options)
    _check_window(flags, method)
    rows = q.shape[:-2]
    if k.shape[: len(rows)] != rows:
        raise ValueError(
            f"k has rows {tuple(k.shape[: len(rows)])}, expected {tuple(rows)} like q: parts of one sequence"
        )
    parts: Parts
    if padded:
        for name, value in (("cu_seqlens", cu_seqlens), ("max_seqlen", max_seqlen)):
            if value is not None:
                raise ValueError(f"{name} is given with padded q, k, v, expected packed ones: (rows, heads, head_dim)")
        if rows[1] % 2:
            raise ValueError(
                f"q has shape {checks.shown(q)}, expected an even number of rows: two chunks of a sequence"
            )
        parts = PaddedParts(rows[1], flags, group_rank)
    else:
        if cu_seqlens is None:
            raise ValueError("cu_seqlens is None, expected the cumulative lengths of the whole packed sequences")
        bounds = check_lengths(cu_seqlens, group_rank, group_rank.world * q.shape[0], q, "q")
        longest = checks.max_seqlen("max_seqlen", max_seqlen, group_rank.world * q.shape[0])
        max_length = max(bounds.diff().tolist(), default=0) if checks.checks_lengths(bounds.device.type) else 0
        if longest < max_length:
            raise ValueError(f"max_seqlen is {longest}, expected at least {max_length}, the longest sequence")
        parts = PackedParts(bounds, q.shape[0], -(-longest // group_rank.world), flags, group_rank)
    if flags.backend != "auto":
        _check_backend(q, k, v, sink, parts, method)
    return parts


def _check_window(flags: Flags, method: str) -> None:
    if flags.window_right not in (None, 0) or (flags.window_left is not None and flags.window_right is None):
        raise NotImplementedError("window_size has a right side or no causal, expected (left, None) with causal=True")
    if flags.window_left is not None and method == "ring":
        raise NotImplementedError('window_size is given with method="ring", expected method="all-gather"')


def _check_backend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts, method: str) -> None:
    """Raise NoBackend if the named backend does not support one of the calls that the parts need."""
    for call, ranks in _MODULES[method].calls(parts):
        k_part, v_part = (
            x.new_empty((*x.shape[: q.ndim - 3], ranks * x.shape[-3], *x.shape[-2:]), device="meta") for x in (k, v)
        )
        inputs = call.inputs(q, k_part, v_part, sink)
        dispatch.select(AttentionSpec.of(inputs, call.flags), chip_of(q.device), call.flags.backend)


def _common_arguments(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None, flags: Flags, method: str
) -> dict[str, Any]:
    """Return the arguments and properties that must be equal on every rank."""
    shapes = {name: (tuple(x.shape), x.dtype, x.device.type) for name, x in (("q", q), ("k", k), ("v", v))}
    return shapes | {
        "learnable_sink": None if sink is None else tuple(sink.shape),
        "method": method,
        "cu_seqlens": host_values(cu_seqlens),
        "softmax_scale": flags.softmax_scale,
        "causal": flags.window_right == 0,
        "window_size": (flags.window_left, flags.window_right),
        "softcap": flags.softcap,
        "requires_grad of q, k, v or learnable_sink": flags.needs_backward,
    }


class _ContextParallel(torch.autograd.Function):
    """Autograd function: q, k, v of this rank to its out and lse."""

    @staticmethod
    def forward(ctx: Any, q, k, v, sink, parts: Parts, method: str):  # type: ignore[override]
        out, lse = _MODULES[method].forward(q, k, v, sink, parts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, q, k, v, sink)
        ctx.parts_and_method = parts, method
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):  # type: ignore[override]
        out, lse, q, k, v, sink = ctx.saved_tensors
        parts, method = ctx.parts_and_method
        saved = Saved(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        dq, dk, dv, dsink = _MODULES[method].backward(saved, q, k, v, sink, parts)
        dsink = None if dsink is None else dsink.to(sink.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None
