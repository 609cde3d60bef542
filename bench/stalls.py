"""python -m bench.stalls: kernels that calls of random lengths and batches need, and the calls that wait for them.

Kinds of layers of a training run. Lengths are log-uniform between --seqlen's two numbers, the batch uniform within
--tokens. Without --train nothing is compiled or launched, so --chip may be any chip. A call waits if it needs a kernel
that no earlier call needed. A call does not if one of the same program is there: another process compiles meanwhile.

--train: a small transformer on the GPU, a step for each random length. Runs: "background" with an empty disk cache,
"filled" with the kernels of that run, and "waiting" with an empty cache and FA4_BACKGROUND=0. Steps that wait, the
seconds they wait, and the seconds of all steps. Without a GPU a step is one attention, forward and backward, whose
kernels are compiled and loaded but not launched. Rows, one for each kind or run, go to --out.
"""

from __future__ import annotations

import collections
import datetime
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

import fa4
from fa4.api.ahead import AheadProblem, requests_of
from fa4.cli.options import ChipNumber
from fa4.runtime import env, jit
from fa4.runtime.spec import AttentionSpec, ProblemSize

from . import machine
from .models import Shape
from .train import Run
from .without_gpu import loaded_only

# (head_dim, heads_q, heads_kv)
_HEADS = ((64, 16, 16), (64, 32, 8), (96, 16, 16), (128, 16, 16), (128, 32, 8), (192, 16, 16), (256, 8, 8))
KINDS = [(*heads, causal) for heads in _HEADS for causal in (False, True)]
_SEEDS = 10
_LARGEST_BATCH = 64
_STEP_SECONDS = 0.1  # of a step whose kernels are not launched


def random_extents(seed: int, seqlen: tuple[int, int], tokens: int) -> Iterator[ProblemSize]:
    """Yield sizes of self-attention without end."""
    rng = random.Random(seed)
    while True:
        length = round(math.exp(rng.uniform(*map(math.log, seqlen))))
        yield ProblemSize(rng.randint(1, max(1, min(_LARGEST_BATCH, tokens // length))), length, length)


def count(chip: int, kind: tuple[int, int, int, bool], calls: int, seqlen: tuple[int, int], tokens: int) -> dict:
    """Return the row of a kind: medians over seeds."""
    head_dim, heads_q, heads_kv, causal = kind
    spec = AttentionSpec(
        torch.bfloat16, head_dim, head_dim, heads_q, heads_kv, head_dim**-0.5, window_right=0 if causal else None,
        needs_backward=True,
    )  # fmt: skip
    needed: dict[ProblemSize, dict[str, list]] = {}
    found: dict[str, list[int]] = collections.defaultdict(list)
    for seed in range(_SEEDS):
        kernels: set[tuple] = set()
        programs: set[str] = set()
        waits, waits_alone = 0, 0
        for extent in itertools.islice(random_extents(seed, seqlen, tokens), calls):
            if extent not in needed:
                needed[extent] = {}
                for _, key in requests_of(AheadProblem(chip, spec, extent)):
                    needed[extent].setdefault(key[0], []).append(key)
            keys = {key for of_program in needed[extent].values() for key in of_program}
            waits_alone += not keys <= kernels
            # (Another process compiles the combine kernel together with the forward.)
            waits += not needed[extent].keys() - {"combine"} <= programs
            kernels |= keys
            programs |= needed[extent].keys()
        for name, value in (("kernels", len(kernels)), ("waits_without_background", waits_alone), ("waits", waits)):
            found[name].append(value)
    facts = dict(head_dim=head_dim, heads_q=heads_q, heads_kv=heads_kv, causal=causal, calls=calls)
    return facts | {name: statistics.median(values) for name, values in found.items()} | dict(most=max(found["waits"]))


def train_here(heads: tuple[int, int, int], steps: int, seqlen: tuple[int, int], tokens: int, seed: int) -> dict:
    """Train in this process; return its row. The first step is preceded by one of other layers."""
    device = torch.device("cuda")
    head_dim, heads_q, heads_kv = heads
    shape = Shape(4, heads_q, heads_kv, head_dim, 1, seqlen[1])
    run = Run("fa4", shape, device)
    seconds, waiting, generator = [], 0, torch.Generator().manual_seed(seed)
    # cuBLAS, the optimizer and the allocator start with the same model without attention.
    _warm(run, shape, tokens)
    for extent in itertools.islice(random_extents(seed, seqlen, tokens), steps):
        size = extent.batch, extent.max_seqlen_q + 1
        batch = torch.randint(shape.vocabulary, size, generator=generator).to(device)
        before = len(jit.waits)
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = run.step(batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        waiting += any(wait.compiled for wait in jit.waits[before:])
    return dict(
        steps=steps,
        steps_that_wait=waiting,
        kernels=len(jit.waits),
        wait_s=sum(wait.seconds for wait in jit.waits),
        all_steps_s=sum(seconds),
        longest_step_s=max(seconds),
        median_step_s=statistics.median(seconds),
        loss=float(loss),
    )


def call_here(heads: tuple[int, int, int], steps: int, seqlen: tuple[int, int], tokens: int, seed: int) -> dict:
    """Without a GPU: attention and its gradients alone, with kernels that are compiled and loaded, but not launched."""
    waiting, (head_dim, heads_q, heads_kv) = 0, heads
    with loaded_only():
        for batch, rows, _ in itertools.islice(random_extents(seed, seqlen, tokens), steps):
            q, k, v = (
                torch.empty(batch, rows, count, head_dim, dtype=torch.bfloat16, requires_grad=True)
                for count in (heads_q, heads_kv, heads_kv)
            )
            before = len(jit.waits)
            out = fa4.flash_attn_func(q, k, v, causal=True)
            out.backward(torch.empty_like(out))
            waiting += any(wait.compiled for wait in jit.waits[before:])
            time.sleep(_STEP_SECONDS)
    waits = jit.waits
    return dict(
        steps=steps, steps_that_wait=waiting, kernels=len(waits), wait_s=sum(wait.seconds for wait in waits),
        longest_wait_s=max(wait.seconds for wait in waits),
    )  # fmt: skip


def _warm(run: Run, shape: Shape, tokens: int) -> None:
    """Run a step whose attention is none."""
    blocks = [block for block in run.model if hasattr(block, "attend")]
    attends = [block.attend for block in blocks]
    for block in blocks:
        block.attend = lambda q, k, v: q + (k + v).repeat_interleave(shape.heads_q // shape.heads_kv, 2)
    run.step(torch.zeros(1, tokens + 1, dtype=torch.long, device="cuda"))
    for block, attend in zip(blocks, attends):
        block.attend = attend


# Name of a run: (its disk cache, FA4_BACKGROUND).
RUNS = {"background": ("new", "1"), "filled": ("filled", "1"), "waiting": ("empty", "0")}


def train(
    names: list[str], heads: tuple[int, int, int], steps: int, seqlen: tuple[int, int], tokens: int, seed: int
) -> Iterator[dict]:
    """Yield the row of each run; a run is a fresh process. "filled" has the kernels that "background" compiled."""
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as own:
        for name in names:
            cache, background = RUNS[name]
            command = [sys.executable, "-m", "bench.stalls", "--train-here", "--steps", str(steps), "--seed", str(seed)]
            command += ["--heads", *map(str, heads), "--seqlen", *map(str, seqlen), "--tokens", str(tokens)]
            folder = own if cache == "empty" else shared
            variables = {env.CACHE_DIR.name: folder, env.CACHE.name: "1", env.BACKGROUND.name: background}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
            if done.returncode:
                raise click.ClickException(done.stderr[-2000:])
            yield dict(run=name, **json.loads(done.stdout.splitlines()[-1]))


@click.command(help=__doc__)
@click.option("--chip", type=ChipNumber(), default="sm_90a", show_default=True)
@click.option("--calls", default=30, show_default=True, type=click.IntRange(1))
@click.option("--seqlen", nargs=2, default=(64, 16384), show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=32768, show_default=True, type=click.IntRange(1), help="Of a step, at most.")
@click.option("--train", "trains", is_flag=True, help="Train, on the GPU if there is one.")
@click.option(
    "--heads", nargs=3, default=(128, 16, 4), show_default=True, help="head_dim, heads_q, heads_kv of --train."
)
@click.option("--steps", default=200, show_default=True, type=click.IntRange(1), help="Of --train.")
@click.option("--seed", default=None, type=int, help="Of the lengths of --train; default: a fresh one.")
@click.option("--run", "runs", multiple=True, type=click.Choice([*RUNS]), help="Of --train; default: all, in order.")
@click.option("--train-here", "is_process", is_flag=True, hidden=True)
@click.option("--out", default=None, type=click.Path(dir_okay=False), help="File that rows are added to, JSON lines.")
def main(chip, calls, seqlen, tokens, trains, heads, steps, seed, runs, is_process, out) -> None:
    if seqlen[0] > seqlen[1]:
        raise click.BadParameter(f"{seqlen[0]} is above {seqlen[1]}", param_hint="--seqlen")
    has_gpu = torch.cuda.is_available()
    seed = random.randrange(1 << 31) if seed is None else seed
    if is_process:
        click.echo(json.dumps((train_here if has_gpu else call_here)(heads, steps, seqlen, tokens, seed)))
        return
    facts = dict(seqlen=seqlen, tokens=tokens, commit=machine.commit(), date=f"{datetime.date.today()}")
    if trains:
        device = torch.cuda.get_device_name() if has_gpu else "no GPU: compiled for sm_90 and loaded, not launched"
        facts |= dict(heads=heads, device=device, torch=torch.__version__, seed=seed)
        rows = train(runs or [*RUNS], heads, steps, seqlen, tokens, seed)
        columns = [
            "run",
            "steps_that_wait",
            "kernels",
            "wait_s",
            *(["all_steps_s", "longest_step_s"] if has_gpu else ["longest_wait_s"]),
        ]
        title = f"{steps} training steps of random lengths, seed {seed}, {device}"
    else:
        facts |= dict(chip=f"sm_{chip}", how="planned, not compiled")
        rows = (count(chip, kind, calls, seqlen, tokens) for kind in KINDS)
        columns = ["head_dim", "heads_q", "heads_kv", "causal", "kernels", "waits_without_background", "waits", "most"]
        title = f"{calls} training calls of random lengths on sm_{chip}: kernels, and calls that wait (median of seeds)"
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in columns))
        if out:
            with Path(out).open("a") as file:
                file.write(json.dumps(row | facts) + "\n")
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
