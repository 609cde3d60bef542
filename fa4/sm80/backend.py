"""The `sm80` row of the dispatch table: compile once per kind of problem, allocate, launch."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from .. import jit
from ..bwd.preprocess import Preprocess
from ..bwd.workspace import Workspace
from ..device import Chip
from ..fwd.arguments import aligned, allocate_outputs, elsewhere, empty, lengths, prepared, windows
from ..fwd.combine import Combine
from ..fwd.splits import choose_splits
from ..spec import AttentionInputs, AttentionSpec, Gradients
from .backward import BackwardKernel
from .forward import ForwardKernel
from .postprocess import Postprocess
from .tiles import backward_section, backward_tiles, forward_section, forward_tiles, padded


def describe(spec: AttentionSpec, chip: Chip) -> str:
    forward = forward_tiles(spec.head_dim, spec.head_dim_v, chip, None)
    return f"forward {forward}; backward {backward_tiles(spec.head_dim, spec.head_dim_v, chip)}"


def forward(inputs: AttentionInputs, spec: AttentionSpec, chip: Chip) -> tuple[Tensor, Tensor]:
    if elsewhere(inputs.q):
        with torch.cuda.device(inputs.q.device):
            return forward(inputs, spec, chip)
    inputs, scale = prepared(inputs, spec)
    out, lse = allocate_outputs(inputs, spec)
    if out.numel() == 0:
        return out, lse
    plan = forward_plan(spec, chip, inputs.batch, inputs.max_seqlen_q, inputs.max_seqlen_k, _dtype(inputs.sink))
    parts, part_lse, sink = out, lse, inputs.sink
    if plan.splits > 1:
        parts = empty((plan.splits, *out.shape), torch.float32, out.device)
        part_lse = empty((plan.splits, *lse.shape), torch.float32, out.device)
        sink = None
    plan.launch(
        inputs.q,
        inputs.k,
        inputs.v,
        parts,
        part_lse,
        sink,
        *lengths(inputs),
        inputs.batch,
        plan.section,
        plan.splits,
        inputs.max_seqlen_q,
        scale,
        spec.softcap,
        *windows(spec),
    )
    if plan.splits > 1:
        of_batch = (parts.unsqueeze(1), part_lse.unsqueeze(1), out.unsqueeze(0), lse.unsqueeze(0))
        plan.combine(*(of_batch if inputs.varlen else (parts, part_lse, out, lse)), inputs.sink)
    return out, lse


def backward(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    chip: Chip,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    if elsewhere(inputs.q):
        with torch.cuda.device(inputs.q.device):
            return backward(inputs, spec, chip, out, lse, dout, dlse)
    q, k, v, sink = inputs.q, inputs.k, inputs.v, inputs.sink
    # Kernels write the rows in use; there may be others past the last of cu_seqlens and past seqused.
    dq = _gradient_of(q, spec.varlen or spec.has_seqused_q)
    dk, dv = (_gradient_of(x, spec.varlen or spec.has_seqused_k) for x in (k, v))
    if q.numel() == 0 or k.numel() == 0:
        # Only the sink, if there is one, has a part in lse.
        return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), _sink_gradient(sink, lse, None if dlse is None else -dlse))
    inputs, scale = prepared(inputs, spec)
    out, dout, lse = aligned(out), aligned(dout), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    tiles = backward_tiles(spec.head_dim, spec.head_dim_v, chip)
    scratch = Workspace.allocate(inputs, spec, tiles.tile_m, padded(spec.head_dim))
    delta = torch.zeros_like(lse) if spec.has_sink else None
    preprocess, main, postprocess = _backward_launchers(spec, chip, dlse is not None)
    rows_q = (inputs.cu_seqlens_q, inputs.seqused_q)
    of_rows = (scratch.lse_log2, scratch.delta, scratch.dq, scratch.turn)
    preprocess(out, dout, lse, dlse, delta, *of_rows, *rows_q, inputs.batch, inputs.max_seqlen_q)
    main(
        inputs.q,
        inputs.k,
        inputs.v,
        dout,
        dk,
        dv,
        *of_rows,
        *lengths(inputs),
        inputs.batch,
        backward_section(spec, inputs.max_seqlen_q),
        inputs.max_seqlen_k,
        scale,
        spec.softcap,
        *windows(spec),
    )
    postprocess(scratch.dq, dq, *rows_q, inputs.batch, inputs.max_seqlen_q, spec.softmax_scale)
    if spec.softmax_scale == 0:
        dk.zero_()  # the kernel's scale is not quite 0, see `prepared`
    return Gradients(dq, dk, dv, _sink_gradient(sink, lse, delta))


def _gradient_of(x: Tensor, has_idle_rows: bool) -> Tensor:
    if has_idle_rows:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return empty(x.shape, x.dtype, x.device)


def _sink_gradient(sink: Tensor | None, lse: Tensor, delta: Tensor | None) -> Tensor | None:
    """dsink = -sum of exp(sink - lse) delta over the rows of each head; rows not in use have delta 0."""
    if sink is None:
        return None
    if delta is None or delta.numel() == 0:
        return torch.zeros_like(sink)
    share = torch.exp(sink.float()[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    rows = (share * delta).sum(-1)
    return -(rows if rows.ndim == 1 else rows.sum(0)).to(sink.dtype)


def _dtype(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Everything about a forward that its shapes and flags decide. `combine` is there when splits > 1."""

    launch: jit.Launcher
    section: int
    splits: int
    combine: jit.Launcher | None


@functools.lru_cache(maxsize=4096)
def forward_plan(
    spec: AttentionSpec,
    chip: Chip,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sink_dtype: torch.dtype | None,
) -> ForwardPlan:
    tiles = forward_tiles(spec.head_dim, spec.head_dim_v, chip, max_seqlen_q)
    # Packing pays as soon as the query rows of one head leave half of a tile empty.
    packed = spec.group > 1 and 2 * max_seqlen_q <= tiles.tile_m
    rows, heads = max_seqlen_q, spec.heads_q
    if packed:
        rows, heads = max_seqlen_q * spec.group, spec.heads_kv
        tiles = forward_tiles(spec.head_dim, spec.head_dim_v, chip, rows)
    count = -(-rows // tiles.tile_m) * heads * batch
    splits = 1
    if not spec.has_seqused_q:  # joining parts writes every row, also those that seqused_q leaves out
        splits = choose_splits(spec, count, max_seqlen_k, tiles.tile_n, chip.sms * tiles.blocks_per_sm)
    kernel = ForwardKernel(
        dtype=spec.dtype,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        tiles=tiles,
        group=spec.group,
        packed=packed,
        varlen=spec.varlen,
        has_seqused_q=spec.has_seqused_q,
        has_seqused_k=spec.has_seqused_k,
        has_left=spec.window_left is not None,
        has_right=spec.window_right is not None,
        has_softcap=spec.softcap > 0,
        sink_dtype=None if splits > 1 else sink_dtype,
        split=splits > 1,
    )
    combine = None
    if splits > 1:
        combine = _launcher("combine", Combine(spec.dtype, spec.head_dim_v, sink_dtype), chip)
    return ForwardPlan(_launcher("forward", kernel, chip), forward_section(spec, max_seqlen_k), splits, combine)


def _launcher(name: str, kernel: Any, chip: Chip) -> jit.Launcher:
    """The launcher of a kernel record, whose fields are its compile key."""
    return jit.compiled((f"sm80.{name}", *astuple(kernel)), functools.partial(kernel.compile, chip), chip)


@functools.lru_cache(maxsize=4096)
def _backward_launchers(
    spec: AttentionSpec, chip: Chip, has_dlse: bool
) -> tuple[jit.Launcher, jit.Launcher, jit.Launcher]:
    tiles = backward_tiles(spec.head_dim, spec.head_dim_v, chip)
    preprocess = Preprocess(
        dtype=spec.dtype,
        head_dim_v=spec.head_dim_v,
        padded_head_dim=padded(spec.head_dim),
        tile_m=tiles.tile_m,
        group=spec.group,
        varlen=spec.varlen,
        has_seqused_q=spec.has_seqused_q,
        has_dlse=has_dlse,
        has_delta_rows=spec.has_sink,
        deterministic=spec.deterministic,
    )
    main = BackwardKernel(
        dtype=spec.dtype,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        tiles=tiles,
        group=spec.group,
        varlen=spec.varlen,
        has_seqused_q=spec.has_seqused_q,
        has_seqused_k=spec.has_seqused_k,
        has_left=spec.window_left is not None,
        has_right=spec.window_right is not None,
        has_softcap=spec.softcap > 0,
        deterministic=spec.deterministic,
    )
    postprocess = Postprocess(
        dtype=spec.dtype,
        head_dim=spec.head_dim,
        tiles=tiles,
        group=spec.group,
        varlen=spec.varlen,
        has_seqused_q=spec.has_seqused_q,
    )
    return (
        _launcher("preprocess", preprocess, chip),
        _launcher("backward", main, chip),
        _launcher("postprocess", postprocess, chip),
    )
