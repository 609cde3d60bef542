"""Plan of the portable kernels: tiles, pack_gqa, split-KV and L2 swizzle groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..bwd.plan import BackwardDirection
from ..core.program import ProgramRef
from ..core.variant import windows
from ..fwd.plan import ForwardDirection, LaunchSizes
from ..fwd.splits import blocks_of_part, choose_splits
from ..mods.frontend.coarse import mask_of_groups, to_head_groups
from ..runtime import plan
from ..runtime.choice import given
from ..runtime.device import Chip
from ..runtime.spec import AttentionInputs, AttentionSpec, Gradients, ProblemSize, Saved
from .config import Scalars, Sm80BackwardConfig, Sm80ForwardConfig
from .tiles import BackwardTiles, ForwardTiles, backward_tiles, forward_l2_group, forward_tiles, v_slices


class Sm80Forward(ForwardDirection[Sm80ForwardConfig]):
    """Forward plan for any chip with cp.async and mma.sync. `tiles` replaces the row of the table, for tuning."""

    kernel = ProgramRef[Sm80ForwardConfig]("sm80.forward", "fa4.sm80.forward")

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles | None = None) -> None:
        dims, rows, heads = (spec.head_dim, spec.head_dim_v), extent.max_seqlen_q, spec.heads_q
        # batch_invariant: the order of a row's sums must not depend on the number of queries of other sequences.
        replaced = None if tiles is None else given(tiles)
        choice = replaced or forward_tiles(*dims, chip, 1 if spec.batch_invariant else rows)
        # Packing is faster if the query rows of one head leave half of a tile empty.
        packed = spec.group if 2 * rows <= choice.row.tile_m or spec.batch_invariant else 1
        packed = 1 if spec.has_blocks else packed  # query heads may have their own block lists
        if packed > 1:
            rows, heads = rows * packed, spec.heads_kv
            choice = choice if spec.batch_invariant else replaced or forward_tiles(*dims, chip, rows)
        self.choice, chosen = choice, choice.row
        work_tiles = -(-rows // chosen.tile_m) * heads * extent.batch * v_slices(spec.head_dim_v)
        cta_slots = chip.sms * chosen.blocks_per_sm
        if not spec.has_blocks:
            self.splits = choose_splits(spec, work_tiles, extent.max_seqlen_k, chosen.tile_n, cta_slots, busy=0.5)
        cfg = Sm80ForwardConfig(**Sm80ForwardConfig.options(spec, packed, self.splits), tiles=chosen)
        l2_group = forward_l2_group(spec, chip, extent.max_seqlen_k)
        part_blocks = blocks_of_part(extent.max_seqlen_k, chosen.tile_n, self.splits)
        sizes = LaunchSizes(extent.max_seqlen_q, extent.batch, l2_group, self.splits, chip.sms, part_blocks)
        super().__init__(chip, cfg, Scalars(spec.softmax_scale, spec.softcap, *windows(spec)), sizes)

    def __str__(self) -> str:
        parts = f", keys in {self.splits} parts" if self.splits > 1 else ""
        packed = ", packed heads" if self.cfg.packed_heads > 1 else ""
        return f"forward {self.cfg.tiles}{packed}{parts} ({self.choice.reason})"


class Sm80Backward(BackwardDirection):
    """Backward plan for any chip with cp.async and mma.sync. A tile has the rows of all heads of a group. If a block
    mask has lists per head (`by_head`), the kernel visits the union of their blocks and masks by a table per head."""

    kernel = ProgramRef[Sm80BackwardConfig]("sm80.backward", "fa4.sm80.backward")

    def __init__(
        self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: BackwardTiles | None = None
    ) -> None:
        self.by_head = spec.mods if spec.group > 1 and spec.mods is not None and spec.mods.heads_differ else None
        if self.by_head is not None:
            spec = replace(spec, mods=replace(self.by_head, mask=mask_of_groups(self.by_head), heads_differ=False))
        super().__init__(spec, extent, chip)
        dims = spec.head_dim, spec.head_dim_v
        self.choice = backward_tiles(*dims, chip, spec.has_dropout) if tiles is None else given(tiles)
        self.tiles = self.choice.row

    def __str__(self) -> str:
        return f"backward {self.tiles} ({self.choice.reason})"

    def launch(self, inputs: AttentionInputs, saved: Saved, grads: Gradients, *extra: Any) -> Tensor | None:
        if self.by_head is not None:
            mods, captured = extra
            extra = to_head_groups(mods, inputs.batch, self.spec.heads_q, self.spec.group), [*captured, None]
        return super().launch(inputs, saved, grads, *extra)

    def config(self, has_dlse: bool) -> Sm80BackwardConfig:
        fields = Sm80BackwardConfig.fields(self.spec, backward=True, has_dlse=has_dlse)
        return Sm80BackwardConfig(**fields, tiles=self.tiles)


class Plan(plan.ForwardBackwardPlan):
    """Plan of a problem on any chip with cp.async and mma.sync."""

    layout = plan.Layout.ROWS
    directions = Sm80Forward, Sm80Backward
