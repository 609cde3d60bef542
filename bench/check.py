"""Is a provider's result right? One key/value head against float64, before anything is timed."""

from __future__ import annotations

import torch
from torch import Tensor

import fa4
from fa4 import reference
from fa4.cases import Judgement, judge
from fa4.spec import AttentionInputs, AttentionSpec, Flags

from .suites import BenchCase


def what_failed(error: Exception) -> str:
    """The first line of an error, as rows and terminals tell it; of one without a message its type."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def _one_head(case: BenchCase, x: Tensor, of_query: bool) -> Tensor:
    """The first sequence's first key/value head, or the query heads that share it: (1, seqlen, heads, dim)."""
    return x[:1, :, : case.heads_q // case.heads_kv if of_query else 1]


def judge_case(
    case: BenchCase, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, got: dict[str, Tensor]
) -> list[Judgement]:
    """Judge "out" or "dq", "dk", "dv" in `got`.

    Heads are independent of each other, so one tells. The oracle is the tiled float64 path (itself tested against the
    formula), since the formula's N x N matrices in float64 do not fit beside the benchmark at long lengths.
    """
    q, k, v, dout = (_one_head(case, x.detach(), i in (0, 3)) for i, x in enumerate((q, k, v, dout)))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scale = case.head_dim**-0.5
    out = fa4.flash_attn_func(*leaves, causal=case.causal, softmax_scale=scale, backend="torch")
    window_right = 0 if case.causal else None
    inputs = AttentionInputs(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
    spec = AttentionSpec.of(inputs, Flags(scale, window_right=window_right))
    if case.direction == "fwd":
        floor = reference.forward(inputs, spec, precise=False)[0]
        return [judge("out", _one_head(case, got["out"], True), out.detach(), floor)]
    grads = torch.autograd.grad(out, leaves, dout.double())
    floors = reference.backward(inputs, spec, dout, precise=False)
    return [
        judge(name, _one_head(case, got[name], name == "dq"), exact, floor)
        for name, exact, floor in zip(("dq", "dk", "dv"), grads, floors)
    ]
