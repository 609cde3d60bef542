"""python -m bench.train: tokens a second, and tokens a joule, of a small transformer, by who attends.

The models have the attention of well-known ones: `gpt` is causal with groups of heads, `gemma` has head_dim 256,
softcap and windows of 4096, `gpt-oss` has head_dim 64, sinks and windows of 128. A model is in the dtype named, trained
with AdamW on random tokens. Every provider starts from the same weights and sees the same tokens. They take turns step
by step, each after another one in every round, so what drifts meets them all. A step is forward, backward and update,
timed from an idle device to an idle device. Losses after the last step tell whether all computed the same. For the
energy, each provider then trains for some seconds without a pause, twice, beside NVML's counter of the GPU (package
nvidia-ml-py).
"""

from __future__ import annotations

import datetime
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fa4.cli.main import device_named

from . import energy, machine
from .models import MODELS, Shape, attention, changed, model
from .providers import PROVIDERS, NotOffered
from .timing import Timing, orders


class Run:
    """One provider's model and optimizer."""

    def __init__(self, name: str, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        self.times: list[float] = []
        self.model = model(name, shape, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, tokens: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@dataclass(slots=True)
class Trained:
    """Times of a step, the loss of the last timed one, and without a pause: steps and joules of each turn."""

    timing: Timing
    loss: float
    turns: list[tuple[int, float]] = field(default_factory=list)

    def tokens_per_joule(self, shape: Shape) -> float | None:
        steps, joules = (sum(column) for column in zip(*self.turns)) if self.turns else (0, 0.0)
        return shape.batch * shape.seqlen * steps / joules if joules else None


def train(
    shape: Shape, names: list[str], steps: int, device: torch.device, seconds: float = 0.0
) -> dict[str, Trained]:  # fmt: skip
    """Train a model by each provider; two steps at first do not count. seconds: of each turn for the energy."""
    runs, losses = {name: Run(name, shape, device) for name in names}, {}
    batches = _batches(shape, device)
    for step, order in zip(range(steps + 2), itertools.cycle(orders(len(names)))):
        tokens = next(batches)
        for name in (names[place] for place in order):
            run = runs[name]
            _wait(device)
            began = time.perf_counter()
            losses[name] = run.step(tokens)
            _wait(device)
            run.times += [1000 * (time.perf_counter() - began)] if step >= 2 else []
    done = {name: Trained(Timing.of(run.times), float(losses[name])) for name, run in runs.items()}
    joules = energy.counter(device)
    if seconds and joules is not None:
        for name in (*names, *reversed(names)):
            done[name].turns.append(_without_a_pause(runs[name], next(batches), seconds, joules, device))
    return done


def _batches(shape: Shape, device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.seqlen + 1), generator=generator)
        yield tokens.to(device)


def _without_a_pause(
    run: Run, tokens: Tensor, seconds: float, joules: Callable[[], float], device: torch.device
) -> tuple[int, float]:
    """Steps and joules of so many seconds, after a second that brings the GPU to its power."""
    _steps_for(run, tokens, 1.0, device)
    before = joules()
    steps = _steps_for(run, tokens, seconds, device)
    return steps, joules() - before


def _steps_for(run: Run, tokens: Tensor, seconds: float, device: torch.device) -> int:
    steps, began = 0, time.perf_counter()
    while not steps or time.perf_counter() - began < seconds:
        run.step(tokens)
        _wait(device)
        steps += 1
    return steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@click.command(help=__doc__)
@click.option("--providers", default="fa4,sdpa,flash-attn-4", show_default=True)
@click.option("--model", "kind", type=click.Choice([*MODELS]), default="gpt", show_default=True)
@click.option("--layers", default=None, type=click.IntRange(1), help="This and the sizes below: default by --model.")
@click.option("--heads", nargs=2, default=None, type=click.IntRange(1), help="Of queries, of keys and values.")
@click.option("--head-dim", default=None, type=click.IntRange(1))
@click.option("--batch", default=None, type=click.IntRange(1))
@click.option("--seqlen", default=None, type=click.IntRange(1))
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--vocabulary", default=32000, show_default=True)
@click.option("--steps", default=10, show_default=True, type=click.IntRange(min=2))
@click.option("--energy-seconds", default=0.0, show_default=True, help="Of each provider's turns; 0 for none.")
@click.option("--device", default=None, help="Default: cuda if there is one, else cpu.")
@click.option("--output", type=click.Path(path_type=Path), default=None, help="A .jsonl file that rows are added to.")
def main(
    providers, kind, layers, heads, head_dim, batch, seqlen, dtype, vocabulary, steps, energy_seconds, device, output
) -> None:
    where = device_named(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    heads_q, heads_kv = heads or (None, None)
    shape = changed(
        MODELS[kind], layers=layers, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, batch=batch, seqlen=seqlen,
        dtype=dtype, vocabulary=vocabulary,
    )  # fmt: skip
    console, names = Console(highlight=False), []
    for name in (name.strip() for name in providers.split(",")):
        if name not in PROVIDERS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(PROVIDERS)}", param_hint="--providers")
        reason = PROVIDERS[name].unavailable(where) or _not_offered(name, shape)
        names += [] if reason else [name]
        if reason:
            console.print(f"{name} is skipped: {reason}")
    if energy_seconds and energy.counter(where) is None:
        raise click.BadParameter("needs a GPU, and the package nvidia-ml-py", param_hint="--energy-seconds")
    title = f"{kind}: {shape}"
    table = Table("provider", "ms a step", "quartiles", "tokens/s", "tokens/J", "last loss", title=title)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    common = {"suite": "train", "time": now, "commit": machine.commit(), "machine": machine.facts(where), "model": kind}
    for name, done in train(shape, names, steps, where, energy_seconds).items():
        timing, per_joule = done.timing, done.tokens_per_joule(shape)
        rate, quartiles = (
            1000 * shape.batch * shape.seqlen / timing.median_ms,
            f"{timing.q25_ms:.1f} {timing.q75_ms:.1f}",
        )
        joules = "" if per_joule is None else f"{per_joule:.1f}"
        table.add_row(name, f"{timing.median_ms:.1f}", quartiles, f"{rate:,.0f}", joules, f"{done.loss:.4f}")
        if output is not None:
            row = {"provider": name, **asdict(shape), **asdict(timing), "tokens_per_second": rate, "loss": done.loss}
            row |= {"turns": done.turns, "tokens_per_joule": per_joule}
            with output.open("a") as file:
                file.write(json.dumps({**common, **row}) + "\n")
    console.print(table)


def _not_offered(name: str, shape: Shape) -> str:
    """The reason why a provider cannot train a model, or ""."""
    try:
        for layer in shape.pattern:
            attention(name, layer, shape)
    except NotOffered as reason:
        return str(reason)
    return ""


if __name__ == "__main__":
    main()
