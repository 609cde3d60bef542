"""Plan of the forward of head dims above 256."""

from __future__ import annotations

from ....core.program import ProgramRef
from ....fwd import plan as forward
from ....fwd.consumers import packed_heads_of_one
from ....fwd.l2_groups import l2_group_of_single
from ....fwd.plan import LaunchSizes, Scalars, work_tiles
from ....fwd.splits import blocks_of_part, choose_splits
from ....runtime import plan
from ....runtime.device import Chip
from ....runtime.spec import AttentionSpec, ProblemSize
from ...wgmma import ROWS
from .config import CONSUMERS, TILE_N, Sm90WidestConfig

RESCALE_THRESHOLD = 8.0
L2_SHARE = 0.5  # for K and V; the rest is for Q and O


class WidestForward(forward.ForwardDirection[Sm90WidestConfig]):
    """Forward plan on sm_90 of head dims above 256. Its tiles have no table, so none replace them."""

    kernel = ProgramRef[Sm90WidestConfig]("sm90.widest", "fa4.sm90.fwd.widest.kernel")

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: None = None) -> None:
        is_short = 2 * extent.max_seqlen_q <= CONSUMERS * ROWS and not spec.has_blocks
        packed = packed_heads_of_one(spec) if is_short else 1
        count = work_tiles(spec, extent, packed, CONSUMERS * ROWS)
        pairs = chip.sms // Sm90WidestConfig.ctas
        self.splits = 1 if spec.has_blocks else choose_splits(spec, count, extent.max_seqlen_k, TILE_N, pairs)
        cfg = Sm90WidestConfig(
            **Sm90WidestConfig.options(spec, packed, self.splits),
            tile_n=TILE_N,
            rescale_threshold=RESCALE_THRESHOLD,
            smem_bytes=chip.smem_per_block,
        )
        part_blocks = blocks_of_part(extent.max_seqlen_k, TILE_N, self.splits)
        l2_group = l2_group_of_single(spec, extent, cfg, int(L2_SHARE * chip.l2))
        sizes = LaunchSizes(extent.max_seqlen_q, extent.batch, l2_group, self.splits, chip.sms, part_blocks)
        super().__init__(chip, cfg, Scalars.of(spec), sizes)

    def __str__(self) -> str:
        parts = f", keys in {self.splits} parts" if self.splits > 1 else ""
        return (
            f"forward of head dims above 256: {CONSUMERS * ROWS} x {TILE_N}, pairs of CTAs, {self.cfg.stages} stages, "
            f"{self.cfg.packed_heads} heads packed{parts}"
        )


class Plan(plan.ForwardBackwardPlan):
    """Plan of a problem with head dims above 256."""

    directions = WidestForward, None
