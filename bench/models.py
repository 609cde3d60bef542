"""Small transformers with the attention of well-known models, by who attends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fa4

from .providers import PROVIDERS, NotOffered
from .suites import BenchCase

Attend = Callable[..., Tensor]
"""Attention on q, k, v (batch, seqlen, heads, head_dim), causal, and in layers with a sink on its (heads_q,)."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention of a layer. window: keys to the left that a query sees beside its own, None for all."""

    window: int | None = None
    softcap: float = 0.0
    has_sink: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the model and of a step's tokens. pattern: kinds of layers, in turns."""

    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    batch: int
    seqlen: int
    dtype: str = "bfloat16"
    vocabulary: int = 32000
    pattern: tuple[Layer, ...] = (Layer(),)

    @property
    def hidden(self) -> int:
        return self.heads_q * self.head_dim

    def case(self, layer: Layer) -> BenchCase:
        heads = self.heads_q, self.heads_kv, self.head_dim, self.head_dim
        return BenchCase(
            "bwd", self.batch, self.seqlen, self.seqlen, *heads, True, self.dtype, window=layer.window
        )  # fmt: skip


MODELS = {
    "gpt": Shape(4, 16, 4, 128, 2, 8192),
    # Gemma 2: windows of 4096 in every second layer.
    "gemma": Shape(4, 16, 8, 256, 1, 8192, pattern=(Layer(4095, 50.0), Layer(None, 50.0))),
    # gpt-oss: windows of 128 in every second layer; its hidden size is smaller.
    "gpt-oss": Shape(4, 64, 8, 64, 1, 8192, pattern=(Layer(127, has_sink=True), Layer(has_sink=True))),
}


def _fa4(layer: Layer, shape: Shape) -> Attend:
    call = functools.partial(
        fa4.flash_attn_func, causal=True, window_size=(layer.window, None), softcap=layer.softcap
    )  # fmt: skip
    return lambda q, k, v, sink=None: call(q, k, v, learnable_sink=sink)


def _flash_attn_4(layer: Layer, shape: Shape) -> Attend:
    from flash_attn.cute import flash_attn_func

    mask = dict(causal=True) if layer.window is None else dict(window_size=(layer.window, 0))
    return lambda q, k, v, sink=None: flash_attn_func(q, k, v, softcap=layer.softcap, learnable_sink=sink, **mask)[0]


def _flex(layer: Layer, shape: Shape) -> Attend:
    """The sink is a factor on the results, of their lse."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    left = shape.seqlen if layer.window is None else layer.window

    def is_visible(b, h, i, j):
        return (j <= i) & (j >= i - left)

    def capped(score, b, h, i, j):
        return layer.softcap * torch.tanh(score / layer.softcap)

    compiled, score_mod = torch.compile(flex_attention), capped if layer.softcap else None

    @functools.cache
    def block_mask(device):
        return create_block_mask(is_visible, None, None, shape.seqlen, shape.seqlen, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        is_group = shape.heads_q != shape.heads_kv
        out, lse = compiled(
            *heads_first, score_mod, block_mask(q.device), enable_gqa=is_group, return_lse=True
        )  # fmt: skip
        if sink is not None:
            out = out * torch.sigmoid(lse - sink.float()[:, None])[..., None].to(out.dtype)
        return out.transpose(1, 2)

    return attend


_KINDS = {"fa4": _fa4, "flash-attn-4": _flash_attn_4, "flex": _flex}


def attention(provider: str, layer: Layer, shape: Shape) -> Attend:
    """Return the attention of a layer; raise `NotOffered` if the provider has none."""
    if provider in _KINDS:
        return _KINDS[provider](layer, shape)
    if layer.softcap or layer.has_sink:
        raise NotOffered("has no softcap or sink")
    return PROVIDERS[provider].build(shape.case(layer))


class Block(nn.Module):
    """Pre-norm attention and a gated MLP."""

    def __init__(self, shape: Shape, attend: Attend, has_sink: bool = False) -> None:
        super().__init__()
        self.shape, self.attend, hidden = shape, attend, shape.hidden
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, (shape.heads_q + 2 * shape.heads_kv) * shape.head_dim, bias=False)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 6 * hidden, bias=False), nn.Linear(3 * hidden, hidden, bias=False)
        self.sink = nn.Parameter(torch.zeros(shape.heads_q)) if has_sink else None

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, shape.head_dim))
        sinks = () if self.sink is None else (self.sink,)
        attended = self.attend(*heads.split([shape.heads_q, shape.heads_kv, shape.heads_kv], dim=2), *sinks)
        x = x + self.project(attended.flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def model(provider: str, shape: Shape, device: torch.device) -> nn.Module:
    """Return a model with random weights."""
    kinds = [shape.pattern[i % len(shape.pattern)] for i in range(shape.layers)]
    attends = {layer: attention(provider, layer, shape) for layer in dict.fromkeys(kinds)}
    with device:  # a GPU draws the weights in a hundredth of the time
        blocks = [Block(shape, attends[layer], layer.has_sink) for layer in kinds]
        ends = nn.Embedding(shape.vocabulary, shape.hidden), nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        made = nn.Sequential(ends[0], *blocks, nn.RMSNorm(shape.hidden), ends[1])
    return made.to(getattr(torch, shape.dtype))


def changed(shape: Shape, **fields: object) -> Shape:
    """Return the shape with those fields that are not None."""
    return dataclasses.replace(shape, **{name: value for name, value in fields.items() if value is not None})  # type: ignore[arg-type]
