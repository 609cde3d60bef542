"""The plan of the portable kernels: which tiles, and how many blocks share a tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from .. import plan
from ..bwd.plan import Backward as BackwardPlan
from ..core.arguments import windows
from ..device import Chip
from ..fwd.plan import Forward as ForwardPlan
from ..fwd.splits import blocks_of_part, choose_splits
from ..mods.coarse import mask_of_groups, of_groups
from ..spec import AttentionInputs, AttentionSpec, Gradients, ProblemSize, Saved
from . import backward, forward
from .config import BackwardConfig, ForwardConfig
from .tiles import BackwardTiles, ForwardTiles, backward_tiles, forward_l2_group, forward_tiles


class Forward(ForwardPlan):
    """A forward on any chip with cp.async and mma.sync."""

    kernel = forward.KERNEL

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles | None = None) -> None:
        dims, rows, heads = (spec.head_dim, spec.head_dim_v), extent.max_seqlen_q, spec.heads_q
        # What a row's sums are made of must not depend on how many queries others have.
        own = tiles or forward_tiles(*dims, chip, 1 if spec.batch_invariant else rows)
        # Packing pays as soon as the query rows of one head leave half of a tile empty.
        packed = spec.group if 2 * rows <= own.tile_m or spec.batch_invariant else 1
        packed = 1 if spec.has_blocks else packed  # query heads may have blocks of their own
        if packed > 1:
            rows, heads = rows * packed, spec.heads_kv
            own = own if spec.batch_invariant else tiles or forward_tiles(*dims, chip, rows)
        count = -(-rows // own.tile_m) * heads * extent.batch
        slots = chip.sms * own.blocks_per_sm
        if not spec.has_blocks:
            self.splits = choose_splits(spec, count, extent.max_seqlen_k, own.tile_n, slots, busy=0.5)
        fields = ForwardConfig.fields(spec)
        fields["has_sink"] &= self.splits == 1  # whoever joins the parts adds it
        is_split = self.splits > 1
        fixed = is_split and spec.batch_invariant
        cfg = ForwardConfig(**fields, tiles=own, packed=packed, split=is_split, fixed_parts=fixed)
        l2_group = forward_l2_group(spec, extent.max_seqlen_k)
        part_blocks = blocks_of_part(extent.max_seqlen_k, own.tile_n, self.splits)
        sizes = forward.LaunchSizes(extent.max_seqlen_q, extent.batch, l2_group, self.splits, part_blocks)
        super().__init__(chip, cfg, forward.Scalars(spec.softmax_scale, spec.softcap, *windows(spec)), sizes)

    def __str__(self) -> str:
        parts = f", keys in {self.splits} parts" if self.splits > 1 else ""
        return f"forward {self.cfg.tiles}{', packed heads' if self.cfg.packed > 1 else ''}{parts}"


class Backward(BackwardPlan):
    """A backward on any chip with cp.async and mma.sync. The heads of a group are rows of one tile: where a block mask
    has lists for each of them (`by_head`), it walks all that one of them has, and asks a table which are whose."""

    kernel = backward.KERNEL

    def __init__(
        self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: BackwardTiles | None = None
    ) -> None:
        self.by_head = spec.mods if spec.group > 1 and spec.mods is not None and spec.mods.heads_differ else None
        if self.by_head is not None:
            spec = replace(spec, mods=replace(self.by_head, mask=mask_of_groups(self.by_head), heads_differ=False))
        super().__init__(spec, extent, chip)
        self.tiles = tiles or backward_tiles(spec.head_dim, spec.head_dim_v, chip, spec.has_dropout)

    def __str__(self) -> str:
        return f"backward {self.tiles}"

    def launch(self, inputs: AttentionInputs, saved: Saved, grads: Gradients, *extra: Any) -> Tensor | None:
        if self.by_head is not None:
            mods, captured = extra
            extra = of_groups(mods, inputs.batch, self.spec.heads_q, self.spec.group), [*captured, None]
        return super().launch(inputs, saved, grads, *extra)

    def config(self, has_dlse: bool) -> BackwardConfig:
        fields = BackwardConfig.fields(self.spec, backward=True, has_dlse=has_dlse)
        return BackwardConfig(**fields, tiles=self.tiles)


class Plan(plan.Directions):
    """A problem on any chip with cp.async and mma.sync."""

    layout = plan.Layout.ROWS
    directions = Forward, Backward
