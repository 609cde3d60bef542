"""Plan of the Blackwell forward of head dims above 256."""

from __future__ import annotations

import math

from ....core.program import ProgramRef
from ....fwd import plan as forward
from ....fwd.plan import LaunchSizes, Scalars, work_tiles
from ....fwd.splits import JOINING_BYTES, blocks_of_part, choose_splits
from ....fwd.variant import padded_heads_of
from ....runtime.choice import OTHERWISE, Choice, Condition, Rule, choose, given
from ....runtime.conditions import BLOCKS, TuningCase
from ....runtime.device import Chip
from ....runtime.spec import AttentionSpec, ProblemSize
from ...stages import CTA_ROWS, PAIR
from ..plan import l2_group_of
from .config import WidestConfig

RESCALE_THRESHOLD = 8.0
# Keys of a block. Evidence: predicted (`python -m fa4.emulator.timing fwd --head-dim 512 --seqlen 16384`).
TILES = (
    Rule("128 keys", BLOCKS | Condition("head_dim_v above 512", lambda case: case.spec.head_dim_v > 512), 128,
         "a list of blocks may cut 256 keys; O of more columns leaves no tensor memory for two S of 256 keys"),
    Rule("256 keys", OTHERWISE, 256, "products read less of shared memory: d = 512 full 1840, by 128 keys 1629"),
)  # fmt: skip
ROWS = PAIR * CTA_ROWS


class WidestForward(forward.ForwardDirection[WidestConfig]):
    """Forward plan on sm_100 for head dims above 256. `tiles`, the keys of a block, replaces the row of the table."""

    kernel = ProgramRef[WidestConfig]("sm100.fwd.widest", "fa4.sm100.fwd.widest.kernel")

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: int | None = None) -> None:
        self.choice = choose_tiles(spec, extent, chip) if tiles is None else given(tiles)
        self.tiles = tile_n = self.choice.row
        packed = packed_heads(spec)
        count = work_tiles(spec, extent, packed, ROWS)
        self.splits = 1
        if not spec.has_blocks:
            self.splits = choose_splits(spec, count, extent.max_seqlen_k, tile_n, chip.sms // PAIR)
        cfg = WidestConfig(
            **WidestConfig.options(spec, packed, self.splits),
            tile_n=tile_n,
            rescale_threshold=RESCALE_THRESHOLD,
            smem_bytes=chip.smem_per_block - (JOINING_BYTES if self.splits > 1 else 0),
        )
        part_blocks = blocks_of_part(extent.max_seqlen_k, tile_n, self.splits)
        l2_group = l2_group_of(spec, extent, chip, packed)
        sizes = LaunchSizes(extent.max_seqlen_q, extent.batch, l2_group, self.splits, chip.sms, part_blocks)
        super().__init__(chip, cfg, Scalars.of(spec), sizes)

    def __str__(self) -> str:
        parts = f", keys in {self.splits} parts" if self.splits > 1 else ""
        cfg = self.cfg
        return (
            f"forward of wide heads: {cfg.rows} x {cfg.tile_n}, {cfg.kv_stages} K/V stages, packed heads "
            f"{cfg.packed_heads}{parts} ({self.choice.reason})"
        )


def packed_heads(spec: AttentionSpec) -> int:
    """Return the query heads per tile (pack_gqa): the group, if a CTA's rows hold whole queries or one query fills the
    pair's; 1 with a block mask, which may list other blocks for each head."""
    if spec.has_blocks:
        return 1
    fits = padded_heads_of(spec.group) <= CTA_ROWS or spec.group == ROWS
    return spec.group if fits else math.gcd(spec.group, ROWS)


def choose_tiles(spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> Choice[int]:
    """Return the keys of a block."""
    rule = choose(TILES, TuningCase(spec, chip, extent))
    return Choice(rule.row, (rule,))
