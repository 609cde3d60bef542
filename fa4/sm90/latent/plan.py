"""Plan of the latent forward."""

from __future__ import annotations

from ...core.program import ProgramRef
from ...fwd import plan as forward
from ...fwd.consumers import packed_heads_of_one
from ...fwd.plan import LaunchSizes, Scalars, work_tiles
from ...fwd.splits import blocks_of_part, choose_splits
from ...runtime import plan
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, ProblemSize
from ..wgmma import ROWS
from .config import TILE_N, LatentConfig

RESCALE_THRESHOLD = 8.0


class LatentForward(forward.ForwardDirection[LatentConfig]):
    """Forward plan on sm_90 for a V that is the first columns of K. Its tiles have no table, so none replace them."""

    kernel = ProgramRef[LatentConfig]("sm90.latent", "fa4.sm90.latent.kernel")

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: None = None) -> None:
        packed = packed_heads_of_one(spec)
        count = work_tiles(spec, extent, packed, ROWS)
        self.splits = choose_splits(spec, count, extent.max_seqlen_k, TILE_N, chip.sms)
        has_single_rows = spec.cache is not None and spec.cache.is_scattered and not spec.cache.converts_kv
        cfg = LatentConfig(
            **LatentConfig.options(spec, packed, self.splits),
            persistent=has_single_rows and self.splits == 1 and not chip.shared,
            tile_n=TILE_N,
            rescale_threshold=RESCALE_THRESHOLD,
            smem_bytes=chip.smem_per_block,
        )
        part_blocks = blocks_of_part(extent.max_seqlen_k, TILE_N, self.splits)
        sizes = LaunchSizes(extent.max_seqlen_q, extent.batch, 1, self.splits, chip.sms, part_blocks)
        super().__init__(chip, cfg, Scalars.of(spec), sizes)

    def __str__(self) -> str:
        parts = f", keys in {self.splits} parts" if self.splits > 1 else ""
        return f"forward of latents: {ROWS} x {TILE_N}, {self.cfg.packed_heads} heads packed{parts}"


class Plan(plan.ForwardBackwardPlan):
    """Plan of a problem with a V that is the first columns of K."""

    directions = LatentForward, None
