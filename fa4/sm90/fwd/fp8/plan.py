"""Plan of the e4m3 forward."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....core.program import ProgramRef
from ....fwd import plan as forward
from ....fwd.l2_groups import l2_groups
from ....fwd.launchers import TRANSPOSE, TRANSPOSED_KEYS, TransposeConfig
from ....fwd.plan import LaunchSizes, Scalars
from ....fwd.variant import RESCALE_THRESHOLD_8BIT
from ....mods.ir.record import Mods
from ....runtime import jit, plan
from ....runtime.device import Chip
from ....runtime.memory import empty
from ....runtime.spec import AttentionInputs, AttentionSpec, Cache, ProblemSize
from ..tiles import ForwardTiles
from .config import Fp8Config

TILE_N = 128
LINE = 8  # of narrow heads, where exponentials take twice the cycles of the products


class Fp8Forward(forward.ForwardDirection[Fp8Config]):
    """Forward plan on sm_90 of e4m3 q, k and v. Its tiles have no table, so none replace them."""

    kernel = ProgramRef[Fp8Config]("sm90.fp8", "fa4.sm90.fwd.fp8.kernel")

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: None = None) -> None:
        widest = max(spec.head_dim, spec.head_dim_v)
        cfg = Fp8Config(
            **Fp8Config.options(spec, 1, 1),
            tile_n=TILE_N,
            consumers=3 if widest <= 128 else 2,
            rescale_threshold=RESCALE_THRESHOLD_8BIT,
            smem_bytes=chip.smem_per_block,
            persistent=not chip.shared,
            line=LINE if widest <= 64 else 0,
        )
        l2_group, most = l2_groups(spec, extent, chip, cfg, ForwardTiles(cfg.consumers, TILE_N))
        sizes = LaunchSizes(extent.max_seqlen_q, extent.batch, l2_group, 1, chip.sms, most_l2_groups=most)
        super().__init__(chip, cfg, Scalars.of(spec), sizes)

    def __str__(self) -> str:
        cfg = self.cfg
        return f"forward of e4m3: {cfg.rows} x {cfg.tile_n}, {cfg.stages} K/V stages, after a transposition of v"

    def launch(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, mods: Mods | None = None, cache: Cache | None = None
    ) -> None:
        v = inputs.v.view(torch.uint8)
        batch, keys, heads, columns = v.shape
        padded = -(-keys // TRANSPOSED_KEYS) * TRANSPOSED_KEYS
        by_column = empty((batch, heads, columns, padded), torch.uint8, v.device)
        self._transpose(v, by_column, inputs.seqused_k)
        super().launch(inputs._replace(v=by_column.transpose(1, 2)), out, lse, mods, cache)

    def compile(self) -> None:
        assert self._transpose is not None
        super().compile()

    @functools.cached_property
    def _transpose(self) -> jit.Launcher:
        return TRANSPOSE.launcher(TransposeConfig(self.cfg.head_dim_v, self.cfg.has_seqused_k), self.chip)


class Plan(plan.ForwardBackwardPlan):
    """Plan of a problem of e4m3 q, k and v."""

    directions = Fp8Forward, None
