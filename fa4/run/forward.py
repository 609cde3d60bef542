"""Attention, forward: what happens around a plan's launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mods.record import Mods
from ..plan import Plan
from ..spec import AttentionInputs, AttentionSpec
from . import allocate, prepare


def forward(
    inputs: AttentionInputs, spec: AttentionSpec, plan: Plan, mods: Mods | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the problem, row-major; `plan` is for `spec.with_positive_scale()`."""
    extra = () if mods is None else (mods,)
    if prepare.is_elsewhere(inputs.q):
        with torch.cuda.device(inputs.q.device):
            return forward(inputs, spec, plan, mods)
    if plan.is_empty(inputs):
        return _nothing_seen(inputs, spec)
    inputs = prepare.inputs_for(plan.layout, inputs, spec)
    if plan.splits == 1:
        out, lse = allocate.outputs(inputs, spec)
        plan.forward(inputs, out, lse, *extra)
        return out, lse
    out, lse = allocate.outputs(inputs, spec, written=True)
    parts, part_lse = allocate.parts(plan.splits, inputs, spec)
    plan.forward(inputs._replace(sink=None), parts, part_lse, *extra)
    _join(inputs, plan, parts, part_lse, out, lse)
    return out, lse


def _nothing_seen(inputs: AttentionInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """No query has a key: of the logits there is at most the sink. Launches no kernel of a backend."""
    out, lse = allocate.outputs(inputs, spec, written=True)
    out.zero_()
    lse.fill_(-torch.inf)
    if inputs.sink is not None and lse.numel():
        torch.where(allocate.used_rows(inputs), inputs.sink.to(lse.dtype)[:, None], lse, out=lse)
    return out, lse


def _join(inputs: AttentionInputs, plan: Plan, parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    from ..fwd.combine import launcher  # needs CuTe DSL

    if inputs.varlen:
        parts, part_lse, out, lse = parts.unsqueeze(1), part_lse.unsqueeze(1), out.unsqueeze(0), lse.unsqueeze(0)
    launcher(plan.spec.dtype, plan.spec.head_dim_v, plan.spec.has_sink, plan.splits, plan.chip)(
        parts, part_lse, out, lse, inputs.sink
    )
