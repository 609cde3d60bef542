"""Is a provider's result right? One key/value head against float64, before anything is timed."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

import fa4
from fa4.oracle import reference
from fa4.oracle.cases import Judgement, judge
from fa4.runtime.spec import AttentionInputs, AttentionSpec, Flags, Operands

from .suites import IN_BLOCKS, BenchCase

_BYTES_OF_PAIR = 64  # of the formula's matrices, for each query and key: 24 to 54, by the arithmetic


def what_failed(error: Exception) -> str:
    """The first line of an error, as rows and terminals tell it; of one without a message its type."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def _one_head(case: BenchCase, x: Tensor, of_query: bool) -> Tensor:
    """The first sequence's first key/value head, or the query heads that share it: (1, seqlen, heads, dim)."""
    return x[:1, :, : case.heads_q // case.heads_kv if of_query else 1]


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 62
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class Judge:
    """Judges results of one case for given tensors; what is exact is computed once, when first asked for.

    Heads are independent of each other, so one tells. The oracle is the tiled float64 path (itself tested against the
    formula), since the formula's N x N matrices in float64 do not fit beside the benchmark at long lengths. The
    reference of the same precision has such matrices: of a forward, the last queries are judged for which they fit the
    memory of the device. Masks are aligned to the last query, so these queries are a call of their own.
    """

    def __init__(self, case: BenchCase, tensors: tuple[Tensor, ...]) -> None:
        self.case, self._tensors = case, tensors
        self.queries = case.seqlen_q
        if case.direction == "fwd":
            bytes_of_row = _BYTES_OF_PAIR * case.seqlen_k * (case.heads_q // case.heads_kv)
            self.queries = max(1, min(case.seqlen_q, 3 * _free_bytes(tensors[0].device) // 4 // bytes_of_row))

    def _last_queries(self, x: Tensor) -> Tensor:
        return x[:, self.case.seqlen_q - self.queries :]

    def judgements(self, got: dict[str, Tensor]) -> list[Judgement]:
        """Of "out", or of "dq", "dk" and "dv"."""
        judgements = []
        for name, (exact, floor) in self._expected.items():
            of_query = name in ("out", "dq")
            x = _one_head(self.case, got[name], of_query)
            judgements.append(judge(name, self._last_queries(x) if of_query else x, exact, floor))
        return judgements

    @functools.cached_property
    def _expected(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By name, what is exact and what a computation in the same precision gives."""
        case = self.case
        q, k, v, dout = (_one_head(case, x.detach(), i in (0, 3)) for i, x in enumerate(self._tensors))
        q, dout = self._last_queries(q), self._last_queries(dout)
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        scale = case.head_dim**-0.5
        window_size = case.window, 0 if case.causal else None
        out = fa4.flash_attn_func(*leaves, window_size=window_size, softmax_scale=scale, backend="torch")
        inputs = AttentionInputs(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
        spec = AttentionSpec.of(inputs, Flags(scale, *window_size))
        if case.direction == "fwd":
            if case.dtype in IN_BLOCKS:
                spec = replace(spec, operands=Operands(case.dtype))  # P is rounded, too
            return {"out": (out.detach(), reference.forward(inputs, spec, precise=False)[0])}
        grads = torch.autograd.grad(out, leaves, dout.double())
        floors = reference.backward(inputs, spec, dout, precise=False)
        return dict(zip(("dq", "dk", "dv"), zip(grads, floors)))
