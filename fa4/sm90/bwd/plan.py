"""From a specification to a configuration."""

from __future__ import annotations

from ...bwd import plan
from ...core.variant import Variant
from ...device import Chip
from ...spec import AttentionSpec, Extent
from .config import TILE_N, Config
from .kernel import KERNEL
from .tiles import BackwardTiles, tiles_for


class Backward(plan.Backward):
    """A backward on sm_90. `tiles` replaces the row of the table, for tuning."""

    kernel = KERNEL

    def __init__(self, spec: AttentionSpec, extent: Extent, chip: Chip, tiles: BackwardTiles | None = None) -> None:
        super().__init__(spec, extent, chip)
        self.tiles = tiles or tiles_for(spec, chip)

    def __str__(self) -> str:
        tiles, cfg = self.tiles, self.config(has_dlse=False)
        shape = f"{cfg.tile_m} x {TILE_N}, {cfg.q_stages} + {cfg.stages} stages, group {cfg.group}"
        return f"backward {tiles.name}: {shape} ({tiles.evidence})"

    def config(self, has_dlse: bool) -> Config:
        return configure(self.spec, self.chip, has_dlse, self.tiles)


def configure(spec: AttentionSpec, chip: Chip, has_dlse: bool, tiles: BackwardTiles | None = None) -> Config:
    """The compile-time side of a problem."""
    tiles = tiles or tiles_for(spec, chip)
    return Config(
        **Variant.fields(spec, backward=True, has_dlse=has_dlse),
        tile_m=tiles.tile_m,
        q_stages=tiles.q_stages,
        stages=tiles.stages,
        overlapped=tiles.overlapped,
        sms=chip.sms,
        smem_bytes=chip.smem_per_block,
    )
