"""Demo: train a small causal transformer on real English text, with fa4 attention in every layer.

The text is the language reference that ships with Python (`pydoc_data.topics`), read as bytes. The same model, data and
seed are trained twice; bitwise equal weights show that the backward is deterministic.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..api.dense import flash_attn_func
from ..api.explained import explain
from ..torch_ops.low_precision import Precision

VOCABULARY = 256  # bytes


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of the transformer. `hidden` is heads_q * head_dim."""

    layers: int = 4
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float32  # of the attention inputs; weights are float32
    precision: Precision | None = None  # of the attention

    @property
    def hidden(self) -> int:
        return self.heads_q * self.head_dim


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run. A step sees batch * seqlen tokens.

    evaluate_every: steps from one held-out loss to the next one; 0 means before and after the training only.
    """

    steps: int = 100
    batch: int = 8
    seqlen: int = 256
    learning_rate: float = 3e-3
    seed: int = 0
    held_out_batches: int = 1
    evaluate_every: int = 0


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, seqlen, heads, head_dim), base 10,000 (Su et al., arXiv 2104.09864)."""
    seqlen, half = x.shape[1], x.shape[-1] // 2
    frequency = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(seqlen, device=x.device)[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.config, self.backend = config, backend
        width = (config.heads_q + 2 * config.heads_kv) * config.head_dim
        self.norm_attention, self.norm_mlp = nn.RMSNorm(config.hidden), nn.RMSNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, width, bias=False)
        self.project = nn.Linear(config.hidden, config.hidden, bias=False)
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.down = nn.Linear(4 * config.hidden, config.hidden, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v before rotation, each (..., heads, head_dim)."""
        c = self.config
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (-1, c.head_dim))
        return heads.split([c.heads_q, c.heads_kv, c.heads_kv], dim=-2)

    def attention_inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each (batch, seqlen, heads, head_dim)."""
        q, k, v = self.heads(x)
        return tuple(part.to(self.config.dtype) for part in (rotate(q), rotate(k), v))

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the projection of attended, (..., heads, head_dim), and the MLP to x."""
        x = x + self.project(attended.flatten(-2).to(x.dtype))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention_inputs(x)
        attended: Any = flash_attn_func(
            q, k, v, causal=True, deterministic=True, precision=self.config.precision, backend=self.backend
        )
        return self.add(x, attended)


class Transformer(nn.Module):
    """A byte-level language model."""

    def __init__(self, config: ModelConfig, backend: str = "auto") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, config.hidden)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, seqlen) bytes to (batch, seqlen, VOCABULARY) logits; input and output embedding are shared."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


@dataclass(slots=True)
class TrainResult:
    """Losses in nats per byte, one per step, held-out losses by the number of steps before them, speed (with the time
    of evaluations between steps), and the weights' SHA-256."""

    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    tokens_per_second: float = float("nan")
    weights_digest: str = ""
    model: Transformer | None = None


def corpus() -> Tensor:
    """Return the text as int64 bytes, about half a million."""
    from pydoc_data.topics import topics

    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))


def _batch(
    data: Tensor, config: TrainConfig, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - config.seqlen - 1, (config.batch,), generator=generator)
    rows = torch.stack([data[s : s + config.seqlen + 1] for s in starts.tolist()]).to(device)
    return rows[:, :-1], rows[:, 1:]


def _loss(model: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        sha.update(parameter.detach().cpu().numpy().tobytes())
    return sha.hexdigest()


def train(
    model_config: ModelConfig,
    config: TrainConfig,
    device: torch.device,
    *,
    backend: str = "auto",
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> TrainResult:
    """Train from scratch; equal arguments give bitwise equal weights. The last tenth of the text is held out."""
    torch.manual_seed(config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    data = corpus()
    split = len(data) * 9 // 10
    model = Transformer(model_config, backend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=config.steps + 1)
    fixed = torch.Generator().manual_seed(1)
    held_out = [_batch(data[split:], config, fixed, device) for _ in range(config.held_out_batches)]

    def held_out_loss() -> float:
        with torch.no_grad():
            return sum(float(_loss(model, *batch)) for batch in held_out) / len(held_out)

    result = TrainResult(held_out={0: held_out_loss()})
    started = time.perf_counter()
    for step in range(config.steps):
        if step and config.evaluate_every and step % config.evaluate_every == 0:
            result.held_out[step] = held_out_loss()
        loss = _loss(model, *_batch(data[:split], config, generator, device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        result.losses.append(float(loss.detach()))
        on_step(step, result.losses[-1])
    result.tokens_per_second = config.steps * config.batch * config.seqlen / (time.perf_counter() - started)
    result.held_out[config.steps] = held_out_loss()
    result.weights_digest, result.model = _digest(model), model
    return result


def first_attention(model: Transformer, tokens: int) -> tuple[Tensor, ...]:
    """Return the first layer's q, k and v for the end of the text: bfloat16, CPU, (1, tokens, heads, head_dim)."""
    text = corpus()[-tokens:][None].to(model.embed.weight.device)
    with torch.no_grad():
        qkv_parts = cast(Block, model.blocks[0]).attention_inputs(model.embed(text))
    return tuple(x.to("cpu", torch.bfloat16) for x in qkv_parts)


def explain_attention(model: ModelConfig, config: TrainConfig, device: torch.device, backend: str = "auto"):
    """Return `fa4.explain` of the model's attention calls."""
    q = torch.empty(config.batch, config.seqlen, model.heads_q, model.head_dim, dtype=model.dtype, device=device)
    kv = q[:, :, : model.heads_kv]
    q.requires_grad_()
    return explain(q, kv, kv, causal=True, deterministic=True, precision=model.precision, backend=backend)
