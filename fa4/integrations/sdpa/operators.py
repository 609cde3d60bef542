"""aten's flash attention operators on fa4, with torch's arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mods.ir.record import Mods
from ...runtime.memory import empty, maker
from ...runtime.spec import PACKED, AttentionInputs, Saved
from ...runtime.torch_internals import reinterpret_tensor
from ...torch_ops import ops
from ...torch_ops.calls import CachedCall
from ...torch_ops.checks import Dropout, Options
from ...torch_ops.signature import LastCallGuard
from .cached_calls import Refusal, cached_call, with_lengths


def _forward(
    inputs: AttentionInputs, options: Options, mods: Mods | None = None, num_splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse). Refuse, without mods, if num_splits differs from the plan's number of key splits."""
    cached = _last_call.find(inputs.tensors, options)
    if cached is None:
        cached = cached_call(inputs, options)
        _last_call.keep(inputs.tensors, options, cached, free=PACKED if cached.may_vary else ())
    inputs = with_lengths(cached, inputs)
    if mods is not None:
        return ops.route(inputs, cached.flags, mods).forward(inputs, mods)
    route = cached.route(inputs)
    if num_splits is not None and num_splits != route.plan.splits:
        raise Refusal(f"num_splits is {num_splits}, and fa4 chose {route.plan.splits}")
    return route.forward(inputs)


def _backward(
    saved: Saved, inputs: AttentionInputs, options: Options, mods: Mods | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    cached = cached_call(inputs, options._replace(deterministic=torch.are_deterministic_algorithms_enabled()))
    inputs, flags = with_lengths(cached, inputs), cached.flags._replace(needs_backward=True)
    (dq, dk, dv, _), _ = ops.route(inputs, flags, mods).backward(inputs, saved, mods)
    return dq, dk, dv


def _transpose(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that transposes axes 1 and 2 of tensors with the sizes and strides of x. It makes views as
    compiled code does, in half the time of `transpose`, which matters for short calls. Autograd does not record it."""
    transposed = x.transpose(1, 2)
    shape, strides = tuple(transposed.shape), transposed.stride()
    return lambda x: reinterpret_tensor(x, shape, strides)


class _DenseForward:
    """Forward of dense calls with one signature: everything but the tensors is decided in advance."""

    def __init__(self, cached: CachedCall, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._forward, self._lengths = cached.first.forward.call_with_tensors, cached.max_seqlens
        self._q, self._k, self._v = _transpose(query), _transpose(key), _transpose(value)
        template = torch.empty(query.transpose(1, 2).shape, dtype=query.dtype, device="meta")
        self._out = _transpose(template)
        self._must_copy = not _has_layout_of(template.transpose(1, 2), query)
        empty_specs = ((2,), torch.uint64), ((), torch.uint64), ((0,), query.dtype)
        self._seed, self._offset, self._mask = (maker(shape, dtype, query.device) for shape, dtype in empty_specs)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
        out, lse = self._forward((self._q(query), self._k(key), self._v(value), None, None, None, None, None))
        out = self._out(out)
        if self._must_copy:
            out = torch.empty_like(query).copy_(out)
        return out, lse, None, None, *self._lengths, self._seed(), self._offset(), self._mask()


class _DenseBackward:
    """Backward of dense calls with one signature."""

    def __init__(
        self, cached: CachedCall, query: Tensor, key: Tensor, value: Tensor, out: Tensor, dout: Tensor
    ) -> None:
        """Take tensors of (batch, heads, seqlen, head_dim), as in a call."""
        tensors = query, key, value
        self._lengths, self._transposed = cached.max_seqlens, [_transpose(x) for x in (*tensors, out, dout)]
        flags = cached.flags._replace(needs_backward=True)
        inputs = with_lengths(cached, AttentionInputs(*_swap_rows_and_heads(*tensors)))
        self._backward = ops.route(inputs, flags).backward
        templates = [torch.empty(x.transpose(1, 2).shape, dtype=x.dtype, device="meta") for x in tensors]
        self._heads_first = [_transpose(x) for x in templates]
        self._must_copy = not all(_has_layout_of(x.transpose(1, 2), like) for x, like in zip(templates, tensors))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor, ...]:
        q, k, v, o, do = self._transposed
        rows = q(query), k(key), v(value), None, None, None, None, None, *self._lengths
        grads, _ = self._backward(AttentionInputs._make(rows), Saved(o(out), lse, do(dout)))
        q, k, v = self._heads_first
        dq, dk, dv = q(grads.dq), k(grads.dk), v(grads.dv)
        if self._must_copy:
            return _in_layout_of(dq, query), _in_layout_of(dk, key), _in_layout_of(dv, value)
        return dq, dk, dv


_last_call: LastCallGuard[CachedCall] = LastCallGuard()
_dense: LastCallGuard[_DenseForward] = LastCallGuard()
_dense_backward: LastCallGuard[_DenseBackward] = LastCallGuard()


def _has_layout_of(x: Tensor, like: Tensor) -> bool:
    """Return whether x, dense, has the strides of torch.empty_like(like), which torch.compile relies on."""
    return x.stride() == like.stride() or x.stride() == torch.empty_like(like, device="meta").stride()


def _in_layout_of(x: Tensor, like: Tensor) -> Tensor:
    """Return x with the strides of torch.empty_like(like)."""
    return x if _has_layout_of(x, like) else torch.empty_like(like).copy_(x)


def _swap_rows_and_heads(*tensors: Tensor) -> tuple[Any, ...]:
    """Return views of (batch, heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim), or the reverse."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _rng_results(query: Tensor, mods: Mods | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return torch's dropout results: seed and offset in one tensor, an unused offset, and an empty debug mask. Without
    dropout nothing reads them, and they stay unset: setting them would cost two kernels a call."""
    offset, no_mask = empty((), torch.uint64, query.device), empty((0,), query.dtype, query.device)
    if mods is None or mods.dropout_seed is None:
        return empty((2,), torch.uint64, query.device), offset, no_mask
    return mods.dropout_seed.view(torch.uint64), offset, no_mask


def _dropout(
    query: Tensor, dropout_p: float, seed: Tensor | None = None, return_debug_mask: bool = False
) -> Mods | None:
    """Return the dropout of a call (None without dropout), with a new seed or the forward's."""
    if return_debug_mask:
        raise Refusal("return_debug_mask is asked for, and fa4 has none")
    if not dropout_p:
        return None
    if seed is None:
        dropout_p, seed = Dropout(dropout_p).checked(query.device)
    return Mods.without_functions(dropout_p, None if seed is None else seed.view(torch.int64))


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    mods = _dropout(query, dropout_p, return_debug_mask=return_debug_mask)
    for name, x in (("alibi_slopes", alibi_slopes), ("block_table", block_table)):
        if x is not None:
            raise Refusal(f"{name} is given")
    if seqused_k is not None and cum_seq_q is None:
        raise Refusal("seqused_k is given without cumulative lengths")
    inputs = AttentionInputs(query, key, value, None, cum_seq_q, cum_seq_k, None, seqused_k, max_q, max_k)
    options = Options(scale, is_causal, (window_size_left, window_size_right))
    out, lse = _forward(inputs, options, mods, num_splits)
    return out, lse, *_rng_results(query, mods)


def _flash_attention_forward_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result, lse, *_ = _flash_attention_forward(*args, **kwargs)
    out.copy_(result)
    return lse


class _BackwardArguments(NamedTuple):
    """Arguments of torch's backward operators, of packed sequences and of tensors (batch, heads, seqlen, head_dim)."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    seed: Tensor  # see `_rng_results`
    offset: Tensor
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None

    @property
    def options(self) -> Options:
        return Options(self.scale, self.is_causal, (self.window_size_left, self.window_size_right))

    @property
    def mods(self) -> Mods | None:
        return _dropout(self.query, self.dropout_p, self.seed)


def _flash_attention_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    a = _BackwardArguments(*args, **kwargs)
    inputs = AttentionInputs(a.query, a.key, a.value, None, a.cum_seq_q, a.cum_seq_k, None, None, a.max_q, a.max_k)
    return _backward(Saved(a.out, a.logsumexp, a.grad_out), inputs, a.options, a.mods)


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if dropout_p or return_debug_mask:
        mods = _dropout(query, dropout_p, return_debug_mask=return_debug_mask)
        inputs = AttentionInputs(*_swap_rows_and_heads(query, key, value))
        out, lse = _forward(inputs, Options(scale, is_causal), mods)
        bounds = None, None, query.shape[2], key.shape[2]
        return _in_layout_of(out.transpose(1, 2), query), lse, *bounds, *_rng_results(query, mods)
    tensors, key_options = (query, key, value), (is_causal, scale)
    attend = _dense.find(tensors, key_options)
    if attend is None:
        cached = cached_call(AttentionInputs(*_swap_rows_and_heads(query, key, value)), Options(scale, is_causal))
        attend = _DenseForward(cached, query, key, value)
        _dense.keep(tensors, key_options, attend, cached)
    return attend(query, key, value)


def _sdpa_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    a = _BackwardArguments(*args, **kwargs)
    tensors = query, key, value, out, grad_out = a.query, a.key, a.value, a.out, a.grad_out
    if a.dropout_p:
        q, k, v, out, grad_out = _swap_rows_and_heads(*tensors)
        grads = _backward(Saved(out, a.logsumexp, grad_out), AttentionInputs(q, k, v), a.options, a.mods)
        return tuple(_in_layout_of(grad, x) for grad, x in zip(_swap_rows_and_heads(*grads), tensors))
    key_options = a.is_causal, a.scale
    attend = _dense_backward.find(tensors, key_options)
    if attend is None:
        options = a.options._replace(deterministic=torch.are_deterministic_algorithms_enabled())
        cached = cached_call(AttentionInputs(*_swap_rows_and_heads(query, key, value)), options)
        attend = _DenseBackward(cached, *tensors)
        _dense_backward.keep(tensors, key_options, attend, cached)
    return attend(query, key, value, out, a.logsumexp, grad_out)


def _refuse_on_cpu(query: Tensor, key: Tensor, dropout_p: float, is_causal: bool, attn_mask: Tensor | None) -> None:
    if dropout_p:
        raise Refusal("dropout_p is given, and torch's operator for CPUs has no place for a seed")
    if attn_mask is not None:
        raise Refusal("attn_mask is given")
    if is_causal and query.shape[2] != key.shape[2]:
        raise Refusal("is_causal with other numbers of keys than queries, which torch aligns at the first key")


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    _refuse_on_cpu(query, key, dropout_p, is_causal, attn_mask)
    out, lse, *_ = _sdpa_forward(query, key, value, dropout_p, is_causal, scale=scale)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    _refuse_on_cpu(query, key, dropout_p, is_causal, attn_mask)
    q, k, v, out, grad_out = _swap_rows_and_heads(query, key, value, out, grad_out)
    saved = Saved(out, logsumexp.contiguous(), grad_out)
    return _swap_rows_and_heads(*_backward(saved, AttentionInputs(q, k, v), Options(scale, is_causal)))


OPERATORS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_attention_forward_inplace,
    "_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
CPU_OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
}
