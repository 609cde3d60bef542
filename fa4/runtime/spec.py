"""Attention problem: `AttentionSpec` (what shapes code), `ProblemSize` (sizes) and `AttentionInputs` (tensors).

The spec holds everything that may change generated code or results: two calls with equal specs on one chip run the same
kernels. The problem size takes part in the choice of kernels and tiles; the inputs carry data and lengths. Neither may
enter a compile key.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..mods.ir.record import Mods, ModSpec
from . import nvfp4, scaled_rows


class Feature(enum.Enum):
    """Optional feature of a backend; the dispatcher compares sets of these. Values are shown to users."""

    CAUSAL = "causal"
    WINDOW = "window_size"
    GQA = "GQA/MQA"
    HEAD_DIM_V = "head_dim_v != head_dim"
    VARLEN = "varlen"
    SEQUSED = "seqused"
    SOFTCAP = "softcap"
    SINK = "learnable_sink"
    BACKWARD = "backward"
    DETERMINISTIC = "deterministic backward"
    SCORE_MOD = "score_mod"
    MASK_MOD = "mask_mod"
    BLOCK_MASK = "block_mask"
    CAPTURED_GRADIENTS = "gradients of captured tensors"
    DROPOUT = "dropout_p"
    PAGES = "page_table"
    CACHE_ROWS = "cache_batch_idx and cache_leftpad"
    CACHE_VARLEN = "packed queries on a cache"
    CACHE_8BIT = "cache of 8-bit numbers"
    CACHE_4BIT = "cache of 4-bit numbers"
    SCALED_ROWS = "cache of 656-byte rows"
    OPERANDS_8BIT = "e4m3 q, k and v"
    BLOCK_SCALES = "scales of blocks of 32 numbers"
    OPERANDS_4BIT = "e2m1 q, k and v"
    BATCH_INVARIANT = "batch_invariant"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over inputs of a dtype, and of lse and other tensors with one value per row."""
    return torch.float64 if dtype == torch.float64 else torch.float32


BYTES = (torch.float8_e4m3fn, torch.int8)  # 8-bit dtypes of K/V in a cache, with factors beside it
CONVERTED = frozenset((*BYTES, scaled_rows.DTYPE, nvfp4.DTYPE))  # dtypes of K/V in a cache that become q's or float16


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Part of a `Cache` that shapes code: how the rows of a sequence are found, and how K/V are stored.

    page_size: rows of a page; None if a sequence's rows are contiguous. dtype: that of k and v if they are converted,
    one of `CONVERTED`: 8 bits, multiplied by descales; uint8 for `scaled_rows`, of which v is the first columns;
    `nvfp4`. None for q's dtype.
    """

    page_size: int | None = None
    has_batch_idx: bool = False
    has_leftpad: bool = False
    dtype: torch.dtype | None = None

    @property
    def converts_kv(self) -> bool:
        return self.dtype is not None

    @property
    def has_scaled_rows(self) -> bool:
        return self.dtype is scaled_rows.DTYPE

    @property
    def is_nvfp4(self) -> bool:
        return self.dtype is nvfp4.DTYPE

    @property
    def bits(self) -> int:
        """Bits of a stored number, if it is converted."""
        return 4 if self.is_nvfp4 else 8

    @property
    def has_tensors(self) -> bool:
        """Whether a kernel must read tensors besides k and v."""
        return self != CacheSpec()

    @property
    def is_scattered(self) -> bool:
        """Whether TMA cannot load rows in boxes: a sequence may begin anywhere in a page, or pages are no multiples of
        8 rows, the period of the shared-memory swizzle."""
        return self.page_size is not None and (self.page_size % 8 > 0 or self.has_leftpad)

    def pieces(self, tile_n: int) -> int:
        """Return the number of contiguous pieces of a block of `tile_n` keys; 1 if a page holds whole blocks."""
        return 1 if self.page_size is None else tile_n // math.gcd(tile_n, self.page_size)


class Operands(enum.StrEnum):
    """Tensors q, k and v of 8 or 4 bits, which kernels multiply as such. E4M3: with one factor of the scores, q's and
    k's together, and one of v, for each sequence and key/value head; a `Cache` holds them. MXFP8: e4m3 numbers that
    have E8M0 scales of blocks of 32, too, see `Cache`. NVFP4: e2m1 numbers with e4m3 scales of blocks of 16 alone; a
    byte of q and k has two columns, one of v two tokens."""

    E4M3 = "e4m3"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 4 if self is Operands.NVFP4 else 8


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention problem without its tensors. dtype: of out, and of q, k and v unless they are `operands`.

    Causal masking is the window `window_right == 0`, so each mask has one representation. Windows are aligned
    bottom-right: query i of a sequence attends to key j when `i + seqlen_k - seqlen_q - window_left <= j <= i +
    seqlen_k - seqlen_q + window_right`; None is an open side.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    heads_q: int
    heads_kv: int
    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    has_sink: bool = False
    varlen: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    deterministic: bool = False
    needs_backward: bool = False
    mods: ModSpec | None = None
    cache: CacheSpec | None = None
    num_splits: int = 0
    batch_invariant: bool = False
    v_in_k: bool = False
    operands: Operands | None = None

    @staticmethod
    def of(
        inputs: AttentionInputs, flags: Flags, mods: Mods | None = None, cache: Cache | None = None
    ) -> AttentionSpec:
        """Return the spec of an operator call."""
        shape_q, shape_v = inputs.q.shape, inputs.v.shape
        is_e2m1 = inputs.q.dtype is nvfp4.DTYPE  # (of a cache, only k and v may be)
        return AttentionSpec(
            dtype=inputs.q.dtype,
            head_dim=nvfp4.columns_of(inputs.q),
            head_dim_v=shape_v[-1] if is_e2m1 else nvfp4.columns_of(inputs.v),
            heads_q=shape_q[-2],
            heads_kv=shape_v[-2],
            has_sink=inputs.sink is not None,
            varlen=inputs.varlen,
            has_seqused_q=inputs.seqused_q is not None,
            has_seqused_k=inputs.seqused_k is not None,
            mods=None if mods is None else mods.spec(),
            cache=None if cache is None else cache.spec(inputs),
            **{name: getattr(flags, name) for name in Flags._fields if name not in ("backend", "scales")},
        )

    @property
    def causal(self) -> bool:
        return self.window_right == 0

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv

    def with_positive_scale(self) -> AttentionSpec:
        """Return the spec to solve after q has taken the scale's sign: online softmax takes the maximum of unscaled
        scores. A scale of 0 becomes 1e-30: it acts as 0 on any finite score, and keeps 0 * -inf out of kernels."""
        return self if self.softmax_scale > 0 else replace(self, softmax_scale=-self.softmax_scale or 1e-30)

    @property
    def has_blocks(self) -> bool:
        """Whether a block mask lists the blocks to visit."""
        return self.mods is not None and self.mods.block is not None

    @property
    def lengths_vary(self) -> bool:
        """Whether a sequence may have fewer rows than the longest."""
        return self.varlen or self.has_seqused_q or self.has_seqused_k

    @property
    def keys_may_grow(self) -> bool:
        """Whether k and v may be those of a decoder, which get another row at each call."""
        is_plain = self.mods is None and self.cache is None and self.operands is None and not self.lengths_vary
        return is_plain and not (self.needs_backward or self.batch_invariant)

    @property
    def has_dropout(self) -> bool:
        return self.mods is not None and self.mods.dropout

    def features(self) -> frozenset[Feature]:
        """Return the features that a backend needs to serve this spec."""
        mods, cache = self.mods or ModSpec(), self.cache or CacheSpec()
        requested = {
            Feature.CAUSAL: self.causal,
            Feature.WINDOW: self.window_left is not None or self.window_right not in (None, 0),
            Feature.GQA: self.heads_q != self.heads_kv,
            Feature.HEAD_DIM_V: self.head_dim != self.head_dim_v,
            Feature.VARLEN: self.varlen,
            Feature.SEQUSED: self.has_seqused_q or self.has_seqused_k,
            Feature.SOFTCAP: self.softcap > 0,
            Feature.SINK: self.has_sink,
            Feature.BACKWARD: self.needs_backward,
            Feature.DETERMINISTIC: self.needs_backward and self.deterministic,
            Feature.SCORE_MOD: mods.score is not None,
            Feature.MASK_MOD: mods.mask is not None,
            Feature.BLOCK_MASK: mods.block is not None,
            Feature.CAPTURED_GRADIENTS: self.needs_backward and bool(mods.trained),
            Feature.DROPOUT: mods.dropout,
            Feature.PAGES: cache.page_size is not None,
            Feature.CACHE_ROWS: cache.has_batch_idx or cache.has_leftpad,
            Feature.CACHE_VARLEN: self.cache is not None and self.varlen,
            Feature.CACHE_8BIT: cache.converts_kv and not cache.is_nvfp4,
            Feature.CACHE_4BIT: cache.is_nvfp4,
            Feature.SCALED_ROWS: cache.has_scaled_rows,
            Feature.OPERANDS_8BIT: self.operands is not None and self.operands.bits == 8,
            Feature.BLOCK_SCALES: self.operands is Operands.MXFP8,
            Feature.OPERANDS_4BIT: self.operands is Operands.NVFP4,
            Feature.BATCH_INVARIANT: self.batch_invariant,
        }
        return frozenset(feature for feature, is_requested in requested.items() if is_requested)


class ProblemSize(NamedTuple):
    """Size of a problem. `max_seqlen_*` are upper bounds of the sequence lengths, host integers."""

    batch: int
    max_seqlen_q: int
    max_seqlen_k: int

    def planned(self, spec: AttentionSpec) -> ProblemSize:
        """Return the size that a plan is made for. Sizes of packed batches change with each call and are rounded up, so
        that few plans serve them all; launches use the exact sizes. So are the keys of a decoder without a `Cache`,
        on which launches do not depend."""
        if not spec.varlen:
            grows = spec.keys_may_grow and self.max_seqlen_q != self.max_seqlen_k
            return self._replace(max_seqlen_k=rounded_keys(self.max_seqlen_k)) if grows else self
        rounded = self.rounded()
        # The split size that batch_invariant fixes follows from the cache's capacity.
        return rounded._replace(max_seqlen_k=self.max_seqlen_k) if spec.batch_invariant else rounded

    def rounded(self) -> ProblemSize:
        batch, rows, keys = self
        return ProblemSize(rounded(batch), rounded(rows), rounded_keys(keys))


@functools.lru_cache(maxsize=1 << 16)
def rounded(n: int) -> int:
    """Return n up to 64, else the next number with four significant bits, at most an eighth larger."""
    unit = 1 << max(n.bit_length() - 4, 0)
    return n if n <= 64 else -(-n // unit) * unit


MIN_PLANNED_KEYS = 128  # no choice depends on fewer keys


@functools.lru_cache(maxsize=1 << 16)
def rounded_keys(n: int) -> int:
    """Round a number of keys likewise: 0, or at least `MIN_PLANNED_KEYS`."""
    return n and rounded(max(n, MIN_PLANNED_KEYS))


class Flags(NamedTuple):
    """Options of a call besides its tensors and lengths; see `AttentionSpec`.

    `fa4.torch_ops.ops` derives the operator's schema from the fields of `AttentionInputs` and these, in their order.

    num_splits: parts to split the keys into (split-KV); 0 leaves it to the backend. batch_invariant: the results of a
    sequence depend on no other sequence of the batch, bitwise. v_in_k: v is the memory of k's first columns, as in a
    cache of latents.
    """

    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    deterministic: bool = False
    needs_backward: bool = False
    backend: str = "auto"
    num_splits: int = 0
    batch_invariant: bool = False
    v_in_k: bool = False
    scales: Tensor | None = None
    """softmax_scale and softcap as float64 in host memory, for compiled code where they may change from call to call.
    The fields of these names then only tell whether there is a softcap."""

    def resolved(self) -> Flags:
        """Return the flags with the numbers of `scales` in their fields."""
        if self.scales is None:
            return self
        softmax_scale, softcap = self.scales.tolist()
        return self._replace(softmax_scale=softmax_scale, softcap=softcap, scales=None)


class AttentionInputs(NamedTuple):
    """The tensors of one attention problem, already validated.

    Dense: q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (batch, seqlen_k,
    heads_kv, head_dim_v). Varlen: the first two axes are packed into one, sequence b occupying rows cu_seqlens[b] to
    cu_seqlens[b + 1] (int32, batch + 1 entries); seqused (int32, batch) counts the rows of each sequence that hold
    data. The last axis of q, k, v has stride 1; other strides are free. `max_seqlen_*` are upper bounds, host integers.
    sink: one logit per query head, (heads_q,). With a `Cache`, k and v have the cache's layout, and cu_seqlens_k is
    None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields but the lengths."""
        return self[:8]  # type: ignore[return-value]

    @property
    def max_seqlens(self) -> tuple[int, int]:
        return self.max_seqlen_q, self.max_seqlen_k

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def extent(self) -> ProblemSize:
        return ProblemSize(self.batch, self.max_seqlen_q, self.max_seqlen_k)


PACKED = tuple(i for i, name in enumerate(AttentionInputs._fields[:8]) if name != "sink")
"""Positions of the tensors whose first size differs between batches of packed sequences."""


class Cache(NamedTuple):
    """Layout of a key/value cache: where in k and v the keys of a sequence are. All tensors on their device, indices
    int32.

    k is (sequences, rows, heads_kv, head_dim), or paged (pages, rows of a page, heads_kv, head_dim); v likewise. Row r
    of sequence b is row r of sequence batch_idx[b], or row r % page_size of page page_table[b, r // page_size]. The
    keys are rows leftpad[b] to seqused_k[b]. Entries of page_table past these rows are never read.

    page_table: (batch, pages of a sequence). batch_idx, leftpad: (batch,). k_descale, v_descale: (batch, heads_kv)
    float32, factors on 8-bit K/V; with k and v of `nvfp4` their scales, like k and v with a column for each 16. With k
    of `scaled_rows`, kernels read k alone. q_scales, k_scales, v_scales: with `Operands.MXFP8` and `NVFP4`, scales of
    blocks as uint8, of q and k along head_dim, of v along tokens.
    """

    page_table: Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    q_scales: Tensor | None = None
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    def spec(self, inputs: AttentionInputs) -> CacheSpec:
        page_size = None if self.page_table is None else inputs.k.shape[1]
        dtype = inputs.k.dtype if inputs.k.dtype in CONVERTED else None
        return CacheSpec(page_size, self.batch_idx is not None, self.leftpad is not None, dtype)

    def capacity(self, k: Tensor) -> int:
        """Return the number of rows that a sequence has room for."""
        return k.shape[1] if self.page_table is None else self.page_table.shape[1] * k.shape[1]


class Saved(NamedTuple):
    """Inputs of a backward besides `AttentionInputs`: the forward's results, and the gradients of the loss."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None


MX_BLOCK, E8M0_ONE = 32, 127  # numbers with the same scale of recipe "mxfp8"; the bits of a scale of 1
LINE_SHIFT = -0.0575
"""Added to x where a kernel takes 2^n (1 + f) for 2^x, x = n + f, so that the mean over f of the quotient is 1; errors
are -3.9 to 2 percent, and half a percent more where x is rounded to 1/64."""
P_EXPONENT = 8  # of P in the e4m3 of a backward: its largest number is 2^8
MOST_KEYS_OF_E4M3 = 8192
MOST_KEYS_OF_8BIT_P = 16384  # P of a row of equal weights is then a normal number of e4m3


def ds_dtype(max_seqlen_k: int) -> torch.dtype:
    """Return the 8-bit type of dS in a backward of so many keys. Of many keys P is small: e4m3 would have too few
    numbers for it, and e5m2 has two bits of significand."""
    return torch.float8_e4m3fn if max_seqlen_k <= MOST_KEYS_OF_E4M3 else torch.float8_e5m2


class GradientFactor(enum.IntEnum):
    """Index into `GradientOperands.factors`. The kernel's dS is 2^8 P (DP dP - DELTA delta), of which dP is the sum of
    8-bit products. SCORES: of scores. DV, DK, DQ: of the sums of dV, dK and dQ."""

    SCORES = 0
    DP = 1
    DELTA = 2
    DV = 3
    DK = 4
    DQ = 5


class BlockScales(NamedTuple):
    """E8M0 scales of blocks of 32 tokens and 32 columns, uint8 (batch, blocks of tokens, heads, blocks of columns),
    of q, k, v and dO."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


class GradientOperands(NamedTuple):
    """What a backward that multiplies 8-bit numbers reads besides `Saved`.

    dout: e4m3 numbers of dO, shaped like it; times their scales they are `Saved.dout`. factors: (6, batch, heads_kv)
    float32, by `GradientFactor`. scales: with `Operands.MXFP8`.
    """

    dout: Tensor
    factors: Tensor
    scales: BlockScales | None = None

    def ds_factors(self, group: int) -> Tensor:
        """Return the factors of dS when it is rounded, (batch, heads_q). group: query heads per key/value head."""
        return 2**P_EXPONENT * self.factors[GradientFactor.DELTA].repeat_interleave(group, 1)


class Gradients(NamedTuple):
    """Gradients by name: dq, dk, dv have the shapes and dtypes of q, k, v; dsink that of sink, or None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None
