"""The backward pass: recompute each tile of scores from the saved lse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..mods.ir.tensors import add_gradients, zero_where_masked
from ..runtime.spec import AttentionInputs, Saved
from .modified import ModifiedCall, mask_of
from .passes import Pass
from .products import add_product, product
from .scores import finite_or_zero, scores
from .tiles import load_k, load_q, load_rows, store_k


def _row_term(part: Pass, out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D = rowsum(dout * out) - dlse, a row view (batch, heads_kv, group, rows)."""
    d = (part.q_view(dout).to(dtype) * part.q_view(out).to(dtype)).sum(dim=-1).permute(0, 2, 3, 1)
    return d if dlse is None else d - part.row_view(dlse).to(dtype)


def backward_pass(
    part: Pass,
    inputs: AttentionInputs,
    saved: Saved,
    grads: tuple[Tensor, ...],
    modified: ModifiedCall | None,
    captured: Sequence[Tensor | None],
) -> None:
    spec, (out, lse, dout, dlse), (dq, dk, dv, dsink) = part.spec, saved, grads
    dtype = dq.dtype
    q_view, k_view, v_view = part.q_view(inputs.q), part.k_view(inputs.k), part.k_view(inputs.v)
    dout_view, dq_view, dk_view, dv_view = (part.q_view(dout), part.q_view(dq), part.k_view(dk), part.k_view(dv))
    row_term = _row_term(part, out, dout, dlse, dtype)
    row_lse = part.row_view(lse)
    # exp(S - inf) = 0 for every key of a row without visible keys, and for a sink of -inf.
    row_lse = row_lse.masked_fill(torch.isneginf(row_lse), torch.inf)
    if inputs.sink is not None:
        dsink[part.heads] -= (torch.exp(part.sink_view(inputs.sink) - row_lse) * row_term).sum(dim=(0, 3))
    mask = mask_of(part, modified)
    for k_rows in mask.key_tiles():
        k, v = load_k(k_view, k_rows, dtype), load_k(v_view, k_rows, dtype)
        dk_tile, dv_tile = torch.zeros_like(k), torch.zeros_like(v)
        for q_rows in mask.queries(k_rows):
            q = load_q(q_view, q_rows, dtype)
            do = load_q(dout_view, q_rows, dtype)
            s, evaluated = scores(q, k, part, modified, mask, q_rows, k_rows)
            softcap_grad = None
            if spec.softcap > 0:
                softcap_grad = 1 - (finite_or_zero(s) / spec.softcap).square_()
            p = s.sub_(load_rows(row_lse, q_rows)).exp_()
            dropout_factors = None if modified is None else modified.kept(part, p, q_rows, k_rows)
            add_product(dv_tile, (p if dropout_factors is None else p * dropout_factors).transpose(1, 2), do)
            dp = product(do, v.transpose(1, 2))
            ds = (dp if dropout_factors is None else dp.mul_(dropout_factors)).sub_(load_rows(row_term, q_rows)).mul_(p)
            if softcap_grad is not None:
                ds.mul_(softcap_grad)
            if evaluated is not None and evaluated.graph.dscore is not None:
                evaluated.inputs["grad"] = part.by_head(ds)
                p_by_head = part.by_head(p)
                add_gradients(evaluated, p_by_head, captured)
                ds = zero_where_masked(evaluated, evaluated.graph.dscore, p_by_head).reshape(ds.shape)
            add_product(dk_tile, ds.transpose(1, 2), q)
            partial = dq_view[:, q_rows.start : q_rows.stop].permute(0, 2, 3, 1, 4)
            partial.add_(product(ds, k).view(partial.shape), alpha=spec.softmax_scale)
        store_k(dk_view, k_rows, dk_tile.mul_(spec.softmax_scale))
        store_k(dv_view, k_rows, dv_tile)
