"""The plan of the portable kernels: which tiles, which kernels, and their launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import jit, plan
from ..bwd.workspace import Workspace
from ..core.arguments import windows
from ..core.program import compile_key
from ..core.variant import Variant
from ..device import Chip
from ..fwd.splits import choose_splits
from ..spec import AttentionInputs, AttentionSpec, Extent, Gradients, Saved
from . import backward, forward
from .backward import BackwardConfig
from .forward import ForwardConfig
from .tiles import backward_section, backward_tiles, forward_section, forward_tiles


class Plan(plan.Plan):
    """A problem on any chip with cp.async and mma.sync."""

    layout = plan.Layout.ROWS

    def __init__(self, spec: AttentionSpec, extent: Extent, chip: Chip) -> None:
        super().__init__(spec, extent, chip)
        dims = spec.head_dim, spec.head_dim_v
        tiles = forward_tiles(*dims, chip, extent.max_seqlen_q)
        # Packing pays as soon as the query rows of one head leave half of a tile empty.
        self.packed = spec.group > 1 and 2 * extent.max_seqlen_q <= tiles.tile_m
        rows, heads = extent.max_seqlen_q, spec.heads_q
        if self.packed:
            rows, heads = extent.max_seqlen_q * spec.group, spec.heads_kv
            tiles = forward_tiles(*dims, chip, rows)
        count = -(-rows // tiles.tile_m) * heads * extent.batch
        self.forward_tiles, self.backward_tiles = tiles, backward_tiles(*dims, chip)
        slots = chip.sms * tiles.blocks_per_sm
        self.splits = choose_splits(spec, count, extent.max_seqlen_k, tiles.tile_n, slots)
        self._backwards: dict[bool, tuple[BackwardConfig, jit.Launcher]] = {}  # by whether there is a dlse
        self.scalars = (windows(spec), spec.softmax_scale, spec.softcap)
        section = forward_section(spec, extent.max_seqlen_k)
        self.counts = (extent.batch, extent.max_seqlen_q, section, self.splits)

    def describe(self) -> str:
        parts = f", keys in {self.splits} parts" if self.splits > 1 else ""
        forward = f"forward {self.forward_tiles}{', packed heads' if self.packed else ''}{parts}"
        return f"{forward}; backward {self.backward_tiles}" if self.spec.needs_backward else forward

    def forward(self, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        q, k, v, sink, *of_sequences = inputs[:8]
        self._forward((q, k, v, out, lse, sink), *of_sequences, self.counts, *self.scalars)

    @functools.cached_property
    def _forward(self) -> jit.Launcher:
        fields = ForwardConfig.fields(self.spec)
        fields["has_sink"] &= self.splits == 1  # whoever joins the parts adds it
        packed = self.spec.group if self.packed else 1
        cfg = ForwardConfig(**fields, tiles=self.forward_tiles, packed=packed, split=self.splits > 1)
        return self._launcher("forward", cfg, forward.build)

    def backward(self, inputs: AttentionInputs, saved: Saved, grads: Gradients) -> Tensor | None:
        spec = self.spec
        cfg, launch = self._backward(saved.dlse is not None)
        workspace = Workspace.allocate(inputs, spec, cfg.row_blocks)
        launch(
            (inputs.q, inputs.k, inputs.v, saved.out, saved.dout, saved.lse, saved.dlse, inputs.sink),
            grads[:3],
            workspace,
            *inputs[4:8],
            (*self.extent, backward_section(spec, self.extent.max_seqlen_q)),
            *self.scalars,
        )
        return workspace.dsink_terms()

    def _backward(self, has_dlse: bool) -> tuple[BackwardConfig, jit.Launcher]:
        if has_dlse not in self._backwards:
            fields = BackwardConfig.fields(self.spec, backward=True, has_dlse=has_dlse)
            cfg = BackwardConfig(**fields, tiles=self.backward_tiles)
            self._backwards[has_dlse] = cfg, self._launcher("backward", cfg, backward.build)
        return self._backwards[has_dlse]

    def _launcher(self, name: str, cfg: Variant, build: Callable[..., Any]) -> jit.Launcher:
        """The launcher of a configuration, whose fields are its compile key."""
        return jit.compiled(compile_key(f"sm80.{name}", cfg), functools.partial(build, cfg, self.chip), self.chip)
