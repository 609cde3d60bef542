"""Plan of the Blackwell backward: configuration of a specification."""

from __future__ import annotations

from typing import Any

import torch

from ...bwd import plan
from ...core.program import ProgramRef
from ...core.variant import Variant
from ...runtime.choice import columns, given
from ...runtime.conditions import MANY
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, GradientOperands, ProblemSize, ds_dtype
from ..stages import is_widest
from .config import Sm100BackwardConfig, Sm100BackwardSteps
from .scale_chunks import in_chunks
from .tiles import BackwardTiles, tiles_for
from .wide.config import Sm100WideConfig
from .widest.config import Sm100WidestConfig

KERNEL = ProgramRef[Any]("sm100.backward", "fa4.sm100.bwd.kernel")
WIDE = ProgramRef[Any]("sm100.wide", "fa4.sm100.bwd.wide.kernel")
WIDEST = ProgramRef[Any]("sm100.bwd.widest", "fa4.sm100.bwd.widest.kernel")


class Sm100Backward(plan.BackwardDirection):
    """Backward plan for sm_100 and sm_103. `tiles` replaces the row of the table, for tuning."""

    def __init__(
        self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: BackwardTiles | None = None
    ) -> None:
        super().__init__(spec, extent, chip)
        self.choice = tiles_for(spec, chip) if tiles is None else given(tiles)
        self.tiles = self.choice.row
        _, self.kernel = _form(spec, self.tiles)

    def __str__(self) -> str:
        cfg = self.config(has_dlse=False)
        stages = "a kernel for each of dV, dK and dQ"
        if isinstance(cfg, Sm100BackwardConfig):
            stages = f"{cfg.q_stages} Q and {cfg.do_stages} dO stages"
        return (
            f"backward {self.choice.name}: {cfg.tile_m} x {cfg.cluster_tile_n}, {stages}, group {cfg.group}, "
            f"exp2 polynomial {cfg.polynomial}/16 ({self.choice.reason})"
        )

    def config(self, has_dlse: bool) -> Sm100BackwardSteps:
        return configure(self.spec, self.chip, has_dlse, self.tiles, self.extent)

    def arranged(self, operands: GradientOperands, cfg: Any) -> GradientOperands:
        return operands if operands.scales is None else operands._replace(scales=in_chunks(operands.scales, cfg))


def configure(
    spec: AttentionSpec, chip: Chip, has_dlse: bool, tiles: BackwardTiles | None = None, extent: ProblemSize = MANY
) -> Sm100BackwardSteps:
    """Return the compile-time configuration of a problem."""
    tiles = tiles or tiles_for(spec, chip).row
    kind, _ = _form(spec, tiles)
    others: dict[str, Any] = {}
    if spec.operands is not None:
        others["wide_ds"] = ds_dtype(extent.max_seqlen_k) == torch.float8_e5m2
    return kind(
        **Variant.fields(spec, backward=True, has_dlse=has_dlse),
        **columns(tiles, kind),
        **others,
        smem_bytes=chip.smem_per_block,
    )


def _form(spec: AttentionSpec, tiles: BackwardTiles) -> tuple[type[Sm100BackwardSteps], ProgramRef[Any]]:
    """Return the configuration and the kernel for a row of the table."""
    if not tiles.wide:
        return Sm100BackwardConfig, KERNEL
    return (Sm100WidestConfig, WIDEST) if is_widest(spec) else (Sm100WideConfig, WIDE)
