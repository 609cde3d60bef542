"""Forward plan: from a specification to a configuration and the order of work tiles."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...core.program import ProgramRef
from ...fwd import plan
from ...fwd.consumers import ROWS, packed_heads
from ...fwd.l2_groups import l2_groups
from ...fwd.plan import LaunchSizes, Scalars, work_tiles
from ...fwd.splits import JOINING_BYTES, blocks_of_part, choose_splits
from ...fwd.variant import RESCALE_THRESHOLD_4BIT, RESCALE_THRESHOLD_8BIT
from ...runtime import nvfp4
from ...runtime.choice import columns, given
from ...runtime.device import Chip
from ...runtime.spec import AttentionInputs, AttentionSpec, Cache, Operands, ProblemSize
from ..product import SCALES_OF_WORD
from .config import E2M1_COLUMNS, Sm120ForwardConfig
from .tiles import ForwardTiles, tiles_for


class Sm120Forward(plan.ForwardDirection[Sm120ForwardConfig]):
    """Forward plan on sm_120 and sm_121. tiles: replaces the row of the tile table, for tuning."""

    kernel = ProgramRef[Sm120ForwardConfig]("sm120.forward", "fa4.sm120.fwd.kernel")

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles | None = None) -> None:
        self.choice = tiles_for(spec, chip, extent) if tiles is None else given(tiles)
        tiles = self.choice.row
        packed = packed_heads(spec, extent, tiles.consumers)
        self.splits = _splits(spec, extent, chip, tiles, packed)
        cfg = Sm120ForwardConfig(
            **Sm120ForwardConfig.options(spec, packed, self.splits),
            **columns(tiles, Sm120ForwardConfig),
            rescale_threshold=RESCALE_THRESHOLD_4BIT if spec.operands is Operands.NVFP4 else RESCALE_THRESHOLD_8BIT,
            smem_bytes=chip.smem_per_block - (JOINING_BYTES if self.splits > 1 else 0),
        )
        l2_group, most = l2_groups(spec, extent, chip, cfg, tiles)
        part_blocks = blocks_of_part(extent.max_seqlen_k, cfg.tile_n, self.splits)
        sizes = LaunchSizes(extent.max_seqlen_q, extent.batch, l2_group, self.splits, chip.sms, part_blocks, most)
        super().__init__(chip, cfg, Scalars.of(spec), sizes)

    def arranged(self, cache: Cache, inputs: AttentionInputs) -> Cache:
        scales = cache.q_scales, cache.k_scales, cache.v_scales
        if self.cfg.multiplies_e2m1:
            scales = _of_e2m1(*scales, inputs.seqused_k, self.cfg.tile_n)
        q, k, v = map(_as_bytes, scales)
        return cache._replace(q_scales=q, k_scales=k, v_scales=v)

    def __str__(self) -> str:
        cfg = self.cfg
        parts = f"keys in {self.splits} parts, " if cfg.split else ""
        return (
            f"forward {self.choice.name}: {cfg.rows} x {cfg.tile_n}, {cfg.stages} K/V stages, {cfg.packed_heads} heads "
            f"packed, {parts}rescale threshold {cfg.rescale_threshold:g}, {cfg.schedule.name.lower()} "
            f"({self.choice.reason})"
        )


def _as_bytes(scales: Tensor) -> Tensor:
    """Return scales as (batch, entries, heads, columns), of packed sequences with a batch of 1, as the kernel reads
    them."""
    scales = scales.view(torch.uint8).contiguous()
    scales = scales if scales.ndim == 4 else scales[None]
    return scales if scales.data_ptr() % 16 == 0 else scales.clone()


def _of_e2m1(q: Tensor, k: Tensor, v: Tensor, used: Tensor | None, tile_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales of 16 numbers in words of four: of q with the columns padded, of k and v as (batch, heads, blocks
    of tile_n keys, bytes). used: keys of each sequence, behind which scales of v become 0: P is 0 there, and 0 times a
    NaN is NaN."""
    if used is not None:
        exists = nvfp4.COLUMNS * torch.arange(v.shape[1], device=v.device) < used[:, None]
        v = torch.where(exists[..., None, None], v, 0)
    groups = tile_n // nvfp4.COLUMNS
    k = functional.pad(k, (0, -k.shape[-1] % SCALES_OF_WORD, 0, 0, 0, -k.shape[1] % tile_n))
    v = functional.pad(v, (0, -v.shape[-1] % E2M1_COLUMNS, 0, 0, 0, -v.shape[1] % groups))
    of_k = k.unflatten(1, (-1, tile_n)).permute(0, 3, 1, 2, 4)  # batch, heads, blocks, keys, columns
    of_v = v.unflatten(1, (-1, groups // SCALES_OF_WORD, SCALES_OF_WORD)).permute(0, 4, 1, 2, 5, 3)
    return functional.pad(q, (0, -q.shape[-1] % SCALES_OF_WORD)), of_k.flatten(3), of_v.flatten(3)


def _splits(spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles, packed: int) -> int:
    """Return the number of key parts per work tile (split-KV)."""
    if spec.has_blocks:
        return 1
    count = work_tiles(spec, extent, packed, tiles.consumers * ROWS)
    return choose_splits(spec, count, extent.max_seqlen_k, tiles.tile_n, chip.sms)
