"""From a specification to a configuration, and in which order its tiles are worked on."""

from __future__ import annotations

import math

from ...core.variant import Variant
from ...device import Chip
from ...fwd import plan
from ...fwd.plan import Scalars, Sizes
from ...spec import AttentionSpec, Extent
from ..fragment import ROWS_PER_WARP
from ..wgmma import ROWS
from .config import Config, Schedule
from .kernel import KERNEL
from .tiles import ForwardTiles, tiles_for

# Bytes of K and V that one section of pairs may hold at a time: half of the chip's L2, the rest is for Q and out.
SECTION_BYTES = 25 << 20


class Forward(plan.Forward):
    """A forward on sm_90. `tiles` replaces the row of the table, for tuning."""

    kernel = KERNEL

    def __init__(self, spec: AttentionSpec, extent: Extent, chip: Chip, tiles: ForwardTiles | None = None) -> None:
        self.tiles = tiles or tiles_for(spec, extent)
        cfg = configure(spec, extent, chip, self.tiles)
        sizes = Sizes(extent.max_seqlen_q, extent.batch, _section(spec, extent, chip, cfg), chip.sms)
        super().__init__(chip, cfg, Scalars.of(spec), sizes)

    def __str__(self) -> str:
        tiles, cfg = self.tiles, self.cfg
        return (
            f"forward {tiles.name}: {cfg.rows} x {cfg.tile_n}, {cfg.stages} K/V stages, {cfg.packed} heads packed, "
            f"{'ping-pong, ' * cfg.ping_pong}rescale threshold {cfg.rescale_threshold:g}, "
            f"{cfg.schedule.name.lower()} ({tiles.evidence})"
        )


def configure(spec: AttentionSpec, extent: Extent, chip: Chip, tiles: ForwardTiles | None = None) -> Config:
    """The compile-time side of a problem."""
    tiles = tiles or tiles_for(spec, extent)
    # Packing pays where one head's rows would leave half of a tile empty.
    is_short = 2 * extent.max_seqlen_q <= tiles.teams * ROWS
    return Config(
        **Variant.fields(spec),
        packed=math.gcd(spec.group, ROWS_PER_WARP) if is_short else 1,
        teams=tiles.teams,
        tile_n=tiles.tile_n,
        schedule=tiles.schedule,
        ping_pong=tiles.ping_pong,
        rescale_threshold=tiles.rescale_threshold,
        smem_bytes=chip.smem_per_block,
    )


def _section(spec: AttentionSpec, extent: Extent, chip: Chip, cfg: Config) -> int:
    """Pairs of head and sequence that advance together, longest tiles first; one where all tiles are equally long.

    Where each tile has its CTA, as many pairs as L2 holds, in sections of the same size. A persistent grid goes to and
    fro in whole rounds, so that every CTA gets the same share of each section.
    """
    pairs = spec.heads_q // cfg.packed * extent.batch
    if spec.window_right is None or spec.window_left is not None:
        return 1
    keys = extent.max_seqlen_k * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    per_pair = max(keys * cfg.packed // spec.group, 1)
    if cfg.schedule is Schedule.SINGLE:
        return -(-pairs // -(-pairs * per_pair // SECTION_BYTES))
    round_trip = 2 * chip.sms
    m_blocks = -(-extent.max_seqlen_q * cfg.packed // cfg.rows)
    least = round_trip // math.gcd(round_trip, m_blocks)
    return min(max(SECTION_BYTES // (least * per_pair), 1) * least, pairs)
