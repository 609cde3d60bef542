"""What is being asked: `AttentionSpec` (what shapes code), `Extent` (sizes) and `AttentionInputs` (the tensors).

The spec is everything that may change generated code or results; two calls with equal specs on one chip run the
same kernels. The extent has a part in which kernels and tiles those are, and the inputs carry the data and the lengths:
neither may enter a compile key.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .mods.record import Mods, ModSpec


class Feature(enum.Enum):
    """What a backend may or may not offer; the dispatcher compares these sets. Values are shown to users."""

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


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention problem without its tensors.

    Causal masking is the window `window_right == 0`, so there is one way to say each mask. Windows are aligned
    bottom-right: query i of a sequence sees key j when
    `i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right`; None is an open side.
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

    @staticmethod
    def of(inputs: AttentionInputs, flags: Flags, mods: Mods | None = None) -> AttentionSpec:
        """The spec of an operator call."""
        shape_q, shape_v = inputs.q.shape, inputs.v.shape
        return AttentionSpec(
            dtype=inputs.q.dtype,
            head_dim=shape_q[-1],
            head_dim_v=shape_v[-1],
            heads_q=shape_q[-2],
            heads_kv=shape_v[-2],
            softmax_scale=flags.softmax_scale,
            window_left=flags.window_left,
            window_right=flags.window_right,
            softcap=flags.softcap,
            has_sink=inputs.sink is not None,
            varlen=inputs.varlen,
            has_seqused_q=inputs.seqused_q is not None,
            has_seqused_k=inputs.seqused_k is not None,
            deterministic=flags.deterministic,
            needs_backward=flags.needs_backward,
            mods=None if mods is None else mods.spec(),
        )

    @property
    def causal(self) -> bool:
        return self.window_right == 0

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv

    def with_positive_scale(self) -> AttentionSpec:
        """The problem that backends solve when q takes the scale's sign: online softmax takes the maximum of unscaled
        scores. A scale of 0 becomes one that acts as 0 on any finite score, and keeps 0 * -inf out of kernels."""
        return self if self.softmax_scale > 0 else replace(self, softmax_scale=-self.softmax_scale or 1e-30)

    def features(self) -> frozenset[Feature]:
        """The features a backend must have to serve this spec."""
        asked = {
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
        }
        if self.mods is not None:
            asked |= {
                Feature.SCORE_MOD: self.mods.score is not None,
                Feature.MASK_MOD: self.mods.mask is not None,
                Feature.BLOCK_MASK: self.mods.block is not None,
                Feature.CAPTURED_GRADIENTS: self.needs_backward and bool(self.mods.trained),
            }
        return frozenset(feature for feature, is_asked in asked.items() if is_asked)


class Extent(NamedTuple):
    """How large a problem is. `max_seqlen_*` are upper bounds of the sequences' lengths, host integers."""

    batch: int
    max_seqlen_q: int
    max_seqlen_k: int


class Flags(NamedTuple):
    """What a call says besides its tensors and lengths; see `AttentionSpec`. With `AttentionInputs`, the operator's
    arguments: `fa4.ops` makes the schema of the fields of both, in their order."""

    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    deterministic: bool = False
    needs_backward: bool = False
    backend: str = "auto"


class AttentionInputs(NamedTuple):
    """The tensors of one attention problem, already validated.

    Dense: q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim),
    v (batch, seqlen_k, heads_kv, head_dim_v). Varlen: the first two axes are packed into one, sequence b occupying
    rows cu_seqlens[b] to cu_seqlens[b + 1] (int32, batch + 1 entries); seqused (int32, batch) counts the rows of
    each sequence that hold data. The last axis of q, k, v has stride 1; other strides are free. `max_seqlen_*` are
    upper bounds, host integers. sink: one logit per query head, (heads_q,).
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
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def extent(self) -> Extent:
        return Extent(self.batch, self.max_seqlen_q, self.max_seqlen_k)


class Saved(NamedTuple):
    """What a backward gets besides the inputs: the forward's results, and the gradients of the loss to them."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients by name: dq, dk, dv have the shapes and dtypes of q, k, v; dsink that of sink, or None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None
