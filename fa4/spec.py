"""What is being asked: `AttentionSpec` (no tensors, hashable) and `AttentionInputs` (the tensors).

The spec is everything that may change generated code or results; two calls with equal specs on one chip run the
same kernels. The inputs carry the data and the lengths, none of which may enter a compile key.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


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

    @property
    def causal(self) -> bool:
        return self.window_right == 0

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv

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
        return frozenset(feature for feature, is_asked in asked.items() if is_asked)


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


class Gradients(NamedTuple):
    """Gradients by name: dq, dk, dv have the shapes and dtypes of q, k, v; dsink that of sink, or None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None
