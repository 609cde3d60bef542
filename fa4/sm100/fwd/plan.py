"""From a specification to a configuration, and in which order its tiles are worked on."""

from __future__ import annotations

import math

from ...core.variant import Variant
from ...device import Chip
from ...fwd import plan
from ...fwd.plan import Scalars, Sizes
from ...spec import AttentionSpec, Extent
from ..tmem import LANES
from .config import Config
from .kernel import KERNEL
from .tiles import ForwardTiles, tiles_for

# Bytes of K and V that one section of heads may hold at a time: half of the chip's L2, the rest is for Q and out.
SECTION_BYTES = 50 << 20


class Forward(plan.Forward):
    """A forward on sm_100 or sm_103. `tiles` replaces the row of the table, for tuning."""

    kernel = KERNEL

    def __init__(self, spec: AttentionSpec, extent: Extent, chip: Chip, tiles: ForwardTiles | None = None) -> None:
        self.tiles = tiles or tiles_for(spec, chip, extent.max_seqlen_q * _packed_heads(spec))
        cfg = configure(spec, chip, self.tiles)
        sizes = Sizes(extent.max_seqlen_q, extent.batch, _section(spec, extent.max_seqlen_k), 1, chip.sms)
        super().__init__(chip, cfg, Scalars.of(spec), sizes)

    def __str__(self) -> str:
        tiles, cfg = self.tiles, self.cfg
        return (
            f"forward {tiles.name}: {cfg.rows} x {cfg.tile_n}, {cfg.kv_stages} K/V stages, packed heads {cfg.packed}, "
            f"exp2 polynomial {cfg.polynomial}/16, rescale threshold {cfg.rescale_threshold:g}, "
            f"{cfg.schedule.name.lower()} ({tiles.evidence})"
        )


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


def _packed_heads(spec: AttentionSpec) -> int:
    """Query heads packed as neighbouring rows of a tile: a divisor of its 128 rows; 1 where they may have blocks of
    their own."""
    if spec.mods is not None and spec.mods.block is not None:
        return 1
    return math.gcd(spec.group, LANES)


def _section(spec: AttentionSpec, seqlen_k: int) -> int:
    """Key/value heads worked on together: as many as fit in L2 when tiles differ in length, else one at a time."""
    if spec.window_left is None and spec.window_right is None:
        return 1
    per_head = max(seqlen_k, 1) * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    return max(1, min(SECTION_BYTES // per_head, spec.heads_q))
