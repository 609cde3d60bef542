"""Kernels of lists, by chip, behind the operators `fa4::sparse_forward` and `fa4::sparse_backward`.

A backend's module offers `serves` and `backward`, see `fa4.sm90.sparse.plan`. It adds dk and dv of listed rows to
float32 sums, in no fixed order. In a deterministic call it stores them, for a sum in the order of the lists. A backend
with a forward of its own offers `serves_forward` and `forward`, see `fa4.sm100.sparse.plan`.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from ..kvcache.checks import is_first_columns
from ..runtime import dispatch, toolchain
from ..runtime.device import chip_of
from ..runtime.plan import Layout
from ..runtime.spec import AttentionSpec, Flags, Saved
from ..torch_ops import flops, ops
from ..torch_ops.run import prepare

_WITH_FORWARD = frozenset({"sm100"})
_MODULES = {"sm90": "fa4.sm90.sparse.plan", "sm100": "fa4.sm100.sparse.plan"}  # by backend


def forward_backend_of(q: Tensor, k: Tensor, v: Tensor, group: int, parts: int, flags: Flags) -> str | None:
    """Return the backend whose kernel serves a call's forward, or None. q, k, v: (rows, heads, columns). group, parts:
    see `fa4.sm100.sparse.plan.serves_forward`."""
    backend = _selected(q, k, v, flags)
    if backend not in _WITH_FORWARD or not is_first_columns(k, v):
        return None
    serves = _kernels(backend).serves_forward(q.dtype, q.shape[-1], v.shape[-1], group, parts, chip_of(q.device))
    return backend if serves else None


def forward(
    backend: str, q: Tensor, k: Tensor, rows: Tensor, count: Tensor, columns: int, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Return out (tokens, heads, columns) and lse (tokens, heads) of queries whose values are the first columns of k.
    Arguments: as those of `backward`."""
    out = q.new_empty(*q.shape[:2], columns)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    torch.ops.fa4.sparse_forward(q, k, rows, count, out, lse, softmax_scale, backend)
    return out, lse


def backend_of(q: Tensor, k: Tensor, v: Tensor, group: int, flags: Flags) -> str | None:
    """Return the backend whose kernel serves a call's backward, or None. q, k, v: (rows, heads, columns). group: query
    heads of a key/value head of a list."""
    backend = _selected(q, k, v, flags)
    if backend is None:
        return None
    serves = _kernels(backend).serves(q.dtype, q.shape[-1], v.shape[-1], group, flags.deterministic)
    return backend if serves else None


def _selected(q: Tensor, k: Tensor, v: Tensor, flags: Flags) -> str | None:
    """Return the backend of dense calls of such rows, if it has kernels of lists."""
    columns, heads = (q.shape[-1], v.shape[-1]), (q.shape[-2], k.shape[-2])
    spec = AttentionSpec(q.dtype, *columns, *heads, flags.softmax_scale, needs_backward=True)
    backend = dispatch.select(spec, chip_of(q.device), flags.backend).name
    has_device_code = torch.compiler.is_compiling() or toolchain.has_compiler()  # which their plans import
    return backend if backend in _MODULES and has_device_code else None


def backward(
    backend: str, saved: Saved, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, count: Tensor, softmax_scale: float,
    dq: Tensor, dkv: list[Tensor], deterministic: bool,
) -> None:  # fmt: skip
    """Write dq of queries (tokens, heads, columns); add dk and dv to `dkv`, float32.

    k, v, dkv: (rows, key/value heads of a list, columns). rows: (tokens, lists, n), rows of k and v, of which `count`
    (tokens, lists) are used. deterministic: `dkv` has a row for each entry of the lists; those of used ones are set.
    """
    torch.ops.fa4.sparse_backward(*saved, q, k, v, rows, count, dq, *dkv, softmax_scale, deterministic, backend)


def _kernels(backend: str) -> Any:
    return importlib.import_module(_MODULES[backend])


def _backward(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, rows: Tensor,
    count: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float, deterministic: bool,
    backend: str,
) -> None:  # fmt: skip
    q, k, v, out, dout = (prepare.in_layout(x, Layout.ROWS) for x in (q, k, v, out, dout))
    saved = Saved(out, lse.contiguous(), dout, None if dlse is None else dlse.contiguous())
    with prepare.on_device(q.device):
        _kernels(backend).backward(saved, q, (k, v, rows, count), dq, (dk, dv), softmax_scale, deterministic)


def _forward(
    q: Tensor, k: Tensor, rows: Tensor, count: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, backend: str
) -> None:
    if softmax_scale < 0:  # kernels find the largest score before they multiply
        q, softmax_scale = -q, -softmax_scale
    q, k = (prepare.in_layout(x, Layout.ROWS) for x in (q, k))
    with prepare.on_device(q.device):
        _kernels(backend).forward(q, k, rows, count, out, lse, softmax_scale)


ops.library.define(
    "sparse_forward(Tensor q, Tensor k, Tensor rows, Tensor count, Tensor(a!) out, Tensor(b!) lse, "
    "float softmax_scale, str backend) -> ()"
)
ops.library.impl("sparse_forward", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("fa4::sparse_forward", lambda *arguments: None, lib=ops.library)
ops.library.define(
    "sparse_backward(Tensor out, Tensor lse, Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor rows, "
    "Tensor count, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, float softmax_scale, bool deterministic, "
    "str backend) -> ()"
)
ops.library.impl("sparse_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fa4::sparse_backward", lambda *arguments: None, lib=ops.library)


def _forward_flops(q: Tensor, k: Tensor, rows: Tensor, count: Tensor, out: Tensor, *_: Any, **__: Any) -> int:
    """Count S over the columns of q, and O over those of v, of whole lists."""
    return 2 * math.prod(q.shape[:2]) * rows.shape[2] * (q.shape[2] + out.shape[2])


flops.register(torch.ops.fa4.sparse_forward, _forward_flops)


def _flops(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, q: Tensor, *others: Any, **_: Any) -> int:
    """Count S, dQ, dK over the columns of q, and dP, dV over those of v, of whole lists."""
    rows = others[2]
    return 2 * math.prod(q.shape[:2]) * rows.shape[2] * (3 * q.shape[2] + 2 * out.shape[2])


flops.register(torch.ops.fa4.sparse_backward, _flops)
