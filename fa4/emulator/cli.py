"""python -m fa4 emulate: run fa4's own kernels on an emulated chip, from the shell."""

from __future__ import annotations

import time
from dataclasses import dataclass

import click
import torch
from torch import Tensor

from fa4.emulator.errors import EmulationError
from fa4.emulator.machine import SCHEDULES, Checks

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Problem:
    """One attention call, by shape and flags."""

    direction: str
    batch: int
    seqlen: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    causal: bool

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the upstream gradient of the output, from a normal distribution."""
        generator = torch.Generator().manual_seed(seed)

        def normal(seqlen: int, heads: int) -> Tensor:
            shape = (self.batch, seqlen, heads, self.head_dim)
            return torch.randn(shape, generator=generator).to(self.dtype)

        q = normal(self.seqlen, self.heads)
        k, v = normal(self.seqlen_k, self.heads_kv), normal(self.seqlen_k, self.heads_kv)
        return q, k, v, normal(self.seqlen, self.heads)

    def run(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], backend: str) -> dict[str, Tensor]:
        """The output, and the gradients when the direction is "bwd", by name."""
        from fa4 import flash_attn_func

        q, k, v = (x.detach().requires_grad_(self.direction == "bwd") for x in tensors[:3])
        out = flash_attn_func(q, k, v, causal=self.causal, backend=backend)
        assert isinstance(out, Tensor)
        if self.direction == "fwd":
            return {"out": out}
        gradients = torch.autograd.grad(out, (q, k, v), tensors[3].to(out.dtype))
        return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients))}


def _errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    return {name: (got[name].double() - want[name].double()).abs().max().item() for name in want}


def register(group: click.Group) -> None:
    """Add `emulate` to the project's command line."""
    group.add_command(emulate_command)


@click.command("emulate")
@click.argument("direction", type=click.Choice(["fwd", "bwd"]))
@click.option("--seqlen", default=256, show_default=True, help="Queries per sequence.")
@click.option("--seqlen-k", type=int, help="Keys per sequence [default: seqlen].")
@click.option("--batch", default=1, show_default=True)
@click.option("--heads", default=1, show_default=True)
@click.option("--heads-kv", type=int, help="Key/value heads [default: heads].")
@click.option("--head-dim", default=128, show_default=True)
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="bf16", show_default=True)
@click.option("--causal", is_flag=True)
@click.option("--chip", default="sm_100a", show_default=True)
@click.option("--sms", default=4, show_default=True, help="Multiprocessors of the chip.")
@click.option("--backend", default="auto", show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--seeds", default=1, show_default=True, help="Seeds to run, each with the next schedule.")
@click.option("--schedule", type=click.Choice(SCHEDULES), help="[default: one after the other]")
@click.option("--races/--no-races", default=True, show_default=True, help="Check for data races.")
@click.option("--trace", "trace_path", type=click.Path(dir_okay=False), help="Write a Chrome trace of the first seed.")
@click.option("--report/--no-report", default=True, show_default=True)
def emulate_command(
    direction: str, seqlen: int, seqlen_k: int | None, batch: int, heads: int, heads_kv: int | None, head_dim: int,
    dtype: str, causal: bool, chip: str, sms: int, backend: str, seed: int, seeds: int, schedule: str | None,
    races: bool, trace_path: str | None, report: bool,
) -> None:  # fmt: skip
    """Run our attention kernels on an emulated chip, against float64, under one seed or several."""
    from fa4.emulator import emulate, trace

    problem = Problem(
        direction, batch, seqlen, seqlen_k or seqlen, heads, heads_kv or heads, head_dim, _DTYPES[dtype], causal
    )
    for number in range(seeds):
        current = seed + number
        tensors = problem.inputs(current)
        doubled = tuple(x.double() for x in tensors)
        oracle = problem.run(doubled, "torch")  # type: ignore[arg-type]
        usual = _errors(problem.run(tensors, "torch"), oracle)
        order = schedule or SCHEDULES[current % len(SCHEDULES)]
        wants_trace = trace_path is not None and number == 0
        start = time.perf_counter()
        with emulate(chip, sms=sms, seed=current, schedule=order, checks=Checks(races=races), trace=wants_trace) as gpu:
            try:
                got = problem.run(tensors, backend)
            except EmulationError as error:
                raise click.ClickException(f"seed {current}, {order}: {type(error).__name__}: {error}") from error
        click.echo(f"seed {current}, {order}: {time.perf_counter() - start:.1f} s with compilation")
        for name, error in _errors(got, oracle).items():
            click.echo(f"  {name}: error {error:.2e} against float64; torch in {dtype} has {usual[name]:.2e}")
        if wants_trace:
            assert trace_path is not None
            click.echo(f"  {trace.write(trace_path, gpu.launches):,} events in {trace_path}")
    if report:
        click.echo(gpu.report())
