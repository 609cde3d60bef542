"""The backward of a plan: arguments of its kernels, and the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.program import ProgramRef
from ..core.softmax import LOG2_E
from ..core.variant import windows
from ..mods.ir.record import Mods
from ..mods.ir.tensors import kernel_mods
from ..runtime import jit
from ..runtime.choice import Choice
from ..runtime.device import Chip
from ..runtime.dsl import cutlass
from ..runtime.spec import AttentionInputs, AttentionSpec, GradientOperands, Gradients, ProblemSize, Saved
from . import captured as gradients
from .workspace import Allocator


class Scalars(NamedTuple):
    """Scalar arguments of the main kernel. scale: softmax_scale. scale_log2: scale * log2(e); with a softcap, softcap *
    log2(e); with a score_mod, which returns logits, log2(e). scale_over_cap: scale / softcap. left, right: see
    `core.mask.Band`."""

    scale: cutlass.Float32
    scale_log2: cutlass.Float32
    scale_over_cap: cutlass.Float32
    left: cutlass.Int32
    right: cutlass.Int32

    @staticmethod
    def of(spec: AttentionSpec) -> Scalars:
        scale = spec.softmax_scale
        over_cap = scale / spec.softcap if spec.softcap else 0.0
        has_score_mod = spec.mods is not None and spec.mods.score is not None
        return Scalars(scale, (1.0 if has_score_mod else spec.softcap or scale) * LOG2_E, over_cap, *windows(spec))


class BackwardDirection:
    """The backward of one kind of problem on one chip. A subclass per chip sets `kernel` and implements `config`."""

    kernel: ProgramRef[Any]
    chains = 1  # dQ sums per query block, see `RowBlocks.chained`
    parts = 1  # CTAs that share a key block, see `kernels.key_sums`
    choice: Choice[Any] | None = None  # of tiles

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> None:
        self.spec, self.extent, self.chip = spec, extent, chip
        self.scalars = jit.fixed(Scalars.of(spec))
        self._compiled: dict[bool, tuple[Any, Allocator, jit.Launcher]] = {}  # key: has_dlse

    def request(self) -> jit.Request:
        """Return what the first launch without dlse compiles."""
        return self.kernel.request(self.config(has_dlse=False), self.chip)

    def config(self, has_dlse: bool) -> Any:
        """Return the configuration of the kernel, a `BackwardVariant` with `row_blocks`."""
        raise NotImplementedError

    def arranged(self, operands: GradientOperands, cfg: Any) -> GradientOperands:
        """Return the operands with scales of blocks in the layout that the kernel loads."""
        return operands

    def launch(
        self,
        inputs: AttentionInputs,
        saved: Saved,
        grads: Gradients,
        mods: Mods | None = None,
        captured: Sequence[Tensor | None] = (),
        operands: GradientOperands | None = None,
    ) -> Tensor | None:
        """Write dq, dk, dv and add to the gradients of captured tensors. Return the terms of dsink, (heads_q, ...), or
        None without a sink. operands: of a spec with `Operands`."""
        has_dlse = saved.dlse is not None
        if has_dlse not in self._compiled:
            cfg = self.config(has_dlse)
            allocator = Allocator(cfg.row_blocks, self.chains, self.parts)
            self._compiled[has_dlse] = cfg, allocator, self.kernel.launcher(cfg, self.chip)
        cfg, allocate, launcher = self._compiled[has_dlse]
        workspace, extent = allocate(inputs, mods), inputs.extent if self.spec.varlen else self.extent
        targets = gradients.targets(inputs, mods, captured, cfg)
        mod_tensors = None
        if mods is not None:
            mod_tensors = kernel_mods(
                mods, inputs.q.shape[-2], backward=True, is_ordered=cfg.reads_query_lists, captured=targets
            )
        if operands is not None:
            bytes_of = (x.view(torch.uint8) for x in (*inputs[:3], operands.dout))
            q, k, v, dout = bytes_of
            inputs, operands = inputs._replace(q=q, k=k, v=v), self.arranged(operands._replace(dout=dout), cfg)
        launcher(inputs[:8], saved, grads, workspace, self.scalars, extent, mod_tensors, operands)
        if self.chip.dry_run is None:  # whose captured tensors have no values
            gradients.finish(inputs, mods, captured, targets)
        return workspace.dsink_terms()
