"""fla-core (flash-linear-attention): softmax attention in Triton, with gradients."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa4.oracle.cases import Judgement
from tests.emulator.public.rows import Row, attention, by_formula, draw

PACKAGE = "fla-core"


def _parallel(lengths: tuple[int, ...], heads: tuple[int, int], head_dim: int, seed: int) -> list[Judgement]:
    """Causal. lengths: of packed sequences; heads: of queries, and of keys and values."""
    from fla.ops.attn.parallel import parallel_attn

    rows = sum(lengths)
    shapes = (1, rows, heads[0], head_dim), (1, rows, heads[1], head_dim), (1, rows, heads[1], head_dim)
    q, k, v, upstream = draw(seed, *shapes, shapes[0])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).cuda() if len(lengths) > 1 else None
    out = parallel_attn(*leaves, cu_seqlens=ends)
    grads = torch.autograd.grad(out, leaves, upstream)

    def attend(*whole: Tensor) -> Tensor:
        parts = zip(*(x.split(list(lengths), 1) for x in whole))
        return torch.cat([attention(*part, causal=True) for part in parts], 1)

    def formula(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> list[Tensor]:
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*given)
        return [out.detach(), *torch.autograd.grad(out, given, upstream)]

    inputs = [x.detach() for x in (q, k, v)]
    return by_formula(["out", "dq", "dk", "dv"], [out.detach(), *grads], formula, *inputs, upstream)


ROWS = [
    Row(PACKAGE, f"parallel_attn and its gradients, {name}", chip, functools.partial(_parallel, *given))
    for chip in ("sm_100a", "sm_90a", "sm_80")
    for name, given in (
        ("d64, 300 rows", ((300,), (2, 2), 64)),
        ("d128, 4 heads on 1, lengths 37, 200 and 70", ((37, 200, 70), (4, 1), 128)),
    )
]
