"""Backward plan: from a specification to a configuration."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from ...bwd import plan
from ...core.program import ProgramRef
from ...core.variant import Variant
from ...runtime.choice import columns, given
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, ProblemSize
from ..wgmma import ROWS
from .common.config import Sm90BackwardSteps
from .config import Sm90BackwardConfig
from .parts import parts_for
from .tiles import BackwardTiles, every_query_sees_a_key, tiles_for
from .wide.config import Sm90WideConfig

KERNEL = ProgramRef[Any]("sm90.backward", "fa4.sm90.bwd.kernel")
WIDE = ProgramRef[Any]("sm90.backward_wide", "fa4.sm90.bwd.wide.kernel")


class Sm90Backward(plan.BackwardDirection):
    """Backward plan on sm_90. tiles: replaces the row of the tile table, for tuning."""

    kernel = KERNEL

    def __init__(
        self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: BackwardTiles | None = None
    ) -> None:
        super().__init__(spec, extent, chip)
        self.choice = tiles_for(spec, chip, extent) if tiles is None else given(tiles)
        self.tiles = self.choice.row
        if self.tiles.tile_n == ROWS:
            self.kernel = WIDE
        if self.tiles.last_finishes and not every_query_sees_a_key(spec, extent):
            raise ValueError(
                "tiles: last_finishes leaves out dQ of queries that see no key, expected every query to see one"
            )

    @cached_property
    def chains(self) -> int:  # type: ignore[override]
        cfg, extent = configure(self.spec, self.chip, False, self.tiles), self.extent
        n_blocks, pairs = -(-extent.max_seqlen_k // cfg.cluster_tile_n), max(1, extent.batch * self.spec.heads_kv)
        return 1 if self.spec.batch_invariant else cfg.chains(n_blocks, extent.max_seqlen_q, pairs)

    @cached_property
    def parts(self) -> int:  # type: ignore[override]
        return parts_for(self.spec, self.extent, self.chip) if self.tiles.parts is None else self.tiles.parts

    def __str__(self) -> str:
        cfg = self.config(has_dlse=False)
        shape = f"{cfg.tile_m} x {cfg.cluster_tile_n}, {cfg.q_stages} + {cfg.stages} stages, group {cfg.group}"
        shared = f", key blocks in {self.parts} parts" if self.parts > 1 else ""
        return f"backward {self.choice.name}: {shape}{shared} ({self.choice.reason})"

    def config(self, has_dlse: bool) -> Sm90BackwardSteps:
        several = dict(chained=self.chains > 1, parted=self.parts > 1)
        return configure(self.spec, self.chip, has_dlse, self.tiles, **several)


def configure(
    spec: AttentionSpec,
    chip: Chip,
    has_dlse: bool,
    tiles: BackwardTiles,
    chained: bool = False,
    parted: bool = False,
) -> Sm90BackwardSteps:
    """Return the compile-time configuration of a problem."""
    kind = Sm90WideConfig if tiles.tile_n == ROWS else Sm90BackwardConfig
    spec = replace(spec, deterministic=spec.deterministic or tiles.ordered)
    return kind(
        **Variant.fields(spec, backward=True, has_dlse=has_dlse),
        **columns(tiles, kind),
        sms=chip.sms,
        smem_bytes=chip.smem_per_block,
        chained=chained,
        parted=parted,
    )
