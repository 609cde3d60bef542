"""torchrun --nproc-per-node 4 -m bench.progress: training steps whose gradients are summed while attention runs.

A small transformer is trained by DDP or FSDP2. NCCL's kernels, which sum the gradients of one layer over the GPUs,
occupy SMs during the backward of the next one. An ordered (deterministic) backward waits on such a chip for CTAs that
come earlier in its order: thousands of steps show that it ends. The steps of the others are timed beside it.

Providers take turns in rounds of several steps; a time is that of such a round over its steps. If no step ends within
`--limit`, the program writes where every thread is, and ends with an error. "repeats" tells whether the parameters of
a second training from the same start are bitwise equal after some steps.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fa4

from . import machine, overlap
from .models import Block, Layer, Shape
from .ranks import gathered, join_group, nccl_version, of_first_rank, wait
from .run import RESULTS
from .summary import training_lines
from .timing import Timing

ORDERED = "fa4, deterministic"
MODES = ("ddp", "fsdp2")
_WARM_UP = 2  # steps that are not timed
_REPEATED = 5  # steps of the two trainings that are compared
_BUCKET_MB = 4  # of DDP: small enough that sums begin in the middle of a layer's backward


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, **grouped).transpose(1, 2)


PROVIDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    ORDERED: functools.partial(fa4.flash_attn_func, causal=True, deterministic=True),
    "fa4, unordered": functools.partial(fa4.flash_attn_func, causal=True, deterministic=False),
    "sdpa": _sdpa,
}


class Training:
    """A model that is split as `mode` says, its optimizer, and this rank's batch."""

    def __init__(self, mode: str, provider: str, shape: Shape, mesh: DeviceMesh, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            model = nn.Sequential(*(Block(shape, PROVIDERS[provider]) for _ in range(shape.layers)))
        model = model.to(getattr(torch, shape.dtype))
        self.gradient_bytes = sum(p.nbytes for p in model.parameters())
        if mode == "ddp":
            ids = [device.index] if device.type == "cuda" else None
            self.model: nn.Module = DistributedDataParallel(
                model, device_ids=ids, bucket_cap_mb=_BUCKET_MB, gradient_as_bucket_view=True
            )
        else:
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        rows = shape.batch, shape.seqlen, shape.hidden
        self.x = torch.randn(rows, device=device, generator=generator).to(getattr(torch, shape.dtype))
        self.times: list[float] = []
        self.steps, self.loss = 0, torch.zeros(())

    def run(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(self.x).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loss = loss.detach()
        self.steps += steps

    def round(self, steps: int, device: torch.device, in_turns: bool) -> None:
        """Also the slowest rank's time, for a step ends on all ranks."""
        wait(device)
        began = time.perf_counter()
        self.run(steps)
        wait(device)
        if in_turns:
            self.times.append(1000 * (time.perf_counter() - began) / steps)

    def parameters(self) -> list[Tensor]:
        """This rank's."""
        parameters = (p.detach() for p in self.model.parameters())
        return [p.to_local() if isinstance(p, DTensor) else p for p in parameters]


def repeats(make: Callable[[], Training]) -> bool:
    """Whether two trainings from the same start are bitwise equal on every rank after some steps."""
    found = []
    for _ in range(2):
        training = make()
        training.run(_REPEATED)
        found.append([p.clone() for p in training.parameters()])
    return all(gathered(all(torch.equal(a, b) for a, b in zip(*found))))


class Watchdog:
    """Ends the process with the place of every thread if `alive` is not called again within `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.alive()

    def alive(self) -> None:
        faulthandler.dump_traceback_later(self.limit, exit=True, file=sys.__stderr__)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def trained(
    trainings: dict[str, Training],
    steps: int,
    beside: int,
    a_round: int,
    device: torch.device,
    seconds: float,
    watchdog: Watchdog,
) -> None:
    """Rounds of all in turns until the others than the ordered one have `beside` steps, then of that one alone until it
    has `steps`, or `seconds` are over. Rounds of all are timed."""
    began = time.monotonic()
    for training in trainings.values():
        training.run(_WARM_UP)
    for i in itertools.count():
        watchdog.alive()
        due = {name: (steps if name == ORDERED else beside) - x.steps for name, x in trainings.items()}
        due = {name: min(n, a_round) for name, n in due.items() if n > 0}
        if not due or of_first_rank(seconds and i > 1 and time.monotonic() - began > seconds):
            return
        for name, n in due.items():
            trainings[name].round(n, device, len(due) == len(trainings))


@click.command(help=__doc__)
@click.option("--modes", default=",".join(MODES), show_default=True)
@click.option("--providers", default=";".join(PROVIDERS), show_default=True, help="Separated by semicolons.")
@click.option("--steps", default=1000, show_default=True, help="Of the ordered backward, in each mode.")
@click.option("--beside", default=100, show_default=True, help="Steps of each of the others.")
@click.option("--round", "a_round", default=20, show_default=True, help="Steps of a provider before the next one's.")
@click.option("--layers", default=2, show_default=True)
@click.option("--heads", nargs=2, default=(8, 8), show_default=True, help="Of queries, of keys and values.")
@click.option("--head-dim", default=128, show_default=True)
@click.option("--seqlen", default=16384, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--seconds", default=0.0, help="Time for each mode; with fewer steps if that is over. 0 means no limit.")
@click.option("--limit", default=60.0, show_default=True, help="Seconds without the end of a round that are a hang.")
@click.option("--output", type=click.Path(path_type=Path), default=None)
def main(
    modes, providers, steps, beside, a_round, layers, heads, head_dim, seqlen, dtype, seconds, limit, output
) -> None:
    if min(steps, beside) <= a_round + _WARM_UP:
        raise click.UsageError(
            f"--steps and --beside must be more than {a_round + _WARM_UP}, so that two rounds are timed"
        )
    watchdog = Watchdog(limit)
    device = join_group()
    world, first = dist.get_world_size(), dist.get_rank() == 0
    mesh = init_device_mesh(device.type, (world,))
    shape = Shape(layers, *heads, head_dim, 1, seqlen, dtype)
    now = datetime.datetime.now(datetime.UTC)
    facts = {**machine.facts(device), "world": world, "nccl": nccl_version()}
    common = {"suite": "progress", "time": now.isoformat(timespec="seconds"), "machine": facts}
    output = output or RESULTS / f"{now:%Y-%m-%d}_{world}x-{machine.slug(facts['device'])}_progress.jsonl"
    names = [name.strip() for name in providers.split(";")]
    for mode in modes.split(","):
        make = functools.partial(Training, mode, shape=shape, mesh=mesh, device=device)
        same = {}
        for name in names:
            watchdog.alive()
            same[name] = repeats(functools.partial(make, name))
        trainings = {name: make(name) for name in names}
        trained(trainings, steps, beside, a_round, device, seconds, watchdog)
        for name, training in trainings.items():
            watchdog.alive()
            timing = asdict(Timing.of(training.times))
            row = {
                **common,
                "provider": name,
                "label": f"{mode} {shape.case(Layer()).label}",
                "mode": mode,
                **asdict(shape),
            }
            row |= {**timing, "steps": training.steps, "loss": float(training.loss), "repeats_bitwise": same[name]}
            row |= {"gradient_bytes": training.gradient_bytes, "tokens_per_second": 1e3 * seqlen / timing["median_ms"]}
            if device.type == "cuda":
                row["overlap"] = overlap.traced(functools.partial(training.run, 1))
            if first:
                output.parent.mkdir(parents=True, exist_ok=True)
                with output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(training_lines([row])[-1], flush=True)
        del trainings
    watchdog.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
