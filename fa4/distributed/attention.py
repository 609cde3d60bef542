"""The public function: checks, the way of communication, and autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks
from ..checks import Options, WindowSize
from ..spec import Flags, Saved
from . import gather, ring
from .parts import Packed, Padded, Parts
from .place import Place, check_lengths, check_multiples

_WAYS = {"ring": ring, "all-gather": gather}
METHODS = tuple(_WAYS)


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
    """`fa4.flash_attn_func` over the sequences of all ranks, forward and backward. Every rank of the group calls it.

    Args:
        q, k, v: this rank's part, as `shard` cuts it: (batch, seqlen / ranks, heads, head_dim), or packed
            (total / ranks, heads, head_dim).
        group: the process group; None is the default one.
        method: "ring" or "all-gather".
        cu_seqlens: for packed parts, (batch + 1,) int32 of the whole sequences, the same on every rank. Each length
            is a multiple of 2 * ranks.
        max_seqlen: an upper bound of the whole sequences' lengths; None is all rows.
        window_size: with a left side alone, causal, and the method "all-gather".

    The other arguments are those of `flash_attn_func`. The gradient of a sink is this rank's share: sum it over
    ranks, as that of any parameter.

    Returns:
        this rank's rows: out like q, with head_dim_v, and, if asked, lse, (batch, heads_q, rows) or (heads_q, rows).

    Raises:
        TypeError, ValueError: as `flash_attn_func`; queries and keys differ in length, or chunks would not be whole.
        NotImplementedError: a window that the method has not.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {METHODS}")
    place = Place.of(group)
    padded = isinstance(q, Tensor) and q.ndim == 4
    (checks.check_dense if padded else checks.check_packed)(q, k, v)
    flags = checks.flags(
        q, k, v, learnable_sink, Options(softmax_scale, causal, window_size, softcap, deterministic, backend)
    )
    _check_window(flags, method)
    rows = q.shape[:-2]
    if k.shape[: len(rows)] != rows:
        raise ValueError(
            f"k has rows {tuple(k.shape[: len(rows)])}, expected {tuple(rows)} like q: parts of one sequence"
        )
    parts: Parts
    if padded:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is given with padded q, k, v, expected packed ones: (rows, heads, head_dim)")
        check_multiples([rows[1] * place.world], place)
        parts = Padded(rows[1], flags, place)
    else:
        if cu_seqlens is None:
            raise ValueError("cu_seqlens is None, expected the cumulative lengths of the whole packed sequences")
        check_lengths(cu_seqlens, place, q.shape[0])
        whole = place.world * q.shape[0] if max_seqlen is None else max_seqlen
        parts = Packed(cu_seqlens, q.shape[0], -(-whole // place.world), flags, place)
    out, lse = _ContextParallel.apply(q, k, v, learnable_sink, parts, method)
    return (out, lse) if return_lse else out


def _check_window(flags: Flags, method: str) -> None:
    if flags.window_right not in (None, 0) or (flags.window_left is not None and flags.window_right is None):
        raise NotImplementedError("window_size has a right side or no causal, expected (left, None) with causal=True")
    if flags.window_left is not None and method == "ring":
        raise NotImplementedError('window_size is given with method="ring", expected method="all-gather"')


class _ContextParallel(torch.autograd.Function):
    """q, k, v of this rank to its out and lse."""

    @staticmethod
    def forward(ctx: Any, q, k, v, sink, parts: Parts, method: str):  # type: ignore[override]
        out, lse = _WAYS[method].forward(q, k, v, sink, parts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, q, k, v, sink)
        ctx.way = parts, method
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):  # type: ignore[override]
        out, lse, q, k, v, sink = ctx.saved_tensors
        parts, method = ctx.way
        saved = Saved(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        dq, dk, dv, dsink = _WAYS[method].backward(saved, q, k, v, sink, parts)
        dsink = None if dsink is None else dsink.to(sink.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None
