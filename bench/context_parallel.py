"""torchrun --nproc-per-node 2 -m bench.context_parallel: attention over a sequence that is cut among GPUs.

Beside it the whole sequence on one GPU, and torch's own context_parallel: on its flash attention, on cuDNN's, and on
fa4 beneath scaled_dot_product_attention. All take turns in one run, another one first in each round, after a pause: a
chip that has just worked hard has a lower clock. A time of several GPUs is that of the last one to be ready, a time of
one GPU that of the fastest; efficiency is the latter over the former times their number. Results
are checked at a short length before anything is timed, against float64 and by the oracle's rule, and where they are
timed compared with one GPU's: "differs" is the largest difference over the largest value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa4
from fa4 import distributed as cp

from . import machine
from .check import Judge, what_failed
from .run import RESULTS
from .suites import BenchCase, made_tensors
from .timing import Timing

_PAUSE = 0.1  # seconds before each sample
_CHECKED_AT = 4096  # tokens; the reference's score matrices fit there


class Provider(NamedTuple):
    """attend: of q, k, v, (batch, rows, heads, head_dim), a rank's parts or, of one GPU, all. within: what has to be
    entered around it, forward and backward."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    within: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    whole: bool = False


def providers(mesh: DeviceMesh, deterministic: bool) -> list[Provider]:
    def of_fa4(method: str) -> Provider:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cp.context_parallel_attention(q, k, v, causal=True, method=method, deterministic=deterministic)

        return Provider(f"fa4 {method}", attend)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa4.flash_attn_func(q, k, v, causal=True, deterministic=deterministic)

    def of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, **grouped)
        return out.transpose(1, 2)

    return [
        Provider("fa4, one GPU", alone, whole=True),
        *(of_fa4(method) for method in cp.METHODS),
        Provider("torch flash", of_torch, lambda: _in_torchs(mesh, SDPBackend.FLASH_ATTENTION)),
        Provider("torch cuDNN", of_torch, lambda: _in_torchs(mesh, SDPBackend.CUDNN_ATTENTION)),
        Provider("torch on fa4", of_torch, lambda: _in_torchs(mesh, SDPBackend.FLASH_ATTENTION, "fa4")),
    ]


@contextlib.contextmanager
def _in_torchs(mesh: DeviceMesh, kernels: SDPBackend, implementation: str | None = None) -> Iterator[None]:
    from torch.distributed.tensor.experimental import context_parallel

    of_lengths = torch.zeros(2 * mesh.size(), device=mesh.device_type)  # it wants something to cut
    with contextlib.ExitStack() as stack:
        if implementation is not None:
            torch.nn.attention.activate_flash_attention_impl(implementation)
            stack.callback(torch.nn.attention.restore_flash_attention_impl)
        stack.enter_context(sdpa_kernel(kernels))
        stack.enter_context(context_parallel(mesh, buffers=[of_lengths], buffer_seq_dims=[0]))
        yield


class Work(NamedTuple):
    """What a provider does with a case. results: as they lie on the ranks."""

    provider: Provider
    run: Callable[[], object]
    results: dict[str, Tensor]


def work_of(provider: Provider, case: BenchCase, tensors: tuple[Tensor, ...]) -> Work:
    """A forward, or a backward from a forward run once."""
    backward = case.direction == "bwd"
    parts = tensors if provider.whole else tuple(cp.shard(x) for x in tensors)
    q, k, v = (x.detach().requires_grad_(backward) for x in parts[:3])
    with provider.within(), torch.set_grad_enabled(backward):
        out = provider.attend(q, k, v)
        if not backward:
            return Work(provider, lambda: provider.attend(q, k, v), {"out": out})

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (q, k, v), parts[3], retain_graph=True)

        return Work(provider, run, dict(zip(("dq", "dk", "dv"), run())))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _sample(work: Work, device: torch.device) -> float:
    """Milliseconds on this rank, all ranks having begun together."""
    with work.provider.within(), torch.set_grad_enabled("out" not in work.results):
        _wait(device)
        dist.barrier()
        if device.type != "cuda":
            started = time.perf_counter()
            work.run()
            return 1000 * (time.perf_counter() - started)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work.run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)


def timed(works: list[Work], device: torch.device, seconds: float) -> dict[str, list[list[float]]]:
    """Milliseconds of each rank, in rounds: in turns, for about `seconds`, after one that does not count; 3 to 8."""
    samples: dict[str, list[list[float]]] = {work.provider.name: [] for work in works}

    def one_round(first: int) -> float:
        """Milliseconds of the slowest ranks, summed."""
        whole = 0.0
        for work in works[first:] + works[:first]:
            if device.type == "cuda":
                time.sleep(_PAUSE)
            times: list[float] = [0.0] * dist.get_world_size()
            dist.all_gather_object(times, _sample(work, device))
            samples[work.provider.name].append(times)
            whole += max(times)
        return whole

    if not works:
        return samples
    one_round(0)
    rounds = min(8, max(3, int(1000 * seconds / one_round(0))))
    for i in range(1, rounds):
        one_round(i % len(works))
    return {name: times[1:] for name, times in samples.items()}


def passing_gbps(device: torch.device, megabytes: int) -> float | None:
    """GB/s of every rank's sending to the next one and receiving from the one before at once, one direction."""
    from fa4.distributed.group_rank import GroupRank, RingExchange

    if dist.get_world_size() == 1:
        return None

    x = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    work = Work(Provider("", lambda *_: x), lambda: RingExchange((x,), GroupRank.of(None)).wait(), {})
    times = [_sample(work, device) for _ in range(8)]
    return x.numel() / statistics.median(times[2:]) / 1e6


def checked(work: Work, case: BenchCase, tensors: tuple[Tensor, ...]) -> dict[str, dict[str, float]]:
    """Errors and what is allowed, by name.

    Raises:
        ArithmeticError: a result is wrong.
    """
    got = {n: x.detach() if work.provider.whole else cp.unshard(x) for n, x in work.results.items()}
    judgements = Judge(case, tensors).judgements(got)
    wrong = [str(j) for j in judgements if not j.right]
    if wrong:
        raise ArithmeticError("wrong result: " + "; ".join(wrong))
    return {j.name: {"error": j.error, "allowed": j.allowed} for j in judgements}


def _agreed(error: str, device: torch.device) -> str:
    """The error of some rank, if any rank has one: all go on together."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((e for e in errors if e), "")


def works_that_run(
    case: BenchCase, offered: list[Provider], tensors: tuple[Tensor, ...], device: torch.device, check: bool
) -> tuple[list[Work], dict[str, dict]]:
    """The works of providers that run and are right, and for every provider what its row says of that."""
    works, said = [], {}
    for provider in offered:
        error, of_check = "", {}
        try:
            work = work_of(provider, case, tensors)
            if check:
                of_check = checked(work, case, tensors)
        except Exception as problem:  # the row carries it
            error = what_failed(problem)
        error = _agreed(error, device)
        said[provider.name] = {"error": error} if error else {"checked": of_check} if of_check else {}
        if not error:
            works.append(work)
    return works, said


def right_ones(
    case: BenchCase, offered: list[Provider], device: torch.device, seed: int
) -> tuple[list[Provider], dict[str, dict]]:
    """The providers whose results are right at a short length, and what the rows say of it."""
    length = min(case.seqlen_q, _CHECKED_AT)
    short = dataclasses.replace(case, seqlen_q=length, seqlen_k=length)
    works, said = works_that_run(short, offered, made_tensors(short, device, seed), device, True)
    return [work.provider for work in works], said


def differences(works: list[Work], device: torch.device) -> dict[str, float]:
    """Of each provider from one GPU, over all ranks: the largest, over the largest value of that result."""
    alone = next((work for work in works if work.provider.whole), None)
    found = {}
    for work in works:
        if alone is not None and work is not alone:
            furthest = torch.zeros((), device=device)
            for name, x in alone.results.items():
                furthest = torch.maximum(furthest, (cp.shard(x) - work.results[name]).abs().max() / x.abs().max())
            dist.all_reduce(furthest, dist.ReduceOp.MAX)
            found[work.provider.name] = float(furthest)
    return found


def measured(
    case: BenchCase, offered: list[Provider], said: dict[str, dict], device: torch.device, seconds: float, seed: int
) -> list[dict]:
    """A row for each provider that is offered, and for those that `said` has an error of."""
    works, errors = works_that_run(case, offered, made_tensors(case, device, seed), device, False)
    said = said | {name: {**said.get(name, {}), **what} for name, what in errors.items()}
    apart = differences(works, device)
    of_ranks, world = timed(works, device, seconds), dist.get_world_size()
    wholes = {p.name for p in offered if p.whole}
    times = {
        name: Timing.of([(min if name in wholes else max)(ranks) for ranks in rounds])
        for name, rounds in of_ranks.items()
    }
    alone = next((times[name].median_ms for name in wholes if name in times), None)
    rows = []
    for name, what in said.items():
        row = {"provider": name, "label": case.label, **dataclasses.asdict(case), "seed": seed, **what}
        if name in times:
            ranks = 1 if name in wholes else world
            row |= {**dataclasses.asdict(times[name]), "ranks": ranks}
            row["median_ms_of_ranks"] = [statistics.median(rank) for rank in zip(*of_ranks[name])]
            row["tflops"] = case.flops / times[name].median_ms / 1e9 / ranks
            if alone is not None and name in apart:
                row |= {"efficiency": alone / (ranks * times[name].median_ms), "differs": apart[name]}
        rows.append(row)
    return rows


def overlap(case: BenchCase, provider: Provider, device: torch.device) -> list[str]:
    """What one run launched on this rank's GPU, in order, of 20 us and more."""
    work = work_of(provider, case, made_tensors(case, device, 0))
    _sample(work, device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _sample(work, device)
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    first = min((e.time_range.start for e in events), default=0)
    lines = [f"{provider.name}, {case.label}: start and end in us"]
    for e in sorted(events, key=lambda e: e.time_range.start):
        if e.time_range.elapsed_us() >= 20:
            lines.append(f"{e.time_range.start - first:9.0f} {e.time_range.end - first:9.0f}  {e.name[:90]}")
    return lines


def _table(rows: list[dict], title: str) -> Table:
    table = Table(title=title)
    for column in ("case", "provider", "ms", "quartiles", "TFLOP/s a GPU", "efficiency", "differs"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        cells = [row["label"], row["provider"]]
        if "median_ms" in row:
            cells += [f"{row['median_ms']:.3f}", f"{row['q25_ms']:.3f} to {row['q75_ms']:.3f}", f"{row['tflops']:.4g}"]
            cells += [f"{row['efficiency']:.3f}", f"{row['differs']:.1e}"] if "efficiency" in row else []
        table.add_row(*cells)
    return table


def _cases(seqlens: str, heads: str, head_dim: int) -> list[BenchCase]:
    cases = []
    for of_heads in heads.split(","):
        heads_q, heads_kv = (int(n) for n in of_heads.split("/"))
        for seqlen in (int(n) for n in seqlens.split(",")):
            for direction in ("fwd", "bwd"):
                shape = 1, seqlen, seqlen, heads_q, heads_kv, head_dim, head_dim
                cases.append(BenchCase(direction, *shape, causal=True))
    return cases


def _join_group() -> torch.device:
    """The device of this process, and its place among the others."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # or messages wait for waves of CTAs
    limit = datetime.timedelta(seconds=90)
    dist.init_process_group("nccl", device_id=device, pg_options=options, timeout=limit)
    return device


@click.command(help=__doc__)
@click.option("--seqlens", default="32768,65536,131072", show_default=True)
@click.option("--heads", default="16/16,32/8", show_default=True, help="Of queries and of keys, comma-separated.")
@click.option("--head-dim", default=128, show_default=True)
@click.option("--deterministic/--unordered", default=True, show_default=True, help="fa4's backward.")
@click.option("--only", default="", help="Comma-separated names of providers; one GPU is always there.")
@click.option("--seconds", default=1.0, show_default=True, help="Time spent on each case, of all providers together.")
@click.option("--torch-to", default=131072, show_default=True, help="The most tokens that torch's providers get.")
@click.option("--check/--no-check", default=True, show_default=True)
@click.option("--profile", is_flag=True, help="List what ran on the first GPU after the rows, by each provider.")
@click.option("--output", type=click.Path(path_type=Path), default=None)
def main(seqlens, heads, head_dim, deterministic, only, seconds, torch_to, check, profile, output) -> None:
    device = _join_group()
    world, first = dist.get_world_size(), dist.get_rank() == 0
    mesh = init_device_mesh(device.type, (world,))
    if hasattr(torch.nn.attention, "register_flash_attention_impl"):
        fa4.register_sdpa()
    offered = providers(mesh, deterministic)
    names = [p.name for p in offered if p.whole] + [n.strip() for n in only.split(",")]
    offered = [p for p in offered if not only or p.name in names]
    gbps = passing_gbps(device, 256 if device.type == "cuda" else 1)
    facts = {**machine.facts(device), "world": world, "passing_gbps": gbps, "nccl": _nccl()}
    now = datetime.datetime.now(datetime.UTC)
    common = {"suite": "context_parallel", "time": now.isoformat(timespec="seconds"), "machine": facts}
    output = output or RESULTS / f"{now:%Y-%m-%d}_{world}x-{machine.slug(facts['device'])}_context_parallel.jsonl"
    rows: list[dict] = []
    right: dict[tuple, tuple[list[Provider], dict]] = {}
    for case in _cases(seqlens, heads, head_dim):
        kind = case.direction, case.heads_q, case.heads_kv
        if kind not in right:
            right[kind] = right_ones(case, offered, device, 0) if check else (offered, {})
        offered_here, said = right[kind]
        if case.seqlen_q > torch_to:
            offered_here = [p for p in offered_here if not p.name.startswith("torch")]
            said = {name: what for name, what in said.items() if not name.startswith("torch")}
        these = measured(case, offered_here, said, device, seconds, 0)
        if first:
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.open("a") as file:
                for row in these:
                    file.write(json.dumps({**common, "deterministic": deterministic, **row}) + "\n")
        rows += these
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if first:
        title = f"{world} x {facts['device']}, {gbps or 0:.4g} GB/s to the next, deterministic {deterministic}"
        Console(width=150).print(_table(rows, title))
        for problem in dict.fromkeys(f"{row['provider']}: {row['error']}" for row in rows if "error" in row):
            print(problem)
    if profile and device.type == "cuda":
        for case in _cases(seqlens.split(",")[0], heads.split(",")[0], head_dim):
            for provider in offered:
                lines = overlap(case, provider, device)
                if first:
                    print("\n".join(lines))
    dist.destroy_process_group()


def _nccl() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
