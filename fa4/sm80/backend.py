"""The `sm80` row of the dispatch table: compile once per kind of problem, allocate, launch."""

from __future__ import annotations

import functools
from dataclasses import astuple

import torch
from torch import Tensor

from .. import jit
from ..device import Chip
from ..fwd.arguments import allocate_outputs, lengths, prepared, windows
from ..spec import AttentionInputs, AttentionSpec
from .forward import ForwardKernel
from .tiles import forward_tiles


def describe(spec: AttentionSpec, chip: Chip) -> str:
    return f"forward {forward_tiles(spec.head_dim, spec.head_dim_v, chip, None)}"


def forward(inputs: AttentionInputs, spec: AttentionSpec, chip: Chip) -> tuple[Tensor, Tensor]:
    inputs, scale = prepared(inputs, spec)
    out, lse = allocate_outputs(inputs, spec)
    if out.numel() == 0:
        return out, lse
    launch = _forward_launcher(spec, chip, inputs.max_seqlen_q, _dtype(inputs.sink))
    launch(
        inputs.q,
        inputs.k,
        inputs.v,
        out,
        lse,
        inputs.sink,
        *lengths(inputs),
        inputs.batch,
        inputs.max_seqlen_q,
        scale,
        spec.softcap,
        *windows(spec),
    )
    return out, lse


def _dtype(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


@functools.lru_cache(maxsize=4096)
def _forward_launcher(
    spec: AttentionSpec, chip: Chip, max_seqlen_q: int, sink_dtype: torch.dtype | None
) -> jit.Launcher:
    tiles = forward_tiles(spec.head_dim, spec.head_dim_v, chip, max_seqlen_q)
    # Packing pays as soon as the query rows of one head leave half of a tile empty.
    packed = spec.group > 1 and 2 * max_seqlen_q <= tiles.tile_m
    if packed:
        tiles = forward_tiles(spec.head_dim, spec.head_dim_v, chip, max_seqlen_q * spec.group)
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
        sink_dtype=sink_dtype,
    )
    return jit.compiled(("sm80.forward", *astuple(kernel)), functools.partial(kernel.compile, chip), chip)
