"""From a specification to a launch: configuration, compiled kernels, workspaces, arguments."""

from __future__ import annotations

import functools

from torch import Tensor

from ... import jit
from ...bwd.workspace import Workspace
from ...core.arguments import (
    LOG2_E,
    compile_key,
    fake_lengths,
    fake_matrices,
    fake_rows,
    fake_sink,
    lengths,
    windows,
)
from ...device import Chip
from ...spec import AttentionInputs, AttentionSpec, Extent, Gradients, Saved
from .config import TILE_N, Config
from .tiles import BackwardTiles, tiles_for


class Backward:
    """One kind of problem: its tiles, its kernels, its launch. `tiles` replaces the row of the table, for tuning."""

    def __init__(self, spec: AttentionSpec, extent: Extent, chip: Chip, tiles: BackwardTiles | None = None) -> None:
        self.spec, self.extent, self.chip = spec, extent, chip
        self.tiles = tiles or tiles_for(spec, chip)
        scale = spec.softmax_scale
        over_cap = scale / spec.softcap if spec.softcap else 0.0
        self.scales = (scale, (spec.softcap or scale) * LOG2_E, over_cap)
        self.counts = (*windows(spec), extent.max_seqlen_q, extent.max_seqlen_k, extent.batch)

    def __str__(self) -> str:
        tiles, cfg = self.tiles, self.config(has_dlse=False)
        shape = f"{cfg.tile_m} x {TILE_N}, {cfg.stages} stages, group {cfg.group}"
        return f"backward {tiles.name}: {shape} ({tiles.evidence})"

    def launch(self, inputs: AttentionInputs, saved: Saved, grads: Gradients) -> Tensor | None:
        """Fill dq, dk, dv; returns the terms of dsink, (heads_q, ...), if there is a sink."""
        spec, cfg = self.spec, self.config(saved.dlse is not None)
        workspace = Workspace.allocate(inputs, spec, cfg.row_blocks)
        of_rows = (saved.lse, saved.dlse, inputs.sink)
        matrices = (inputs.q, inputs.k, inputs.v, saved.out, saved.dout, *grads[:3])
        self._kernel(saved.dlse is not None)(
            *matrices, *of_rows, *lengths(inputs), workspace, *self.scales, *self.counts
        )
        return workspace.dsink_terms()

    def config(self, has_dlse: bool) -> Config:
        return configure(self.spec, self.chip, has_dlse, self.tiles)

    def _kernel(self, has_dlse: bool) -> jit.Launcher:
        cfg = self.config(has_dlse)
        if self.chip.emulated:
            from .kernel import entry_name

            entry_name(cfg)  # reports name its roles and barriers, also when the kernel comes from the disk
        return jit.compiled(compile_key("sm90.backward", cfg), functools.partial(build, cfg, self.chip), self.chip)


def configure(spec: AttentionSpec, chip: Chip, has_dlse: bool, tiles: BackwardTiles | None = None) -> Config:
    """The compile-time side of a problem."""
    tiles = tiles or tiles_for(spec, chip)
    return Config(
        dtype=jit.dsl_dtype(spec.dtype),
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        group=spec.group,
        has_left=spec.window_left is not None,
        has_right=spec.window_right is not None,
        has_softcap=spec.softcap > 0,
        has_sink=spec.has_sink,
        has_dlse=has_dlse,
        varlen=spec.varlen,
        has_seqused_q=spec.has_seqused_q,
        has_seqused_k=spec.has_seqused_k,
        deterministic=spec.deterministic,
        tile_m=tiles.tile_m,
        stages=tiles.stages,
        sms=chip.sms,
        smem_bytes=chip.smem_per_block,
    )


def build(cfg: Config, chip: Chip):
    """Compile the kernels of a configuration, without any tensor."""
    from cutlass import Float32, Int32

    from .kernel import backward

    tensors = (*fake_matrices(cfg, 8), fake_rows(cfg), fake_rows(cfg, cfg.has_dlse), fake_sink(cfg), *fake_lengths(cfg))
    scalars = [Float32(0.0)] * 3 + [Int32(0)] * 5
    return jit.compile_kernel(
        backward, *tensors, Workspace.fake(cfg.row_blocks), *scalars, cfg, jit.current_stream(), chip=chip
    )
