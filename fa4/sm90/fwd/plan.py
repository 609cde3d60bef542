"""Forward plan: from a specification to a configuration and the order of work tiles."""

from __future__ import annotations

from ...core.program import ProgramRef
from ...fwd import plan
from ...fwd.consumers import packed_heads
from ...fwd.l2_groups import l2_groups
from ...fwd.plan import LaunchSizes, Scalars, work_tiles
from ...fwd.splits import JOINING_BYTES, blocks_of_part, choose_splits
from ...runtime import plan as plans
from ...runtime.choice import columns, given
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, ProblemSize
from ..wgmma import ROWS
from .config import Sm90ForwardConfig
from .tiles import ForwardTiles, tiles_for


class Sm90Forward(plan.ForwardDirection[Sm90ForwardConfig]):
    """Forward plan on sm_90. tiles: replaces the row of the tile table, for tuning."""

    kernel = ProgramRef[Sm90ForwardConfig]("sm90.forward", "fa4.sm90.fwd.kernel")

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles | None = None) -> None:
        self.choice = tiles_for(spec, chip, extent) if tiles is None else given(tiles)
        self.tiles = self.choice.row
        cfg = configure(spec, extent, chip, self.tiles)
        self.splits = splits_for(spec, extent, chip, self.tiles)
        l2_group, most = l2_groups(spec, extent, chip, cfg, self.tiles)
        part_blocks = blocks_of_part(extent.max_seqlen_k, cfg.tile_n, self.splits)
        sizes = LaunchSizes(extent.max_seqlen_q, extent.batch, l2_group, self.splits, chip.sms, part_blocks, most)
        super().__init__(chip, cfg, Scalars.of(spec), sizes)

    def __str__(self) -> str:
        cfg = self.cfg
        parts = f"keys in {self.splits} parts, " if cfg.split else ""
        pairs = "pairs of CTAs, " if cfg.ctas == 2 else ""
        return (
            f"forward {self.choice.name}: {cfg.rows} x {cfg.tile_n}, {cfg.stages} K/V stages, {cfg.packed_heads} heads "
            f"packed, {parts}{pairs}{'ping-pong, ' * cfg.ping_pong}rescale threshold {cfg.rescale_threshold:g}, "
            f"{cfg.schedule.name.lower()} ({self.choice.reason})"
        )


def configure(
    spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles | None = None
) -> Sm90ForwardConfig:
    """Return the compile-time configuration of a problem."""
    tiles = tiles or tiles_for(spec, chip, extent).row
    splits = splits_for(spec, extent, chip, tiles)
    cfg = Sm90ForwardConfig(
        **Sm90ForwardConfig.options(spec, packed_heads(spec, extent, tiles.consumers, tiles.packs_heads), splits),
        **columns(tiles, Sm90ForwardConfig),
        smem_bytes=chip.smem_per_block - (JOINING_BYTES if splits > 1 else 0),
    )
    cfg.check_window(spec.window_left, spec.window_right)
    return cfg


def splits_for(spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles) -> int:
    """Return the number of key parts per work tile (split-KV)."""
    if tiles.splits is not None:
        return tiles.splits
    if spec.has_blocks:
        return 1
    count = work_tiles(
        spec,
        extent,
        packed_heads(spec, extent, tiles.consumers, tiles.packs_heads),
        tiles.ctas * tiles.consumers * ROWS,
    )
    # Few rows: as many parts as keep the memory busy. Keys that are converted need more. Of 4 bits, 128k keys
    # take 130 us with all multiprocessors, 165 us with 6/8 of them.
    is_nvfp4 = spec.cache is not None and spec.cache.is_nvfp4
    eighths = 8 if is_nvfp4 else 7 if tiles.kv8_stages else 6
    slots = chip.sms * eighths // 8 if tiles.consumers == 1 else chip.sms // tiles.ctas
    return choose_splits(spec, count, extent.max_seqlen_k, tiles.tile_n, slots)


class Plan(plans.ForwardBackwardPlan):
    """Plan of the forward alone."""

    directions = Sm90Forward, None
