"""Oracle: attention and its gradients by formula, in float64 (or float32), clear and slow.

The code keeps whole N x N matrices and loops over sequences. Tests, the correctness checks of the benchmark and the
command line compare against it. With `precise=False` it is the same-precision reference, whose error bounds the allowed
error of a kernel. It rounds the operands of each matrix product to the input dtype, as tensor cores do. It sums scores
16 products at a time and truncates each partial sum to float32, as tensor cores do. It rounds results to the input
dtype once.

For one head and one sequence, with scale t, sink z (minus infinity when absent) and mask M:

    X_ij   = t * q_i . k_j,   S_ij = c * tanh(X_ij / c) if softcap c > 0 else X_ij,   S_ij = -inf outside M
    lse_i  = log(exp(z) + sum_j exp(S_ij)),   P_ij = exp(S_ij - lse_i),   o_i = sum_j P_ij v_j

and, for upstream gradients do and dlse,

    dv_j   = sum_i P_ij do_i,   dP_ij = do_i . v_j,   D_i = do_i . o_i - dlse_i
    dS_ij  = P_ij (dP_ij - D_i),   dX_ij = dS_ij (1 - (S_ij / c)^2) if c > 0 else dS_ij
    dq_i   = t sum_j dX_ij k_j,   dk_j = t sum_i dX_ij q_i,   dz = -sum_i exp(z - lse_i) D_i

With dropout, K_ij is 0 for dropped pairs and 1 / (1 - p) for others: o_i = sum_j K_ij P_ij v_j,
dv_j = sum_i K_ij P_ij do_i and dP_ij = K_ij do_i . v_j; the rest is the same. With a score_mod f and a mask_mod m,
S_ij = f(X_ij, b, h, i, j) inside M and where m(b, h, i, j) is true. Autograd computes dX_ij = dS_ij f'(X_ij) and the
gradients of the tensors that f captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..runtime import nvfp4
from ..runtime.sequences import Sequence as BatchSequence
from ..runtime.sequences import sequences
from ..runtime.spec import (
    LINE_SHIFT,
    P_EXPONENT,
    AttentionInputs,
    AttentionSpec,
    Gradients,
    Operands,
    compute_dtype,
    ds_dtype,
)


def mask(spec: AttentionSpec, seqlen_q: int, seqlen_k: int, device: torch.device | None = None) -> Tensor:
    """Mask of causal and window: bool (seqlen_q, seqlen_k), True for visible keys, bottom-right aligned."""
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
    """score_mod and mask_mod of a call; both must accept broadcasting index tensors as well as 0-dim ones.

    score: returns the score_mod for given captured tensors. captured: these tensors; they may need gradients.
    """

    score: Callable[..., Callable] | None = None
    mask: Callable | None = None
    captured: tuple[Tensor, ...] = ()

    def logits(self, s: Tensor, index: int, captured: Sequence[Tensor]) -> Tensor:
        """Apply score_mod to the scaled scores (heads, seqlen_q, seqlen_k) of sequence `index`."""
        return s if self.score is None else self.score(*captured)(s, *_indices(s.shape, index, s.device))

    def mask_bits(self, shape: Sequence[int], index: int, device: torch.device) -> Tensor:
        """Evaluate mask_mod for all pairs: bool (heads, seqlen_q, seqlen_k)."""
        if self.mask is None or 0 in shape:
            return torch.ones(*shape, dtype=torch.bool, device=device)
        return self.mask(*_indices(shape, index, device)).expand(*shape)


_NO_FUNCTIONS = Functions()


def _indices(shape: Sequence[int], index: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index tensors b, h, q_idx and kv_idx that broadcast over (heads, seqlen_q, seqlen_k)."""
    h, i, j = (torch.arange(extent, device=device) for extent in shape)
    return torch.tensor(index, device=device), h[:, None, None], i[:, None], j


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """Arithmetic in `dtype`; matrix operands are first rounded to `operand` (None: not rounded). operand e4m3 or e2m1:
    q, k and v are such numbers times factors, so only P is rounded, times a power of two, or in e2m1 with a scale for
    each 16 keys. sequential: a product
    of operands that are not rounded adds its terms one after the other, as a BLAS does for some shapes. Other shapes
    have partial sums, which err less. key_order: seed of `_max_so_far`. sum_bits: significand of a tensor core's
    sums. largest_p: see `fwd.variant.ForwardVariant`. line: (groups of every 16 of P in e4m3 whose exp2 is a
    line between powers of two, keys of a group), see `LINE_SHIFT`."""

    dtype: torch.dtype
    operand: torch.dtype | None
    sequential: bool = False
    key_order: int | None = None
    sum_bits: int = 24
    largest_p: int = 5
    line: tuple[int, int] | None = None

    @property
    def is_8bit(self) -> bool:
        return self.operand == torch.float8_e4m3fn

    @property
    def is_4bit(self) -> bool:
        return self.operand is nvfp4.DTYPE

    @property
    def rounds_p_alone(self) -> bool:
        return self.is_8bit or self.is_4bit

    def round(self, x: Tensor) -> Tensor:
        return x if self.operand is None or self.rounds_p_alone else x.to(self.operand).to(self.dtype)

    def on_line(self, p: Tensor) -> Tensor:
        """Put a share of P on the line."""
        if self.line is None:
            return p
        x = torch.log2(p) + self.largest_p + LINE_SHIFT
        fixed = (x * 64).round() / 64
        n = fixed.floor()
        line = torch.exp2(n) * (1 + fixed - n)
        share, keys = self.line
        group = torch.arange(p.shape[-1], device=p.device) // keys
        takes_line = (group + 1) * share // 16 > group * share // 16
        return torch.where(takes_line, torch.where(x < -15, 0.0, line / 2**self.largest_p), p)

    def round_weights(self, p: Tensor) -> Tensor:
        """Round P, relative to its offset."""
        if self.is_4bit:
            blocks = functional.pad(p * _LARGEST_4BIT_P, (0, -p.shape[-1] % nvfp4.COLUMNS))
            return nvfp4.values(*nvfp4.quantised(blocks), self.dtype)[..., : p.shape[-1]] / _LARGEST_4BIT_P
        if not self.is_8bit:
            return self.round(p)
        return (p * 2**self.largest_p).to(self.operand).to(self.dtype) / 2**self.largest_p

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self._sums(a, b) if self.operand is None else self.round(a) @ self.round(b)

    def _sums(self, a: Tensor, b: Tensor) -> Tensor:
        if not self.sequential:
            return a @ b
        total = a.new_zeros(*a.shape[:-1], b.shape[-1])
        for i in range(a.shape[-1]):
            total.addcmul_(a[..., i : i + 1], b[..., i : i + 1, :])
        return total

    def scores(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b with the summation of tensor cores: no later rounding hides the error of this sum in lse."""
        if self.operand is None:
            return self._sums(a, b)
        a, b = self.round(a).double(), self.round(b).double()
        total = a.new_zeros(*a.shape[:-1], b.shape[-1])
        count = 4 * _MMA_K if self.is_4bit else 2 * _MMA_K if self.is_8bit else _MMA_K
        for part_a, part_b in zip(a.split(count, -1), b.split(count, -2)):
            if self.sum_bits == _FLOAT32_BITS:
                total.baddbmm_(part_a, part_b)
            else:
                total = _sum_of_cut_terms(total, part_a, part_b, self.sum_bits)
            _cut(total, self.sum_bits)
        return total.float()


_LN2 = log(2.0)
_LARGEST_LOG2_P = 8.75  # of P in e4m3, see `fwd.variant.RESCALE_THRESHOLD_8BIT`
_LARGEST_4BIT_P = nvfp4.LARGEST * nvfp4.LARGEST_SCALE
_FLOAT32_BITS, _LEAST_EXPONENT = 24, -500
_MMA_K = 16  # products that one MMA instruction on 16-bit operands adds at once
HOPPER_8BIT = {"sum_bits": 14, "largest_p": 7}
"""Options of `forward` for e4m3 operands on a Hopper chip, whose tensor cores add them with 14 bits."""


def tensor_core_products(a: Tensor, b: Tensor, operand: torch.dtype, sum_bits: int = _FLOAT32_BITS) -> Tensor:
    """Return a @ b in float32 with operands rounded to `operand` and the summation of tensor cores. a: (m, k). b: (k,
    n). sum_bits: significand of sums of e4m3 products, 14 on Hopper."""
    return _Arithmetic(torch.float32, operand, sum_bits=sum_bits).scores(a[None], b[None])[0]


def _sum_of_cut_terms(total: Tensor, a: Tensor, b: Tensor, bits: int) -> Tensor:
    """Return total + a @ b of terms that are cut off to `bits` bits of the largest one's power of two. If terms cancel
    each other, the sum has fewer bits.

    Source: "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", arXiv 2511.10909.
    """

    def exponent(x: Tensor) -> Tensor:
        return torch.where(x == 0, _LEAST_EXPONENT, torch.frexp(x).exponent)

    (exponents_a, exponents_b), columns = map(exponent, (a, b)), range(a.shape[-1])
    top = exponent(total)
    for i in columns:  # of a product, the sum of its factors' exponents
        top = torch.maximum(top, exponents_a[..., i : i + 1] + exponents_b[..., i : i + 1, :] - 1)
    unit = torch.ldexp(torch.ones_like(total), top.clamp(min=_LEAST_EXPONENT) - bits)
    cut = (total / unit).trunc_()
    for i in columns:
        cut += (a[..., i : i + 1] * (b[..., i : i + 1, :] / unit)).trunc_()
    return cut * unit


def _cut(x: Tensor, bits: int) -> None:
    """Truncate the significand of float64 numbers, in place, to that of float32 (24 bits), as tensor cores do.

    Source: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021.
    """
    x.view(torch.int64).bitwise_and_(-(1 << (53 - bits)))


def _arithmetic(spec: AttentionSpec, precise: bool, **options: Any) -> _Arithmetic:
    if precise or spec.dtype == torch.float64:
        return _Arithmetic(torch.float64, None)
    operand = spec.dtype
    if spec.operands is not None:
        operand = nvfp4.DTYPE if spec.operands is Operands.NVFP4 else torch.float8_e4m3fn
    return _Arithmetic(torch.float32, None if operand == torch.float32 else operand, **options)


def _heads_first(x: Tensor, repeat: int, dtype: torch.dtype) -> Tensor:
    """Convert (rows, heads, dim) to (heads * repeat, rows, dim): key/value heads repeated to match the query heads."""
    return x.transpose(0, 1).to(dtype).repeat_interleave(repeat, dim=0)


def _operands(inputs: AttentionInputs, spec: AttentionSpec, math: _Arithmetic, seq: BatchSequence) -> Iterator[Tensor]:
    """Yield q, k and v of a sequence, (heads_q, rows, dim)."""
    for x, rows, repeat in zip(inputs[:3], (seq.q_rows, seq.k_rows, seq.k_rows), (1, spec.group, spec.group)):
        yield _heads_first(seq.select(x, rows, inputs.varlen), repeat, math.dtype)


def _scores(
    spec: AttentionSpec, math: _Arithmetic, q: Tensor, k: Tensor, functions: Functions = _NO_FUNCTIONS, index: int = 0
) -> Tensor:
    """S, (heads, seqlen_q, seqlen_k); -inf where masked."""
    s = math.scores(q, k.transpose(1, 2)) * spec.softmax_scale
    if spec.softcap > 0:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    s = functions.logits(s, index, [x.detach().to(math.dtype) for x in functions.captured])
    visible = mask(spec, q.shape[1], k.shape[1], q.device) & functions.mask_bits(s.shape, index, s.device)
    return s.masked_fill(~visible, -torch.inf)


def _lse(math: _Arithmetic, s: Tensor, sink: Tensor | None) -> Tensor:
    """Log-sum-exp of rows with the sink, (heads, seqlen_q); -inf for a row without terms. The largest P of a row is not
    on the line. With an order of keys, in units of log 2 and rounded there, as kernels compute it."""
    if s.shape[2] and math.line is not None:
        p, row_max, max_so_far = _weights(math, s)
        at_max = s.argmax(dim=2, keepdim=True)
        p = p.scatter(2, at_max, _exp(s, max_so_far).gather(2, at_max))
        s = torch.log(p * _exp(max_so_far, row_max)) + row_max.masked_fill(row_max == -torch.inf, 0.0)
    if sink is not None:
        s = torch.cat([s, sink.to(math.dtype)[:, None, None].expand(-1, s.shape[1], 1)], dim=2)
    if s.shape[2] == 0:
        return s.new_full(s.shape[:2], -torch.inf)
    if math.key_order is None:
        return torch.logsumexp(s, dim=2)
    row_max = s.amax(dim=2)
    row_max = row_max.masked_fill(row_max == -torch.inf, 0.0) / _LN2
    return (row_max + torch.log2(torch.exp2(s / _LN2 - row_max[..., None]).sum(dim=2))) * _LN2


def _weights(math: _Arithmetic, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P relative to an offset, the row's largest score, and the offset: the largest score so far, or with e4m3 less."""
    row_max = s.amax(dim=2, keepdim=True)
    max_so_far = row_max if math.key_order is None else _max_so_far(s, math.key_order)
    if math.is_8bit and math.key_order is not None:
        max_so_far = max_so_far - _lag(row_max, math)
    if math.is_4bit and math.key_order is not None:  # keys with the same scale have the same offset
        padded = functional.pad(max_so_far, (0, -s.shape[2] % nvfp4.COLUMNS), value=-torch.inf)
        of_blocks = padded.unflatten(2, (-1, nvfp4.COLUMNS)).amax(3)
        max_so_far = of_blocks.repeat_interleave(nvfp4.COLUMNS, 2)[..., : s.shape[2]]
    return math.on_line(_exp(s, max_so_far)), row_max, max_so_far


def _exp(s: Tensor, x: Tensor) -> Tensor:
    """exp(S_ij - x_ij); 0 where S is -inf, also if x is -inf. x broadcasts to S."""
    return torch.where(s == -torch.inf, 0.0, torch.exp(s - x.masked_fill(x == -torch.inf, 0.0)))


def _max_so_far(s: Tensor, seed: int) -> Tensor:
    """Largest score of a key and of the keys before it, in a random order of keys for each row; shaped like s."""
    order = torch.rand(s.shape, generator=torch.Generator().manual_seed(seed)).to(s.device).argsort(dim=2)
    return torch.empty_like(s).scatter_(2, order, s.gather(2, order).cummax(dim=2).values)


def _lag(row_max: Tensor, math: _Arithmetic) -> Tensor:
    """How far an offset may be below the largest score so far: a kernel rescales only if P would exceed
    2^`_LARGEST_LOG2_P`, so the largest P of a row need not be a power of two. Random, shaped like row_max."""
    lag = torch.rand(row_max.shape, generator=torch.Generator().manual_seed(math.key_order or 0)).to(row_max)
    return lag * (_LARGEST_LOG2_P - math.largest_p) * _LN2


def _out(math: _Arithmetic, s: Tensor, lse: Tensor, vs: Tensor, k: Tensor | int) -> Tensor:
    """O in math.dtype. The same-precision reference rounds exp(S - max) and divides later, like every flash kernel.
    With an order of keys, max is the largest score so far."""
    if s.shape[2] == 0:
        return s.new_zeros(*s.shape[:2], vs.shape[2])
    p, row_max, max_so_far = _weights(math, s)
    o = (math.round_weights(p) * _exp(max_so_far, row_max) * k) @ math.round(vs)
    factor = torch.exp(row_max - lse[..., None])
    if math.line is not None:  # lse has 1 for the largest P
        largest = (p * _exp(max_so_far, row_max)).gather(2, s.argmax(dim=2, keepdim=True))
        factor = 1 / (1 / factor + largest - 1)
    return o * factor.nan_to_num(0.0)


def _kept_of(kept: Tensor | None, index: int, s: Tensor) -> Tensor | int:
    """K of a sequence; 1 without dropout."""
    return 1 if kept is None else kept[index, :, : s.shape[1], : s.shape[2]].to(s.dtype)


def unreached(
    inputs: AttentionInputs, spec: AttentionSpec, functions: Functions = _NO_FUNCTIONS
) -> tuple[Tensor, Tensor]:
    """Find queries without visible keys, and keys that are visible to no query: bool, leading axes of q and of k.

    With a mask_mod this must hold in all heads. Padding rows are included. out and all gradients of such rows are
    exactly 0.
    """
    alone_q, alone_k = (torch.ones(x.shape[:-2], dtype=torch.bool, device=x.device) for x in (inputs.q, inputs.k))
    for seq in sequences(inputs):
        rows_q, rows_k = seq.select(alone_q, seq.q_rows, inputs.varlen), seq.select(alone_k, seq.k_rows, inputs.varlen)
        visible = _visible(inputs, spec, functions, seq).any(dim=0)
        rows_q.copy_(~visible.any(dim=1)), rows_k.copy_(~visible.any(dim=0))
    return alone_q, alone_k


def most_keys(inputs: AttentionInputs, spec: AttentionSpec, functions: Functions = _NO_FUNCTIONS) -> int:
    """Return the largest number of keys that a query sees."""
    counts = (_visible(inputs, spec, functions, seq).sum(dim=2) for seq in sequences(inputs))
    return max((int(count.max()) for count in counts if count.numel()), default=0)


def _visible(inputs: AttentionInputs, spec: AttentionSpec, functions: Functions, seq: BatchSequence) -> Tensor:
    """Visible pairs of a sequence: bool, (heads or 1, queries, keys)."""
    rows_q, rows_k = (rows.stop - rows.start for rows in (seq.q_rows, seq.k_rows))
    visible = mask(spec, rows_q, rows_k, inputs.q.device)[None]
    if functions.mask is None:
        return visible
    return visible & functions.mask_bits((spec.heads_q, rows_q, rows_k), seq.index, inputs.q.device)


def forward(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    *,
    precise: bool = True,
    kept: Tensor | None = None,
    functions: Functions = _NO_FUNCTIONS,
    sequential: bool = False,
    key_order: int | None = None,
    sum_bits: int = 24,
    largest_p: int = 5,
    line: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by formula. kept: K of dropout, (batch, heads_q, max_seqlen_q, max_seqlen_k). sequential
    and key_order: other roundings of the same-precision reference. sequential: float32 products add their terms in
    order. key_order: seed of a random order of keys; P is rounded relative to the largest score so far, as in an online
    softmax (None: of the row), and in e4m3 relative to less (`_lag`). sum_bits, largest_p, line: of e4m3 operands, see
    `HOPPER_8BIT` and `_Arithmetic`.

    Returns:
        out, shaped like q with last axis head_dim_v, and lse (batch, heads_q, seqlen_q) or (heads_q, total_q):
        both float64 when `precise`; otherwise out in the input dtype and lse in float32, as a kernel returns them.
    """
    math = _arithmetic(
        spec, precise, sequential=sequential, key_order=key_order, sum_bits=sum_bits, largest_p=largest_p, line=line
    )
    q, varlen = inputs.q, inputs.varlen
    out = torch.zeros(*q.shape[:-1], spec.head_dim_v, dtype=math.dtype, device=q.device)
    lse_shape = (spec.heads_q, q.shape[0]) if varlen else (q.shape[0], spec.heads_q, q.shape[1])
    lse = torch.full(lse_shape, -torch.inf, dtype=math.dtype, device=q.device)
    for seq in sequences(inputs):
        qs, ks, vs = _operands(inputs, spec, math, seq)
        s = _scores(spec, math, qs, ks, functions, seq.index)
        row_lse = _lse(math, s, inputs.sink)
        o = _out(math, s, row_lse, vs, _kept_of(kept, seq.index, s))
        seq.select(out, seq.q_rows, varlen).copy_(o.transpose(0, 1))
        seq.select_lse(lse, varlen).copy_(row_lse)
    if precise:
        return out, lse
    return out.to(spec.dtype), lse.to(compute_dtype(spec.dtype))


def backward(
    inputs: AttentionInputs, spec: AttentionSpec, dout: Tensor, dlse: Tensor | None = None, **options: Any
) -> Gradients:
    """Return the gradients of `backward_with_captured`, with its options."""
    return backward_with_captured(inputs, spec, dout, dlse, **options)[0]


def backward_with_captured(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    precise: bool = True,
    kept: Tensor | None = None,
    functions: Functions = _NO_FUNCTIONS,
    sequential: bool = False,
    key_order: int | None = None,
    largest_p: int = 5,
    line: tuple[int, int] | None = None,
    ds_factors: Tensor | None = None,
) -> tuple[Gradients, list[Tensor]]:
    """Gradients by formula, also of the tensors that the score_mod captured, for `dout` shaped like out and `dlse`
    shaped like lse (None: zero). kept, sequential, key_order, largest_p, line: as in `forward`. ds_factors: of e4m3
    operands, factors of dS when it is rounded to 8 bits, (batch, heads_q).

    Returns float64 gradients when `precise`, else in the dtypes of the inputs.
    """
    math = _arithmetic(spec, precise, sequential=sequential, key_order=key_order, largest_p=largest_p, line=line)
    varlen = inputs.varlen
    ds_limits = torch.finfo(ds_dtype(inputs.max_seqlen_k))
    grads = [torch.zeros(x.shape, dtype=math.dtype, device=x.device) for x in (inputs.q, inputs.k, inputs.v)]
    dq, dk, dv = grads
    dsink = None if inputs.sink is None else torch.zeros_like(inputs.sink, dtype=math.dtype)
    leaves = [x.detach().to(math.dtype).requires_grad_() for x in functions.captured]
    captured_grads = [torch.zeros_like(x) for x in leaves]
    for seq in sequences(inputs):
        qs, ks, vs = _operands(inputs, spec, math, seq)
        dos = _heads_first(seq.select(dout, seq.q_rows, varlen), 1, math.dtype)
        s = _scores(spec, math, qs, ks, functions, seq.index)
        # The forward that saved lse and o summed its scores in another order. The two sums of a score differ, so P has
        # this error, even for a single key. It is visible in float32; with 16-bit operands, rounding hides it.
        uses_other_sums = not precise and math.operand is None
        forward_s = _scores(spec, math, qs.flip(2), ks.flip(2), functions, seq.index) if uses_other_sums else s
        lse = _lse(math, forward_s, inputs.sink)
        p = _exp(s, lse[..., None])
        k = _kept_of(kept, seq.index, s)
        # D uses o as the forward returned it. For rows with few keys, the rounding of o is most of the error of dS.
        o = math.round(_out(math, forward_s, lse, vs, k))
        if math.is_8bit:
            o = o.to(spec.dtype).to(math.dtype)
        dropped = p * k
        d = (math.round(dos) * o).sum(dim=2)
        if dlse is not None:
            d = d - seq.select_lse(dlse, varlen).to(math.dtype)
        # dP - D: the two sums are equal if a query has one visible key; then only their rounding errors remain.
        dx = p * (math.scores(dos, vs.transpose(1, 2)) * k - d[..., None])
        if spec.softcap > 0:
            dx = dx * (1 - (s.masked_fill(s == -torch.inf, 0.0) / spec.softcap) ** 2)
        if functions.score is not None:
            with torch.enable_grad():
                x = (math.scores(qs, ks.transpose(1, 2)) * spec.softmax_scale).requires_grad_()
                logits = functions.logits(x, seq.index, leaves).expand_as(x)
            dx, *leaf_grads = torch.autograd.grad(logits, [x, *leaves], dx, allow_unused=True, materialize_grads=True)
            captured_grads = [total + grad for total, grad in zip(captured_grads, leaf_grads)]

        if math.is_8bit and ds_factors is None:  # products of the backward are of 16 bits
            dx, dropped = (x.to(spec.dtype).to(math.dtype) for x in (dx, dropped))
        elif math.is_8bit and ds_factors is not None:
            factor = ds_factors[seq.index].to(math.dtype)[:, None, None]
            of_8bit = (dx * factor).clamp(ds_limits.min, ds_limits.max).to(ds_dtype(inputs.max_seqlen_k))
            dx, of_p = of_8bit.to(math.dtype) / factor, 2**P_EXPONENT
            dropped = (dropped * of_p).to(math.operand).to(math.dtype) / of_p

        def per_kv_head(x: Tensor) -> Tensor:
            """Reshape (heads_q, rows, n) to (heads_kv, group * rows, n): one sum over the group, as in kernels."""
            return x.unflatten(0, (spec.heads_kv, spec.group)).flatten(1, 2)

        seq.select(dq, seq.q_rows, varlen).copy_((math.matmul(dx, ks) * spec.softmax_scale).transpose(0, 1))
        dk_heads = math.matmul(per_kv_head(dx).transpose(1, 2), per_kv_head(qs)) * spec.softmax_scale
        seq.select(dk, seq.k_rows, varlen).copy_(dk_heads.transpose(0, 1))
        dv_heads = math.matmul(per_kv_head(dropped).transpose(1, 2), per_kv_head(dos))
        seq.select(dv, seq.k_rows, varlen).copy_(dv_heads.transpose(0, 1))
        if dsink is not None and inputs.sink is not None:
            p_sink = _exp(inputs.sink.to(math.dtype)[:, None].expand_as(lse), lse)
            dsink -= (p_sink * d).sum(dim=1)
    if precise:
        return Gradients(dq, dk, dv, dsink), captured_grads
    dq, dk, dv = (g.to(spec.dtype) for g in grads)
    dsink = dsink if dsink is None or inputs.sink is None else dsink.to(inputs.sink.dtype)
    return Gradients(dq, dk, dv, dsink), [g.to(x.dtype) for g, x in zip(captured_grads, functions.captured)]
