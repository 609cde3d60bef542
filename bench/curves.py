"""python -m bench.curves: losses of a small transformer trained with 16-bit and with 8-bit attention, as rows.

Model and text are those of `python -m fa4 demo`: bytes of Python's language reference, the last tenth held out. Only
attention differs between the trainings of a seed: weights start equal, batches are equal, and the rest of the model is
float32 (on a GPU its products are TF32). A row is one training. `python -m bench.curves_page` writes the page.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from fa4.cli import demo
from fa4.cli.main import device_named

from . import machine

RESULTS = Path("bench/results")
ATTENTION: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "fp8": {"dtype": torch.bfloat16, "precision": "fp8"},
    "mxfp8": {"dtype": torch.bfloat16, "precision": "mxfp8"},
}


class Size(NamedTuple):
    model: demo.ModelConfig
    training: demo.TrainConfig


SIZES = {
    "small": Size(
        demo.ModelConfig(layers=2, heads_q=4, heads_kv=2, head_dim=32),
        demo.TrainConfig(steps=400, batch=4, seqlen=256, held_out_batches=16, evaluate_every=40),
    ),
    "large": Size(
        demo.ModelConfig(layers=6, heads_q=4, heads_kv=2, head_dim=128),
        demo.TrainConfig(steps=300, batch=8, seqlen=1024, learning_rate=1e-3, held_out_batches=4, evaluate_every=20),
    ),
}


def settings(size: Size) -> dict[str, Any]:
    """What all trainings of a page have in common."""
    model, training = asdict(size.model), asdict(size.training)
    for of, name in ((model, "dtype"), (model, "precision"), (training, "seed")):
        del of[name]
    text = bytes(demo.corpus().tolist())
    text_facts = {"text_bytes": len(text), "text_sha256": hashlib.sha256(text).hexdigest()[:16]}
    return {**model, **training, **text_facts, "products": torch.get_float32_matmul_precision()}


def trained(name: str, size: Size, seed: int, device: torch.device) -> dict[str, Any]:
    """Losses of a training. `training_losses` are means of the steps since the last held-out loss."""
    model, training = replace(size.model, **ATTENTION[name]), replace(size.training, seed=seed)
    told = demo.explain_attention(model, training, device)
    result = demo.train(model, training, device)
    steps = sorted(result.held_out)
    pieces = [result.losses[begin:end] for begin, end in itertools.pairwise(steps)]
    return {
        "backend": told.chosen,
        "multiplies_8bit": told.spec.operands is not None,
        "steps_done": steps,
        "held_out_losses": [round(result.held_out[step], 6) for step in steps],
        "training_losses": [round(sum(piece) / len(piece), 6) for piece in pieces],
    }


@click.command(help=__doc__)
@click.option("--size", "named", type=click.Choice(list(SIZES)), help="Default: large on a GPU, else small.")
@click.option("--attention", default=",".join(ATTENTION), show_default=True, help="Comma-separated.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--seconds", default=float("inf"), help="Start no further seed after so many seconds.")
@click.option("--device", default=None, help="Default: cuda if there is one, else cpu.")
@click.option("--commit", default=None, help="Default: that of the checkout.")
@click.option("--output", type=click.Path(path_type=Path), help="Default: a file of bench/results; rows are appended.")
def main(
    named: str | None, attention: str, seeds: int, seconds: float, device: str | None, commit: str | None,
    output: Path | None,
) -> None:  # fmt: skip
    names = attention.split(",")
    if unknown := set(names) - set(ATTENTION):
        raise click.BadParameter(f"{min(unknown)!r} is none of {', '.join(ATTENTION)}", param_hint="--attention")
    where, now, began = device_named(device), datetime.datetime.now(datetime.UTC), time.perf_counter()
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")
    named = named or ("large" if where.type == "cuda" else "small")
    facts, size = machine.facts(where), SIZES[named]
    output = output or RESULTS / f"{now:%Y-%m-%d}_{machine.slug(facts['device'])}_curves-{named}.jsonl"
    common = {"suite": "curves", "time": now.isoformat(timespec="seconds"), "machine": facts}
    common |= {"commit": commit or machine.commit(), "settings": settings(size)}
    for seed in range(seeds):
        if time.perf_counter() - began > seconds:
            click.echo(f"stopped before seed {seed}")
            break
        for name in names:
            start = time.perf_counter()
            row = trained(name, size, seed, where)
            with output.open("a") as file:
                file.write(
                    json.dumps({**common, "provider": name, "label": f"seed {seed}", "seed": seed, **row}) + "\n"
                )
            losses = f"training {row['training_losses'][-1]:.4f}, held out {row['held_out_losses'][-1]:.4f}"
            click.echo(f"seed {seed}, {name:8}  {losses}, {time.perf_counter() - start:.1f} s")
    click.echo(f"rows appended to {output}")


if __name__ == "__main__":
    main()
