"""Plan of the fallback backend."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..mods.ir.record import Mods
from ..runtime import plan
from ..runtime.spec import AttentionInputs, Cache, Gradients, Saved, compute_dtype
from . import tiles
from .backward import backward_pass
from .forward import forward_pass
from .modified import ModifiedCall
from .passes import passes


class Plan(plan.Plan):
    """Plan for any problem on any device."""

    layout = plan.Layout.ANY
    compiled = False

    def describe(self) -> str:
        dtype = str(compute_dtype(self.spec.dtype)).removeprefix("torch.")
        return f"{tiles.TILE_M} queries x {tiles.TILE_N} keys, {dtype} arithmetic"

    def forward(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, mods: Mods | None = None, cache: Cache | None = None
    ) -> None:
        modified = ModifiedCall.of(mods, self.spec, inputs.max_seqlen_k)
        with _without_autocast(out.device):
            for part in passes(inputs, self.spec, modified is not None and modified.one_by_one, cache):
                forward_pass(part, inputs, out, lse, modified)

    def backward(
        self,
        inputs: AttentionInputs,
        saved: Saved,
        grads: Gradients,
        mods: Mods | None = None,
        captured: Sequence[Tensor | None] = (),
    ) -> Tensor | None:
        """Recompute P from lse. dq is accumulated in the compute dtype, dk and dv tile by tile."""
        modified = ModifiedCall.of(mods, self.spec, inputs.max_seqlen_k)
        spec = self.spec
        dq = torch.zeros(grads.dq.shape, dtype=compute_dtype(spec.dtype), device=grads.dq.device)
        dsink = dq.new_zeros(spec.heads_kv, spec.group)
        with _without_autocast(dq.device):
            for part in passes(inputs, spec, modified is not None and modified.one_by_one):
                backward_pass(part, inputs, saved, (dq, grads.dk, grads.dv, dsink), modified, captured)
        grads.dq.copy_(dq)
        return dsink.view(spec.heads_q, 1) if spec.has_sink else None


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Disable autocast, which would round products. (The setting is per thread.)"""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
