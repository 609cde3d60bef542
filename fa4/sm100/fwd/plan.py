"""From a specification to a launch: configuration, compiled kernel, arguments."""

from __future__ import annotations

import ctypes
import functools
import math

from torch import Tensor

from ... import jit
from ...core.arguments import (
    LOG2_E,
    compile_key,
    fake_lengths,
    fake_matrices,
    fake_rows,
    fake_sink,
    lengths,
    windows,
)
from ...core.variant import Variant
from ...device import Chip
from ...spec import AttentionInputs, AttentionSpec, Extent
from ..tmem import LANES
from .config import Config
from .tiles import ForwardTiles, tiles_for

# Bytes of K and V that one section of heads may hold at a time: half of the chip's L2, the rest is for Q and out.
SECTION_BYTES = 50 << 20


class Forward:
    """One kind of problem: its tiles, its kernel, its launch. `tiles` replaces the row of the table, for tuning."""

    def __init__(self, spec: AttentionSpec, extent: Extent, chip: Chip, tiles: ForwardTiles | None = None) -> None:
        self.spec, self.extent, self.chip = spec, extent, chip
        self.tiles = tiles or tiles_for(spec, chip, extent.max_seqlen_q * _packed_heads(spec))
        scale = spec.softcap or spec.softmax_scale
        scale_log2 = ctypes.c_float(scale * LOG2_E).value
        over_cap = spec.softmax_scale / spec.softcap if spec.softcap else 0.0
        self.scales = (scale_log2, scale / scale_log2, over_cap)
        section = _section(spec, extent.max_seqlen_k)
        self.counts = (*windows(spec), extent.max_seqlen_q, extent.batch, section, chip.sms)

    def __str__(self) -> str:
        tiles, cfg = self.tiles, configure(self.spec, self.chip, self.tiles)
        return (
            f"forward {tiles.name}: {cfg.rows} x {cfg.tile_n}, {cfg.kv_stages} K/V stages, packed heads {cfg.packed}, "
            f"exp2 polynomial {cfg.polynomial}/16, rescale threshold {cfg.rescale_threshold:g}, "
            f"{cfg.schedule.name.lower()} ({tiles.evidence})"
        )

    def launch(self, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        tensors = (inputs.q, inputs.k, inputs.v, out, lse, inputs.sink, *lengths(inputs))
        self._kernel(*tensors, *self.scales, *self.counts)

    @functools.cached_property
    def _kernel(self) -> jit.Launcher:
        cfg = configure(self.spec, self.chip, self.tiles)
        return jit.compiled(compile_key("sm100.forward", cfg), functools.partial(build, cfg, self.chip), self.chip)


def configure(spec: AttentionSpec, chip: Chip, tiles: ForwardTiles | None = None) -> Config:
    """The compile-time side of a problem."""
    tiles = tiles or tiles_for(spec, chip)
    return Config(
        **Variant.fields(spec),
        packed=_packed_heads(spec),
        schedule=tiles.schedule,
        polynomial=tiles.polynomial,
        rescale_threshold=tiles.rescale_threshold,
        sawtooth=tiles.sawtooth,
        ctas=tiles.ctas,
        q_tiles=tiles.q_tiles,
        smem_bytes=chip.smem_per_block,
    )


def build(cfg: Config, chip: Chip):
    """Compile the kernel of a configuration, without any tensor."""
    from cutlass import Float32, Int32

    from .kernel import forward

    tensors = (*fake_matrices(cfg, 4), fake_rows(cfg), fake_sink(cfg), *fake_lengths(cfg))
    scalars = [Float32(0.0)] * 3 + [Int32(0)] * 6
    return jit.compile_kernel(forward, *tensors, *scalars, cfg, jit.current_stream(), chip=chip)


def _packed_heads(spec: AttentionSpec) -> int:
    """Query heads packed as neighbouring rows of a tile: a divisor of its 128 rows."""
    return math.gcd(spec.group, LANES)


def _section(spec: AttentionSpec, seqlen_k: int) -> int:
    """Key/value heads worked on together: as many as fit in L2 when tiles differ in length, else one at a time."""
    if spec.window_left is None and spec.window_right is None:
        return 1
    per_head = max(seqlen_k, 1) * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    return max(1, min(SECTION_BYTES // per_head, spec.heads_q))
