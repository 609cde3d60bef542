"""The oracle: attention and its gradients by formula, in float64 (or float32), clear and slow.

Everything here keeps whole N x N matrices and loops over sequences; tests, the benchmark's correctness checks and the
command line compare against it. With `precise=False` it is the same-precision reference whose own error bounds
what a kernel may be wrong by: each matrix product takes operands rounded to the input dtype, as the tensor cores
of every chip do, scores are summed 16 products at a time, each partial sum cut to float32, as those units do, and
the results are rounded to the input dtype once.

For one head and one sequence, with scale t, sink z (minus infinity when absent) and mask M:

    X_ij   = t * q_i . k_j,   S_ij = c * tanh(X_ij / c) if softcap c > 0 else X_ij,   S_ij = -inf outside M
    lse_i  = log(exp(z) + sum_j exp(S_ij)),   P_ij = exp(S_ij - lse_i),   o_i = sum_j P_ij v_j

and, for upstream gradients do and dlse,

    dv_j   = sum_i P_ij do_i,   dP_ij = do_i . v_j,   D_i = do_i . o_i - dlse_i
    dS_ij  = P_ij (dP_ij - D_i),   dX_ij = dS_ij (1 - (S_ij / c)^2) if c > 0 else dS_ij
    dq_i   = t sum_j dX_ij k_j,   dk_j = t sum_i dX_ij q_i,   dz = -sum_i exp(z - lse_i) D_i

With dropout, K_ij being 0 for pairs that are dropped and 1 / (1 - p) for others, o_i = sum_j K_ij P_ij v_j,
dv_j = sum_i K_ij P_ij do_i and dP_ij = K_ij do_i . v_j; the rest is the same. With a score_mod f and a mask_mod m,
S_ij = f(X_ij, b, h, i, j) where m(b, h, i, j) holds too, and dX_ij = dS_ij f'(X_ij) by autograd, as are the gradients
of what f captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .sequences import sequences
from .spec import AttentionInputs, AttentionSpec, Gradients


def mask(spec: AttentionSpec, seqlen_q: int, seqlen_k: int, device: torch.device | None = None) -> Tensor:
    """Which keys each query sees: bool (seqlen_q, seqlen_k), aligned bottom-right."""
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if spec.window_left is not None:
        keep &= key >= diagonal - spec.window_left
    if spec.window_right is not None:
        keep &= key <= diagonal + spec.window_right
    return keep


@dataclass(frozen=True, slots=True)
class Functions:
    """A call's score_mod and mask_mod, which must take index tensors that broadcast as well as 0-dim ones.

    score: makes the score_mod, of tensors like `captured`, whose gradients may be asked for.
    """

    score: Callable[..., Callable] | None = None
    mask: Callable | None = None
    captured: tuple[Tensor, ...] = ()

    def logits(self, s: Tensor, index: int, captured: Sequence[Tensor]) -> Tensor:
        """score_mod of the scaled scores (heads, seqlen_q, seqlen_k) of sequence `index`."""
        return s if self.score is None else self.score(*captured)(s, *_indices(s.shape, index, s.device))

    def seen(self, shape: Sequence[int], index: int, device: torch.device) -> Tensor:
        """mask_mod of all pairs: bool (heads, seqlen_q, seqlen_k)."""
        if self.mask is None or 0 in shape:
            return torch.ones(*shape, dtype=torch.bool, device=device)
        return self.mask(*_indices(shape, index, device)).expand(*shape)


_NO_FUNCTIONS = Functions()


def _indices(shape: Sequence[int], index: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q_idx and kv_idx that broadcast over (heads, seqlen_q, seqlen_k)."""
    h, i, j = (torch.arange(extent, device=device) for extent in shape)
    return torch.tensor(index, device=device), h[:, None, None], i[:, None], j


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """How to compute: in `dtype`, with matrix operands first rounded to `operand` (None: not rounded)."""

    dtype: torch.dtype
    operand: torch.dtype | None

    def round(self, x: Tensor) -> Tensor:
        return x if self.operand is None else x.to(self.operand).to(self.dtype)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.round(a) @ self.round(b)

    def scores(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b where the float32 sum itself is what shows: in lse no later rounding hides it."""
        if self.operand is None:
            return a @ b
        a, b = self.round(a).double(), self.round(b).double()
        total = a.new_zeros(*a.shape[:-1], b.shape[-1])
        for part_a, part_b in zip(a.split(_MMA_K, -1), b.split(_MMA_K, -2)):
            _cut(total.baddbmm_(part_a, part_b))
        return total.float()


_MMA_K = 16  # products that an instruction on 16-bit operands adds at once


def _cut(x: Tensor) -> None:
    """Drop the bits of float64 numbers that a float32's significand has no room for, in place, as tensor cores do.

    Source: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021.
    """
    x.view(torch.int64).bitwise_and_(-(1 << (53 - 24)))


def _arithmetic(spec: AttentionSpec, precise: bool) -> _Arithmetic:
    if precise:
        return _Arithmetic(torch.float64, None)
    if spec.dtype == torch.float64:
        return _Arithmetic(torch.float64, None)
    return _Arithmetic(torch.float32, None if spec.dtype == torch.float32 else spec.dtype)


def _heads_first(x: Tensor, repeat: int, dtype: torch.dtype) -> Tensor:
    """(rows, heads, dim) as (heads, rows, dim), key/value heads repeated to match the query heads."""
    return x.transpose(0, 1).to(dtype).repeat_interleave(repeat, dim=0)


def _scores(
    spec: AttentionSpec, math: _Arithmetic, q: Tensor, k: Tensor, functions: Functions = _NO_FUNCTIONS, index: int = 0
) -> Tensor:
    """S: (heads, seqlen_q, seqlen_k), minus infinity where masked."""
    s = math.scores(q, k.transpose(1, 2)) * spec.softmax_scale
    if spec.softcap > 0:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    s = functions.logits(s, index, [x.detach().to(math.dtype) for x in functions.captured])
    seen = mask(spec, q.shape[1], k.shape[1], q.device) & functions.seen(s.shape, index, s.device)
    return s.masked_fill(~seen, -torch.inf)


def _lse(s: Tensor, sink: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Row log-sum-exp (heads, seqlen_q), with the sink's term; minus infinity for a row with nothing in it."""
    if sink is not None:
        s = torch.cat([s, sink.to(dtype)[:, None, None].expand(-1, s.shape[1], 1)], dim=2)
    if s.shape[2] == 0:
        return s.new_full(s.shape[:2], -torch.inf)
    return torch.logsumexp(s, dim=2)


def _exp(s: Tensor, row: Tensor) -> Tensor:
    """exp(S_ij - row_i), zero where S is minus infinity (also where the row's value is)."""
    row = row.masked_fill(row == -torch.inf, 0.0)[..., None]
    return torch.where(s == -torch.inf, 0.0, torch.exp(s - row))


def _out(math: _Arithmetic, s: Tensor, lse: Tensor, vs: Tensor, kept: Tensor | None) -> Tensor:
    """O in math.dtype. The same-precision reference rounds exp(S - max) and divides afterwards, as every flash kernel
    does."""
    peak = s.amax(dim=2) if s.shape[2] else lse
    weights = math.round(_exp(s, peak))
    p = (weights if kept is None else weights * kept) @ math.round(vs)
    return p * torch.exp(peak - lse).nan_to_num(0.0)[..., None]


def _of_sequence(kept: Tensor, index: int, s: Tensor) -> Tensor:
    return kept[index, :, : s.shape[1], : s.shape[2]].to(s.dtype)


def unreached(
    inputs: AttentionInputs, spec: AttentionSpec, functions: Functions = _NO_FUNCTIONS
) -> tuple[Tensor, Tensor]:
    """Which queries see no key, and which keys no query sees: bool, shaped like the leading axes of q and of k.

    With a mask_mod, in no head. Rows of no sequence, or not in use, are among them. out and all gradients of such rows
    are exactly 0.
    """
    alone_q, alone_k = (torch.ones(x.shape[:-2], dtype=torch.bool, device=x.device) for x in (inputs.q, inputs.k))
    for seq in sequences(inputs):
        of_q, of_k = seq.select(alone_q, seq.q_rows, inputs.varlen), seq.select(alone_k, seq.k_rows, inputs.varlen)
        seen = mask(spec, len(of_q), len(of_k), inputs.q.device)
        if functions.mask is not None:
            shape = spec.heads_q, len(of_q), len(of_k)
            seen = seen & functions.seen(shape, seq.index, inputs.q.device).any(dim=0)
        of_q.copy_(~seen.any(dim=1)), of_k.copy_(~seen.any(dim=0))
    return alone_q, alone_k


def forward(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    *,
    precise: bool = True,
    kept: Tensor | None = None,
    functions: Functions = _NO_FUNCTIONS,
) -> tuple[Tensor, Tensor]:
    """Attention by formula. kept: K of dropout, (batch, heads_q, longest seqlen_q, longest seqlen_k).

    Returns:
        out, shaped like q with last axis head_dim_v, and lse (batch, heads_q, seqlen_q) or (heads_q, total_q):
        both float64 when `precise`; otherwise out in the input dtype and lse in float32, as a kernel returns them.
    """
    math = _arithmetic(spec, precise)
    q, varlen = inputs.q, inputs.varlen
    out = torch.zeros(*q.shape[:-1], spec.head_dim_v, dtype=math.dtype, device=q.device)
    lse_shape = (spec.heads_q, q.shape[0]) if varlen else (q.shape[0], spec.heads_q, q.shape[1])
    lse = torch.full(lse_shape, -torch.inf, dtype=math.dtype, device=q.device)
    for seq in sequences(inputs):
        qs = _heads_first(seq.select(q, seq.q_rows, varlen), 1, math.dtype)
        ks = _heads_first(seq.select(inputs.k, seq.k_rows, varlen), spec.group, math.dtype)
        vs = _heads_first(seq.select(inputs.v, seq.k_rows, varlen), spec.group, math.dtype)
        s = _scores(spec, math, qs, ks, functions, seq.index)
        row_lse = _lse(s, inputs.sink, math.dtype)
        o = _out(math, s, row_lse, vs, None if kept is None else _of_sequence(kept, seq.index, s))
        seq.select(out, seq.q_rows, varlen).copy_(o.transpose(0, 1))
        seq.select_lse(lse, varlen).copy_(row_lse)
    if precise:
        return out, lse
    return out.to(spec.dtype), lse.to(torch.float64 if spec.dtype == torch.float64 else torch.float32)


def backward(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    precise: bool = True,
    kept: Tensor | None = None,
    functions: Functions = _NO_FUNCTIONS,
) -> Gradients:
    """Gradients by formula, for `dout` shaped like out and `dlse` shaped like lse (None: zero). kept: as in `forward`.

    Returns float64 gradients when `precise`, else in the dtypes of the inputs.
    """
    return backward_with_captured(inputs, spec, dout, dlse, precise=precise, kept=kept, functions=functions)[0]


def backward_with_captured(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    precise: bool = True,
    kept: Tensor | None = None,
    functions: Functions = _NO_FUNCTIONS,
) -> tuple[Gradients, list[Tensor]]:
    """`backward`, and the gradients of what the score_mod captured."""
    math, varlen = _arithmetic(spec, precise), inputs.varlen
    grads = [torch.zeros(x.shape, dtype=math.dtype, device=x.device) for x in (inputs.q, inputs.k, inputs.v)]
    dq, dk, dv = grads
    dsink = None if inputs.sink is None else torch.zeros_like(inputs.sink, dtype=math.dtype)
    leaves = [x.detach().to(math.dtype).requires_grad_() for x in functions.captured]
    of_captured = [torch.zeros_like(x) for x in leaves]
    for seq in sequences(inputs):
        qs = _heads_first(seq.select(inputs.q, seq.q_rows, varlen), 1, math.dtype)
        ks = _heads_first(seq.select(inputs.k, seq.k_rows, varlen), spec.group, math.dtype)
        vs = _heads_first(seq.select(inputs.v, seq.k_rows, varlen), spec.group, math.dtype)
        dos = _heads_first(seq.select(dout, seq.q_rows, varlen), 1, math.dtype)
        s = _scores(spec, math, qs, ks, functions, seq.index)
        # The forward that saved lse and o summed its scores in an order of its own. In float32 nothing later hides that
        # P is then off by what two sums of a score differ by, also of an only key; 16-bit operands round it away.
        is_summed_anew = not precise and math.operand is None
        forward_s = _scores(spec, math, qs.flip(2), ks.flip(2), functions, seq.index) if is_summed_anew else s
        lse = _lse(forward_s, inputs.sink, math.dtype)
        p = _exp(s, lse)
        kept_here = None if kept is None else _of_sequence(kept, seq.index, s)
        # D takes o as the forward returned it. Where few keys share a row, rounding o is most of the error of dS.
        o = math.round(_out(math, forward_s, lse, vs, kept_here))
        k = 1 if kept_here is None else kept_here
        dropped = p * k
        d = (math.round(dos) * o).sum(dim=2)
        if dlse is not None:
            d = d - seq.select_lse(dlse, varlen).to(math.dtype)
        # A difference of sums that are equal where a query sees one key: then it is their own rounding that shows.
        dx = p * (math.scores(dos, vs.transpose(1, 2)) * k - d[..., None])
        if spec.softcap > 0:
            dx = dx * (1 - (s.masked_fill(s == -torch.inf, 0.0) / spec.softcap) ** 2)
        if functions.score is not None:
            with torch.enable_grad():
                x = (math.scores(qs, ks.transpose(1, 2)) * spec.softmax_scale).requires_grad_()
                logits = functions.logits(x, seq.index, leaves).expand_as(x)
            dx, *more = torch.autograd.grad(logits, [x, *leaves], dx, allow_unused=True, materialize_grads=True)
            of_captured = [total + of_sequence for total, of_sequence in zip(of_captured, more)]

        def per_kv_head(x: Tensor) -> Tensor:
            """(heads_q, rows, n) as (heads_kv, group * rows, n): one sum over all of them, as kernels accumulate."""
            return x.unflatten(0, (spec.heads_kv, spec.group)).flatten(1, 2)

        seq.select(dq, seq.q_rows, varlen).copy_((math.matmul(dx, ks) * spec.softmax_scale).transpose(0, 1))
        dk_heads = math.matmul(per_kv_head(dx).transpose(1, 2), per_kv_head(qs)) * spec.softmax_scale
        seq.select(dk, seq.k_rows, varlen).copy_(dk_heads.transpose(0, 1))
        dv_heads = math.matmul(per_kv_head(dropped).transpose(1, 2), per_kv_head(dos))
        seq.select(dv, seq.k_rows, varlen).copy_(dv_heads.transpose(0, 1))
        if dsink is not None and inputs.sink is not None:
            weight = _exp(inputs.sink.to(math.dtype)[:, None, None].expand(-1, lse.shape[1], 1), lse)
            dsink -= (weight.squeeze(2) * d).sum(dim=1)
    if precise:
        return Gradients(dq, dk, dv, dsink), of_captured
    dq, dk, dv = (g.to(spec.dtype) for g in grads)
    dsink = dsink if dsink is None or inputs.sink is None else dsink.to(inputs.sink.dtype)
    return Gradients(dq, dk, dv, dsink), [g.to(x.dtype) for g, x in zip(of_captured, functions.captured)]
