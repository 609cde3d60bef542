"""python -m bench.train: tokens a second of a small transformer with grouped-query attention, by who attends.

The model is in the dtype named, trained with AdamW on random tokens; every provider starts from the same weights and
sees the same tokens, and they take turns step by step, each after another one in every round, so that what drifts meets
them all. A step is forward, backward and update, timed from an idle device to an idle device. Losses after the
last step are printed beside: they tell whether all computed the same.
"""

from __future__ import annotations

import datetime
import itertools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fa4.cli.main import device_named

from . import machine
from .providers import PROVIDERS, Attention
from .suites import BenchCase
from .timing import Timing, orders


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the model and of a step's tokens."""

    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    batch: int
    seqlen: int
    dtype: str = "bfloat16"
    vocabulary: int = 32000

    @property
    def hidden(self) -> int:
        return self.heads_q * self.head_dim

    @property
    def attention(self) -> BenchCase:
        heads = self.heads_q, self.heads_kv, self.head_dim, self.head_dim
        return BenchCase("bwd", self.batch, self.seqlen, self.seqlen, *heads, True, self.dtype)


class Block(nn.Module):
    """Pre-norm attention and a gated MLP."""

    def __init__(self, shape: Shape, attend: Attention) -> None:
        super().__init__()
        self.shape, self.attend, hidden = shape, attend, shape.hidden
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, (shape.heads_q + 2 * shape.heads_kv) * shape.head_dim, bias=False)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 6 * hidden, bias=False), nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, shape.head_dim))
        attended = self.attend(*heads.split([shape.heads_q, shape.heads_kv, shape.heads_kv], dim=2))
        x = x + self.project(attended.flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Run:
    """One provider's model and optimizer."""

    def __init__(self, name: str, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        attend = PROVIDERS[name].build(shape.attention)
        self.times: list[float] = []
        with device:  # a GPU draws the weights in a hundredth of the time
            blocks = [Block(shape, attend) for _ in range(shape.layers)]
            ends = nn.Embedding(shape.vocabulary, shape.hidden), nn.Linear(shape.hidden, shape.vocabulary, bias=False)
            model = nn.Sequential(ends[0], *blocks, nn.RMSNorm(shape.hidden), ends[1])
        self.model = model.to(getattr(torch, shape.dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, tokens: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def train(shape: Shape, names: list[str], steps: int, device: torch.device) -> dict[str, tuple[Timing, float]]:
    """(times of a step, last loss) by provider, after two steps that do not count."""
    runs, losses = {name: Run(name, shape, device) for name in names}, {}
    generator = torch.Generator().manual_seed(0)
    for step, order in zip(range(steps + 2), itertools.cycle(orders(len(names)))):
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.seqlen + 1), generator=generator).to(device)
        for name in (names[place] for place in order):
            run = runs[name]
            _wait(device)
            began = time.perf_counter()
            losses[name] = run.step(tokens)
            _wait(device)
            run.times += [1000 * (time.perf_counter() - began)] if step >= 2 else []
    return {name: (Timing.of(run.times), float(losses[name])) for name, run in runs.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@click.command(help=__doc__)
@click.option("--providers", default="fa4,sdpa,flash-attn-4", show_default=True)
@click.option("--layers", default=8, show_default=True)
@click.option("--heads", nargs=2, default=(16, 4), show_default=True, help="Of queries, of keys and values.")
@click.option("--head-dim", default=128, show_default=True)
@click.option("--batch", default=2, show_default=True)
@click.option("--seqlen", default=8192, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--vocabulary", default=32000, show_default=True)
@click.option("--steps", default=10, show_default=True, type=click.IntRange(min=2))
@click.option("--device", default=None, help="Default: cuda if there is one, else cpu.")
@click.option("--output", type=click.Path(path_type=Path), default=None, help="A .jsonl file that rows are added to.")
def main(providers, layers, heads, head_dim, batch, seqlen, dtype, vocabulary, steps, device, output) -> None:
    where = device_named(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shape = Shape(layers, *heads, head_dim, batch, seqlen, dtype, vocabulary)
    console, names = Console(highlight=False), []
    for name in (name.strip() for name in providers.split(",")):
        if name not in PROVIDERS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(PROVIDERS)}", param_hint="--providers")
        reason = PROVIDERS[name].unavailable(where)
        names += [] if reason else [name]
        if reason:
            console.print(f"{name} is skipped: {reason}")
    table = Table("provider", "ms a step", "quartiles", "tokens/s", "last loss", title=str(shape))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    common = {"suite": "train", "time": now, "machine": machine.facts(where)}
    for name, (timing, loss) in train(shape, names, steps, where).items():
        rate, quartiles = 1000 * batch * seqlen / timing.median_ms, f"{timing.q25_ms:.1f} {timing.q75_ms:.1f}"
        table.add_row(name, f"{timing.median_ms:.1f}", quartiles, f"{rate:,.0f}", f"{loss:.4f}")
        if output is not None:
            row = {"provider": name, **asdict(shape), **asdict(timing), "tokens_per_second": rate, "loss": loss}
            with output.open("a") as file:
                file.write(json.dumps({**common, **row}) + "\n")
    console.print(table)


if __name__ == "__main__":
    main()
