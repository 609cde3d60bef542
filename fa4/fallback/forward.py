"""The forward pass: online softmax over key tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.spec import AttentionInputs
from .keys import key_tiles
from .modified import ModifiedCall, mask_of
from .passes import Pass
from .products import add_product
from .scores import finite_or_zero, scores
from .tiles import load_q, store_q, store_rows


def forward_pass(part: Pass, inputs: AttentionInputs, out: Tensor, lse: Tensor, modified: ModifiedCall | None) -> None:
    spec, dtype = part.spec, lse.dtype
    q_view, load_kv = part.q_view(inputs.q), key_tiles(part, inputs, dtype)
    out_view, lse_view = part.q_view(out), part.row_view(lse)
    mask = mask_of(part, modified)
    for q_rows in mask.query_tiles():
        q = load_q(q_view, q_rows, dtype)
        row_max = q.new_full((q.shape[0], q.shape[1], 1), -torch.inf)
        row_sum, acc = torch.zeros_like(row_max), q.new_zeros(q.shape[0], q.shape[1], spec.head_dim_v)
        for k_rows in mask.keys(q_rows):
            k, v = load_kv(k_rows)
            s, _ = scores(q, k, part, modified, mask, q_rows, k_rows)
            old_row_max, row_max = row_max, torch.maximum(row_max, s.amax(dim=2, keepdim=True))
            # A row without a visible key so far has row_max -inf: subtract 0 instead, so that p is 0 and not NaN.
            finite_max = finite_or_zero(row_max)
            p = s.sub_(finite_max).exp_()
            rescale = torch.exp(old_row_max - finite_max)
            row_sum.mul_(rescale).add_(p.sum(dim=2, keepdim=True))
            dropout_factors = None if modified is None else modified.kept(part, p, q_rows, k_rows)
            add_product(acc.mul_(rescale), p if dropout_factors is None else p.mul_(dropout_factors), v)
        row_lse = row_max + row_sum.log()
        if inputs.sink is not None:
            sink = part.sink_view(inputs.sink).expand(*lse_view.shape[:3], len(q_rows)).reshape(row_lse.shape)
            # The denominator stays relative to row_max, so it is exact for logits of any size.
            row_sum = row_sum + torch.exp(sink - finite_or_zero(row_max))
            row_lse = torch.logaddexp(row_lse, sink)
        store_q(out_view, q_rows, acc.div_(row_sum.masked_fill_(row_sum == 0, 1.0)))
        store_rows(lse_view, q_rows, row_lse)
