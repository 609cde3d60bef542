"""torch operators `fa4::forward` and `fa4::backward`: schemas, fake kernels, FLOP counts. Imports torch only.

One pair serves dense and varlen calls. Arguments are plain so that torch.compile, export, activation checkpointing
and the FLOP counter see ordinary operators; the backend is chosen inside, from shapes and flags alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from . import dispatch, run
from .device import Chip, chip_of
from .plan import Plan
from .spec import AttentionInputs, AttentionSpec, Extent, Saved

_PROBLEM = (
    "Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, int? window_left, int? window_right, "
    "float softcap, bool deterministic, bool needs_backward, str backend"
)
library = torch.library.Library("fa4", "DEF")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_PROBLEM}) -> (Tensor out, Tensor lse)")
library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_PROBLEM}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
)


def problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *flags,
) -> tuple[AttentionInputs, tuple]:
    """An operator's arguments as the inputs record and the values of the spec's fields, in their order."""
    inputs = AttentionInputs(
        q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    )
    softmax_scale, window_left, window_right, softcap, deterministic, needs_backward = flags
    shape_q, shape_v = q.shape, v.shape
    return inputs, (
        q.dtype,
        shape_q[-1],
        shape_v[-1],
        shape_q[-2],
        shape_v[-2],
        softmax_scale,
        window_left,
        window_right,
        softcap,
        sink is not None,
        cu_seqlens_q is not None,
        seqused_q is not None,
        seqused_k is not None,
        deterministic,
        needs_backward,
    )


@functools.lru_cache(maxsize=4096)
def _route(chip: Chip, backend: str, extent: Extent, *fields) -> tuple[AttentionSpec, Plan]:
    """The spec with these field values and the plan for it; building both anew would cost 5 us a call."""
    spec = AttentionSpec(*fields)
    return spec, dispatch.plan(spec, extent, chip, backend)


def _forward(q, *arguments):
    inputs, fields = problem(q, *arguments[:-1])
    return run.forward(inputs, *_route(chip_of(q.device), arguments[-1], inputs.extent, *fields))


_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def watched(*tensors: Any) -> bool:
    """Whether tracing, a dispatch mode, a function transform, a tensor subclass or the meta device has to see operators
    on these: q, and others or None."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or not _PLAIN.issuperset(map(type, tensors))
        or tensors[0].is_meta
    )


def forward(watched: bool, *arguments) -> tuple[Tensor, Tensor]:
    """`torch.ops.fa4.forward`; a call without gradients that nobody watches skips the dispatcher, whose passage takes
    longer than a short kernel."""
    needs_backward = arguments[-2]
    return torch.ops.fa4.forward(*arguments) if watched or needs_backward else _forward(*arguments)


def _backward(dout, dlse, q, k, v, out, lse, *arguments):
    *rest, backend = arguments
    inputs, fields = problem(q, k, v, *rest)
    route = _route(chip_of(q.device), backend, inputs.extent, *fields)
    dq, dk, dv, dsink = run.backward(inputs, *route, Saved(out, lse, dout, dlse))
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink


def _forward_fake(q, k, v, sink, cu_seqlens_q, *rest):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if cu_seqlens_q is None:
        batch, seqlen_q, heads_q, _ = q.shape
        lse = q.new_empty((batch, heads_q, seqlen_q), dtype=dtype)
    else:
        total_q, heads_q, _ = q.shape
        lse = q.new_empty((heads_q, total_q), dtype=dtype)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _backward_fake(dout, dlse, q, k, v, out, lse, sink, *rest):
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


library.impl("forward", _forward, "CompositeExplicitAutograd")
library.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fa4::forward", _forward_fake, lib=library)
torch.library.register_fake("fa4::backward", _backward_fake, lib=library)


def visible_pairs(seqlen_q: int, seqlen_k: int, window_left: int | None, window_right: int | None) -> int:
    """How many (query, key) pairs of one sequence the bottom-right aligned mask keeps."""

    def capped_sum(n: int) -> int:
        """min(1, seqlen_k) + min(2, seqlen_k) + ... + min(n, seqlen_k)."""
        capped = max(0, min(n, seqlen_k))
        return capped * (capped + 1) // 2 + max(0, n - seqlen_k) * seqlen_k

    def at_most(distance: int) -> int:
        """Pairs with key - query <= distance: row i has i + distance + 1 of them, within 0 and seqlen_k."""
        return capped_sum(seqlen_q + distance) - capped_sum(distance)

    shift = seqlen_k - seqlen_q
    upper = seqlen_q * seqlen_k if window_right is None else at_most(shift + window_right)
    return upper - (0 if window_left is None else at_most(shift - window_left - 1))


def _flops(q: Tensor, k: Tensor, v: Tensor, arguments: tuple, matmuls_qk: int, matmuls_v: int) -> int:
    cu_seqlens_q, cu_seqlens_k = arguments[1:3]
    window = arguments[8:10]
    if cu_seqlens_q is None:
        pairs = q.shape[0] * visible_pairs(q.shape[1], k.shape[1], *window)
    elif cu_seqlens_q.is_meta or isinstance(cu_seqlens_q, FakeTensor):
        # The lengths are not known: count every sequence at its upper bound.
        pairs = (cu_seqlens_q.shape[0] - 1) * visible_pairs(*arguments[5:7], *window)
    else:
        lengths = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist())
        pairs = sum(visible_pairs(seqlen_q, seqlen_k, *window) for seqlen_q, seqlen_k in lengths)
    return 2 * q.shape[-2] * pairs * (matmuls_qk * q.shape[-1] + matmuls_v * v.shape[-1])


@register_flop_formula(torch.ops.fa4.forward, get_raw=True)
def _forward_flops(q, k, v, *arguments, out_val=None, **_) -> int:
    """Q K^T and P V over the visible pairs: half of a full square when causal."""
    return _flops(q, k, v, arguments, matmuls_qk=1, matmuls_v=1)


@register_flop_formula(torch.ops.fa4.backward, get_raw=True)
def _backward_flops(dout, dlse, q, k, v, out, lse, *arguments, out_val=None, **_) -> int:
    """The five products of the backward: S, dQ, dK over head_dim; dP, dV over head_dim_v."""
    return _flops(q, k, v, arguments, matmuls_qk=3, matmuls_v=2)
