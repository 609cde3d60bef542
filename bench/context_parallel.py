"""torchrun --nproc-per-node 4 -m bench.context_parallel: attention over sequences that are split over GPUs.

Beside it the whole sequence on one GPU, and torch's own context_parallel: on its flash attention, on cuDNN's, and on
fa4 beneath scaled_dot_product_attention. All take turns in one run, another one first in each round, after a pause: a
chip that has just worked hard has a lower clock. A time of several GPUs is that of the last one to be ready, a time of
one GPU that of the fastest; efficiency is the latter over the former times their number. Results
are checked at a short length before anything is timed, against float64 and by the oracle's rule, and where they are
timed compared with one GPU's: "differs" is the largest difference over the largest value. "sent_bytes" are those of
fa4's messages that leave the rank that sends most.

Kinds of cases: causal; full, without a mask; packed, causal sequences of 1/2, 1/4, 1/8 and 1/8 of the tokens; window,
causal with a limit to the left.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import statistics
import time
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

import fa4

from . import machine, overlap
from .check import what_failed
from .ranks import agreed_error, counted_bytes, gathered, join_group, nccl_version, of_first_rank, passing_gbps, sample
from .run import RESULTS
from .sharded import KINDS, Provider, ShardedCase, Work, cases, checked, providers, work_of
from .timing import Timing

_PAUSE = 0.1  # seconds before each sample
# A sample is several runs in a row, as the layers of a model: the host prepares one while the one before it runs.
_SAMPLE_MS, _MOST_RUNS = 100.0, 8
_CHECKED_AT = 4096  # tokens; the reference's score matrices fit there


def timed(works: list[Work], device: torch.device, seconds: float) -> tuple[dict[str, list[list[float]]], int]:
    """Milliseconds of each rank, in rounds: in turns, for about `seconds`, after one that does not count; 3 to 8. And
    the runs in a row of each sample."""
    samples: dict[str, list[list[float]]] = {work.provider.name: [] for work in works}

    def one_round(first: int, runs: int) -> float:
        """Milliseconds of the slowest ranks, summed."""
        whole = 0.0
        for work in works[first:] + works[:first]:
            if device.type == "cuda":
                time.sleep(_PAUSE)
            with work.within():
                times = gathered(sample(work.run, device, runs))
            samples[work.provider.name].append(times)
            whole += max(times) * runs
        return whole

    if not works:
        return samples, 1
    one_round(0, 1)
    slowest = max(max(times[-1]) for times in samples.values())
    runs = max(1, min(_MOST_RUNS, int(_SAMPLE_MS / slowest)))
    rounds = min(8, max(3, int(1000 * seconds / one_round(0, runs))))
    for i in range(1, rounds):
        one_round(i % len(works), runs)
    return {name: times[1:] for name, times in samples.items()}, runs


def works_that_run(
    case: ShardedCase, offered: list[Provider], device: torch.device, seed: int, check: bool
) -> tuple[list[Work], dict[str, dict]]:
    """The works of providers that run and are right, and for every provider what its row says of that."""
    works, said = [], {}
    tensors = case.tensors(device, seed)
    for provider in offered:
        error, of_check = "", {}
        try:
            work = work_of(provider, case, tensors)
            if check:
                of_check = checked(work, case, tensors)
        except Exception as problem:  # the row carries it
            error = what_failed(problem)
        error = agreed_error(error)
        said[provider.name] = {"error": error} if error else {"checked": of_check} if of_check else {}
        if not error:
            works.append(work)
    return works, said


def right_ones(
    case: ShardedCase, offered: list[Provider], device: torch.device, seed: int
) -> tuple[list[Provider], dict[str, dict]]:
    """The providers whose results are right at a short length, and what the rows say of it."""
    works, said = works_that_run(case.shortened(_CHECKED_AT), offered, device, seed, True)
    return [work.provider for work in works], said


def differences(case: ShardedCase, works: list[Work], device: torch.device) -> dict[str, float]:
    """Of each provider from one GPU, over all ranks: the largest, over the largest value of that result."""
    alone = next((work for work in works if work.provider.whole), None)
    found = {}
    for work in works:
        if alone is not None and work is not alone:
            furthest = torch.zeros((), device=device)
            for name, x in alone.results.items():
                furthest = torch.maximum(furthest, (case.shard(x) - work.results[name]).abs().max() / x.abs().max())
            dist.all_reduce(furthest, dist.ReduceOp.MAX)
            found[work.provider.name] = float(furthest)
    return found


def sent_bytes(work: Work) -> int:
    """Of fa4's messages in one run, those that leave a rank: of the rank that sends most."""
    with counted_bytes() as sent, work.within():
        work.run()
    return max(gathered(sum(sent)))


def measured(
    case: ShardedCase,
    offered: list[Provider],
    said: dict[str, dict],
    device: torch.device,
    seconds: float,
    seed: int,
    trace: bool = False,
) -> list[dict]:
    """A row for each provider that is offered, and for those that `said` has an error of."""
    works, errors = works_that_run(case, offered, device, seed, False)
    said = said | {name: {**said.get(name, {}), **what} for name, what in errors.items()}
    apart = differences(case, works, device)
    (of_ranks, runs), world = timed(works, device, seconds), dist.get_world_size()
    for work in works:
        name = work.provider.name
        if name.startswith("fa4") and not work.provider.whole:
            said[name] = said[name] | {"sent_bytes": sent_bytes(work)}
            if trace:
                with work.within():
                    said[name] = said[name] | {"overlap": overlap.traced(work.run)}
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
            row |= {**dataclasses.asdict(times[name]), "ranks": ranks, "runs_in_a_row": runs}
            row["median_ms_of_ranks"] = [statistics.median(rank) for rank in zip(*of_ranks[name])]
            row["tflops"] = case.flops / times[name].median_ms / 1e9 / ranks
            if alone is not None and name in apart:
                row |= {"efficiency": alone / (ranks * times[name].median_ms), "differs": apart[name]}
        rows.append(row)
    return rows


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


@click.command(help=__doc__)
@click.option("--seqlens", default="32768,65536,131072,262144", show_default=True)
@click.option("--heads", default="16/16,32/8", show_default=True, help="Of queries and of keys, comma-separated.")
@click.option("--head-dim", default=128, show_default=True)
@click.option("--kinds", default="causal", show_default=True, help=f"Comma-separated, of {', '.join(KINDS)}.")
@click.option("--window", default=4096, show_default=True, help="Keys to the left of a query, in cases of that kind.")
@click.option("--case", "named", multiple=True, metavar="KINDS:HEADS:SEQLENS", help="Such cases, instead of the above.")
@click.option("--deterministic/--unordered", default=True, show_default=True, help="fa4's backward.")
@click.option("--only", default="", help="Comma-separated names of providers; one GPU is always there.")
@click.option("--seconds", default=1.0, show_default=True, help="Time spent on each case, of all providers together.")
@click.option("--torch-to", default=131072, show_default=True, help="The most tokens that torch's providers get.")
@click.option("--check/--no-check", default=True, show_default=True)
@click.option("--traced", default=0, help="Trace fa4 in cases of so many tokens: how far messages lie under kernels.")
@click.option("--budget", default=0.0, help="Seconds after which no further case begins; 0 means no limit.")
@click.option("--output", type=click.Path(path_type=Path), default=None)
def main(
    seqlens,
    heads,
    head_dim,
    kinds,
    window,
    named,
    deterministic,
    only,
    seconds,
    torch_to,
    check,
    traced,
    budget,
    output,
) -> None:
    began = time.monotonic()
    groups = [tuple(group.split(":")) for group in named] or [(kinds, heads, seqlens)]
    try:
        chosen = [case for group in groups for case in cases(*group, head_dim, window)]
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"no cases: {error}") from None
    device = join_group()
    world, first = dist.get_world_size(), dist.get_rank() == 0
    mesh = init_device_mesh(device.type, (world,))
    if hasattr(torch.nn.attention, "register_flash_attention_impl"):
        fa4.register_sdpa()
    offered = providers(mesh, deterministic)
    names = [p.name for p in offered if p.whole] + [n.strip() for n in only.split(",")]
    offered = [p for p in offered if not only or p.name in names]
    gbps = passing_gbps(device, 256 if device.type == "cuda" else 1)
    facts = {**machine.facts(device), "world": world, "passing_gbps": gbps, "nccl": nccl_version()}
    facts["transformer_engine"] = importlib.util.find_spec("transformer_engine") is not None
    now = datetime.datetime.now(datetime.UTC)
    common = {"suite": "context_parallel", "time": now.isoformat(timespec="seconds"), "machine": facts}
    output = output or RESULTS / f"{now:%Y-%m-%d}_{world}x-{machine.slug(facts['device'])}_context_parallel.jsonl"
    rows: list[dict] = []
    right: dict[tuple, tuple[list[Provider], dict]] = {}
    for case in chosen:
        if budget and of_first_rank(time.monotonic() - began > budget):
            _say(first, f"{case.label} and what follows is left out: {budget:.0f} s are over")
            break
        kind = case.kind, case.direction, case.heads_q, case.heads_kv
        taking = [p for p in offered if p.takes(case)]
        if kind not in right:
            right[kind] = right_ones(case, taking, device, 0) if check else (taking, {})
        offered_here, said = right[kind]
        if case.seqlen_q > torch_to:
            offered_here = [p for p in offered_here if not p.name.startswith("torch")]
            said = {name: what for name, what in said.items() if not name.startswith("torch")}
        these = measured(
            case, offered_here, said, device, seconds, 0, device.type == "cuda" and case.seqlen_q == traced
        )
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
        print("\n".join(overlap.table(rows)))
        for problem in dict.fromkeys(f"{row['provider']}: {row['error']}" for row in rows if "error" in row):
            print(problem)
    dist.destroy_process_group()


def _say(first: bool, text: str) -> None:
    if first:
        print(text, flush=True)


if __name__ == "__main__":
    main()
