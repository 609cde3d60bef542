"""From a specification to a launch: configuration, compiled kernel, outputs, arguments."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from ... import fallback, jit
from ...device import Chip
from ...fwd.arguments import fake_lengths, lengths, prepared, windows
from ...spec import AttentionInputs, AttentionSpec
from ..arguments import LOG2_E, addressable, compile_key, fake_matrices, fake_rows, fake_sink
from .config import TILE_M, TILE_N, Config
from .tiles import ForwardTiles, tiles_for

# Bytes of K and V that one section of heads may hold at a time: half of the chip's L2, the rest is for Q and out.
SECTION_BYTES = 50 << 20


def describe(spec: AttentionSpec, chip: Chip) -> str:
    """The tile row and what follows from it, in one line."""
    tiles, cfg = tiles_for(spec, chip), configure(spec, chip)
    return (
        f"sm100 forward {tiles.name}: {cfg.rows} x {TILE_N}, {cfg.kv_stages} K/V stages, group {cfg.group}, "
        f"exp2 polynomial {cfg.polynomial}/16, rescale threshold {cfg.rescale_threshold:g}, {cfg.schedule.name.lower()}"
        f" ({tiles.evidence})"
    )


def forward(
    inputs: AttentionInputs, spec: AttentionSpec, chip: Chip, tiles: ForwardTiles | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse): out like q with head_dim_v columns, lse float32 (batch, heads, rows) or varlen (heads, rows).

    `tiles` replaces the row of the table, for tuning.
    """
    if inputs.q.numel() == 0 or inputs.k.numel() == 0:  # no row sees a key; a TMA map cannot be empty
        return fallback.forward(inputs, spec, chip)
    inputs, scale = prepared(inputs, spec)
    q, k, v = (addressable(x) for x in (inputs.q, inputs.k, inputs.v))
    out = torch.empty(*q.shape[:-1], spec.head_dim_v, dtype=q.dtype, device=q.device)
    lse_shape = (spec.heads_q, q.shape[0]) if spec.varlen else (q.shape[0], spec.heads_q, q.shape[1])
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    scale_log2 = ctypes.c_float((spec.softcap or scale) * LOG2_E).value
    tiles = tiles or tiles_for(spec, chip, inputs.max_seqlen_q * _packed_heads(spec))
    _launcher(spec, chip, tiles)(
        q,
        k,
        v,
        out,
        lse,
        None if inputs.sink is None else inputs.sink.float(),
        *lengths(inputs),
        scale_log2,
        (spec.softcap or scale) / scale_log2,
        scale / spec.softcap if spec.softcap else 0.0,
        *windows(spec),
        inputs.max_seqlen_q,
        inputs.batch,
        _section(spec, inputs.max_seqlen_k),
        chip.sms,
    )
    return out, lse


def configure(spec: AttentionSpec, chip: Chip, tiles: ForwardTiles | None = None) -> Config:
    """The compile-time side of a problem."""
    tiles = tiles or tiles_for(spec, chip)
    return Config(
        dtype=jit.dsl_dtype(spec.dtype),
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        queries_per_kv=spec.group,
        group=_packed_heads(spec),
        has_left=spec.window_left is not None,
        has_right=spec.window_right is not None,
        has_softcap=spec.softcap > 0,
        has_sink=spec.has_sink,
        varlen=spec.varlen,
        has_seqused_q=spec.has_seqused_q,
        has_seqused_k=spec.has_seqused_k,
        schedule=tiles.schedule,
        polynomial=tiles.polynomial,
        rescale_threshold=tiles.rescale_threshold,
        sawtooth=tiles.sawtooth,
        ctas=tiles.ctas,
        smem_bytes=chip.smem_per_block,
    )


@functools.lru_cache(maxsize=1024)
def _launcher(spec: AttentionSpec, chip: Chip, tiles: ForwardTiles) -> jit.Launcher:
    cfg = configure(spec, chip, tiles)
    return jit.compiled(compile_key("sm100.forward", cfg), functools.partial(build, cfg, chip), chip)


def build(cfg: Config, chip: Chip):
    """Compile the kernel of a configuration, without any tensor."""
    from cutlass import Float32, Int32

    from .kernel import forward

    tensors = (*fake_matrices(cfg, 4), fake_rows(cfg), fake_sink(cfg), *fake_lengths(cfg))
    scalars = [Float32(0.0)] * 3 + [Int32(0)] * 6
    return jit.compile_kernel(forward, *tensors, *scalars, cfg, jit.current_stream(), chip=chip)


def _packed_heads(spec: AttentionSpec) -> int:
    """Query heads packed as neighbouring rows of a tile: a divisor of its 128 rows."""
    return math.gcd(spec.group, TILE_M)


def _section(spec: AttentionSpec, seqlen_k: int) -> int:
    """Key/value heads worked on together: as many as fit in L2 when tiles differ in length, else one at a time."""
    if spec.window_left is None and spec.window_right is None:
        return 1
    per_head = max(seqlen_k, 1) * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    return max(1, min(SECTION_BYTES // per_head, spec.heads_q))
