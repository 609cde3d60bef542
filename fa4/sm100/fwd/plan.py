"""Plan of the Blackwell forward: configuration, split-KV and L2 swizzle groups of a specification."""

from __future__ import annotations

import math
from dataclasses import replace

from ...core.program import ProgramRef
from ...fwd import plan
from ...fwd.l2_groups import even_l2_group
from ...fwd.plan import LaunchSizes, Scalars, work_tiles
from ...fwd.splits import JOINING_BYTES, blocks_of_part, choose_splits
from ...fwd.variant import RESCALE_THRESHOLD_8BIT
from ...pipeline.smem import SWIZZLE_ALIGN
from ...runtime.choice import columns, given
from ...runtime.device import Chip
from ...runtime.spec import AttentionInputs, AttentionSpec, Cache, ProblemSize
from ..tensor_memory import LANES
from .config import Schedule, Sm100ForwardConfig
from .scale_chunks import in_chunks
from .tiles import ForwardTiles, are_few, tiles_for

LOADS_MAXIMUM = (103,)  # chips with tcgen05.ld.red

# Share of the L2 for K and V of one L2 swizzle group; Q and out use the rest.
L2_SHARE = 0.4


class Sm100Forward(plan.ForwardDirection[Sm100ForwardConfig]):
    """Forward plan for sm_100 and sm_103. `tiles` replaces the row of the table, for tuning."""

    kernel = ProgramRef[Sm100ForwardConfig]("sm100.forward", "fa4.sm100.fwd.kernel")

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles | None = None) -> None:
        self.choice = tiles_for(spec, chip, extent) if tiles is None else given(tiles)
        self.tiles = self.choice.row
        self.splits = _splits(spec, extent, chip, self.tiles)
        cfg = configure(spec, chip, self.tiles, self.splits)
        part_blocks = blocks_of_part(extent.max_seqlen_k, cfg.tile_n, self.splits)
        l2_group = l2_group_of(spec, extent, chip, cfg.packed_heads)
        sizes = LaunchSizes(extent.max_seqlen_q, extent.batch, l2_group, self.splits, chip.sms, part_blocks)
        super().__init__(chip, cfg, Scalars.of(spec), sizes)

    def arranged(self, cache: Cache, inputs: AttentionInputs) -> Cache:
        return in_chunks(cache, inputs, self.cfg)

    def __str__(self) -> str:
        cfg = self.cfg
        parts = f"keys in {self.splits} parts, " if cfg.split else ""
        return (
            f"forward {self.choice.name}: {cfg.rows} x {cfg.tile_n}, {cfg.kv_stages} K/V stages, packed heads "
            f"{cfg.packed_heads}, {parts}exp2 polynomial {cfg.polynomial}/16, rescale threshold "
            f"{cfg.rescale_threshold:g}, {cfg.schedule.name.lower()} ({self.choice.reason})"
        )


def configure(
    spec: AttentionSpec, chip: Chip, tiles: ForwardTiles | None = None, splits: int = 1
) -> Sm100ForwardConfig:
    """Return the compile-time configuration of a problem."""
    tiles = tiles or tiles_for(spec, chip).row
    if spec.operands is not None:
        tiles = replace(tiles, rescale_threshold=RESCALE_THRESHOLD_8BIT)
    options, is_split = Sm100ForwardConfig.options(spec, _packed_heads(spec, tiles), splits), splits > 1
    if is_split:  # there are too few CTAs for pairs; a single CTA holds few blocks of 128 wide keys
        tile_n = 64 if tiles.s_stages > 1 else tiles.tile_n
        tiles = replace(tiles, schedule=Schedule.SINGLE, ctas=1, tile_n=tile_n, direct_store=True)
    changes_scores = spec.mods is not None or bool(spec.softcap)
    return Sm100ForwardConfig(
        **options,
        **columns(tiles, Sm100ForwardConfig),
        loads_maximum=chip.number in LOADS_MAXIMUM and not changes_scores,
        smem_bytes=_smem_share(chip, tiles.per_sm, JOINING_BYTES if is_split else 0),
    )


_RESERVED = 1 << 10  # bytes of shared memory that every CTA sets aside


def _smem_share(chip: Chip, per_sm: int, reserved_bytes: int) -> int:
    """Shared-memory bytes of each of `per_sm` CTAs, in multiples of SWIZZLE_ALIGN. Other kernels get reserved_bytes."""
    return ((chip.smem_per_block + _RESERVED - reserved_bytes) // per_sm - _RESERVED) // SWIZZLE_ALIGN * SWIZZLE_ALIGN


def _packed_heads(spec: AttentionSpec, tiles: ForwardTiles) -> int:
    """Query heads packed into neighbouring rows of a tile (pack_gqa).

    A divisor of 128; with few queries the whole group, because O is stored row by row. 1 with a block mask, which may
    list other blocks for each head.
    """
    if spec.has_blocks:
        return 1
    pads_rows = tiles.direct_store and tiles.q_tiles == 1
    return spec.group if pads_rows and spec.group <= LANES else math.gcd(spec.group, LANES)


def _splits(spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles) -> int:
    """Return the number of split-KV parts. Training with many queries is not split: no prediction exists for it."""
    if spec.has_blocks or (spec.needs_backward and not are_few(spec, extent)):
        return 1
    if tiles.splits is not None:
        return tiles.splits
    packed = _packed_heads(spec, tiles)
    count = work_tiles(spec, extent, packed, tiles.q_tiles * LANES)
    return choose_splits(spec, count, extent.max_seqlen_k, tiles.tile_n, chip.sms * tiles.per_sm)


def l2_group_of(spec: AttentionSpec, extent: ProblemSize, chip: Chip, packed: int) -> int:
    """(head, sequence) pairs that advance together: as many as fit in L2 if tiles differ in length, else 1."""
    if spec.window_left is None and spec.window_right is None and not spec.has_blocks:
        return 1
    pair_bytes = max(extent.max_seqlen_k, 1) * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    heads = spec.heads_q // packed
    return even_l2_group(int(L2_SHARE * chip.l2) // pair_bytes, heads if spec.varlen else heads * extent.batch)
