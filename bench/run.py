"""python -m bench.run: check and time cases x providers in one process, and append rows to bench/results."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from fa4.cli.main import device_named
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.jit import compile_only

from . import machine
from .check import Judge, what_failed
from .providers import PROVIDERS, NotOffered, Provider
from .suites import SUITES, BenchCase, made_tensors
from .timing import Timing, captured, measure_in_turns, peak_extra_bytes

RESULTS = Path("bench/results")  # below the current directory, which is the root of a checkout
_NO_MEMORY = "does not fit the memory of the GPU"
console = Console(highlight=False)


def _work(
    case: BenchCase, provider: Provider, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Callable[[], object], dict[str, Tensor]]:
    """What is timed, and its results to be checked. A backward is timed alone, from a forward run once."""
    q, k, v, dout = tensors
    attend = provider.build(case)
    out = attend(q, k, v)
    if case.direction == "fwd":
        return lambda: attend(q, k, v), {"out": out}

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return backward, dict(zip(("dq", "dk", "dv"), backward()))


def checked_work(
    case: BenchCase,
    provider: Provider,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    judge: Judge | None,
    device: torch.device,
) -> tuple[dict, Callable[[], object] | None]:
    """What a row says beside the time, whether the result was right among it, and, if it was, what is to be timed.
    Errors become the row's "error"; what a provider does not have, or what does not fit the memory, its "skipped"."""
    row: dict = {}
    reason = provider.unavailable(device)
    if reason:
        return {"skipped": reason}, None
    try:
        work, got = _work(case, provider, tensors)
        if judge is not None:
            judgements = judge.judgements(got)
            row["checked"] = {j.name: {"error": j.error, "allowed": j.allowed} for j in judgements}
            if judge.queries < case.seqlen_q:
                row["checked_queries"] = judge.queries
            wrong = [str(j) for j in judgements if not j.right]
            if wrong:
                return {**row, "error": "wrong result: " + "; ".join(wrong)}, None
        del got
        row["peak_extra_bytes"] = peak_extra_bytes(work, device)
        return row, work
    except NotOffered as error:
        return {**row, "skipped": str(error)}, None
    except torch.OutOfMemoryError as error:
        return {**row, "skipped": f"{_NO_MEMORY}: {what_failed(error)}"}, None
    except Exception as error:  # one provider's failure must not end the run; the row carries it
        return {**row, "error": what_failed(error)}, None


def run_case(
    case: BenchCase,
    providers: list[Provider],
    device: torch.device,
    seed: int,
    check: bool,
    seconds: float,
    graph: bool = False,
) -> list[dict]:
    """A row for each provider: the case, whether the result was right, and, if it was, the time. Providers are given
    the same tensors, and take turns, so that what drifts meets them all. graph: what is timed are not calls, but
    replays of a CUDA graph of one."""
    facts = {"label": case.label, **dataclasses.asdict(case), "seed": seed, "graph": graph}
    try:
        tensors = made_tensors(case, device, seed)
    except Exception as error:
        return [{"provider": provider.name, **facts, "error": what_failed(error)} for provider in providers]
    judge = Judge(case, tensors) if check else None
    with torch.set_grad_enabled(case.direction == "bwd"):
        begun = {provider.name: checked_work(case, provider, tensors, judge, device) for provider in providers}
        del judge
        works = {name: work for name, (_, work) in begun.items() if work is not None}
        if graph:
            for name, work in list(works.items()):
                try:
                    works[name], _ = captured(work)
                except Exception as error:  # who cannot be captured is not timed
                    begun[name][0]["error"] = "cannot be captured: " + what_failed(error)
                    del works[name]
        try:
            measured: dict[str, dict] = {
                name: _measured(case, timing, device)
                for name, timing in measure_in_turns(works, device, seconds=seconds).items()
            }
        except Exception as error:  # whoever broke the device broke it for all
            measured = {name: {"error": what_failed(error)} for name in works}
    del works, tensors
    rows = [{"provider": name, **facts, **row, **measured.get(name, {})} for name, (row, _) in begun.items()]
    begun.clear()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # after an illegal access every call fails; the rows must not
            torch.cuda.empty_cache()
    return rows


def _measured(case: BenchCase, timing: Timing, device: torch.device) -> dict:
    return {
        **dataclasses.asdict(timing),
        "tflops": case.flops / timing.median_ms / 1e9,
        **({"gbps": case.nbytes / timing.median_ms / 1e6} if case.direction == "fwd" else {}),
        "clocks": machine.clocks() if device.type == "cuda" else {},
    }


def dry_run(cases: list[BenchCase], chip: int) -> int:
    """Compile every kernel that fa4 would launch for these cases on `chip`, run none; returns how many failed."""
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Values do not matter, and neither does the batch, which enters no kernel's code.
    small = list(dict.fromkeys(dataclasses.replace(case, batch=1) for case in cases))
    with Progress(*columns, console=console) as progress, emulating(chip_by_number(chip)), compile_only() as compiled:
        task = progress.add_task("dry run", total=len(small))
        for case in small:
            progress.update(task, description=case.label)
            try:
                with torch.set_grad_enabled(case.direction == "bwd"):
                    _work(case, PROVIDERS["fa4"], made_tensors(case, torch.device("cpu"), 0))
            except Exception as error:  # the next case may still compile; the count tells
                failed += 1
                progress.console.print(f"{case.label}: {type(error).__name__}: {error}")
            progress.advance(task)
    seconds = sum(compiled.seconds.values())
    console.print(
        f"{len(small)} cases, {failed} failed; {len(compiled.seconds)} kernels compiled for sm_{chip} in {seconds:.0f}s"
    )
    return failed


def _table(rows: list[dict], providers: list[str], gemm: float, copy: float, by_memory: set[str]) -> Table:
    """Cells: ms / TFLOP/s / % of the GEMM measured in the same run; of labels in `by_memory`, GB/s and % of a copy."""
    title = f"ms / TFLOP/s / % of GEMM ({gemm:.3g} TFLOP/s)"
    if by_memory:
        title += f"; of few queries ms / GB/s / % of copy ({copy:.4g} GB/s)"
    table = Table(title=title)
    table.add_column("case", no_wrap=True)
    for name in providers:
        table.add_column(name, justify="right", no_wrap=True)
    for label in dict.fromkeys(row["label"] for row in rows):
        cells = []
        for name in providers:
            row = next((r for r in rows if r["label"] == label and r["provider"] == name), None)
            if row is None:
                cells.append("-")
            elif "median_ms" in row and label in by_memory:
                cells.append(f"{row['median_ms']:.3f} / {row['gbps']:.4g} / {100 * row['gbps'] / copy:.0f}")
            elif "median_ms" in row:
                cells.append(f"{row['median_ms']:.3f} / {row['tflops']:.3g} / {100 * row['tflops'] / gemm:.0f}")
            else:
                cells.append("skipped" if "skipped" in row else "error")
        table.add_row(label, *cells)
    return table


def _predict(suite: str, cases: list[BenchCase], providers: list[str], output: Path | None, gpu: str) -> int:
    """Append what the emulator's clock says of providers on a GPU; the exit code."""
    from .predicted import GPUS, facts, predicted_row

    now = datetime.datetime.now(datetime.UTC)
    where, chip = facts(gpu), GPUS[gpu].chip
    name = machine.slug(gpu) if suite == "consumer" else chip  # chips of consumer Blackwell have several GPUs
    output = output or RESULTS / f"{now:%Y-%m-%d}_predicted_{name}_{suite}.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    columns = ("case", "provider", "ms, predicted", "TFLOP/s", "bound")
    table = Table(*columns, title=f"{where['device']}, {where['clock_ghz']} and {where['clock_ghz_backward']} GHz")
    rows = []
    for case, name in itertools.product(cases, providers):
        rows.append(predicted_row(case, chip, name, GPUS[gpu]))
        row = rows[-1]
        if "median_ms" in row:
            table.add_row(case.label, name, f"{row['median_ms']:.3f}", f"{row['tflops']:.4g}", row["bound"])
        else:
            table.add_row(case.label, name, "-", "-", row.get("skipped") or row["error"])
    with output.open("a") as file:
        for row in rows:
            common = {"suite": suite, "time": now.isoformat(timespec="seconds"), "machine": where}
            file.write(json.dumps({**common, **row}) + "\n")
    Console(width=140).print(table)
    console.print(f"{len(rows)} rows, predicted, not measured, appended to {output}")
    return int(any("error" in row for row in rows))


@contextlib.contextmanager
def _kept_on_interrupt() -> Iterator[None]:
    """Ctrl-C inside, or SIGTERM, by which time limits end jobs, ends the measuring, not the program: what was measured
    is still written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print("interrupted")
    finally:
        signal.signal(signal.SIGTERM, before)


# Suites of a chip, and its number for --dry-run.
CHIP_SUITES = {"sm100": 100, "hopper": 90, "consumer": 120}
PEERS = ("fa4", "fa4-deterministic", "fa2", "cudnn", "flash-attn-4")


@click.command()
@click.option("--suite", type=click.Choice(list(SUITES)), default="smoke", show_default=True)
@click.option(
    "--providers",
    help=f"Comma-separated: {', '.join(PROVIDERS)}. Default: fa4,sdpa; of the suites {', '.join(CHIP_SUITES)} fa4, "
    "fa4-deterministic and every peer that is installed.",
)
@click.option("--device", default=None, help="Default: cuda if there is one, else cpu.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--seconds", default=0.5, type=click.FloatRange(min=0), show_default=True, help="Time spent on each measurement."
)
@click.option("--check/--no-check", default=True, show_default=True, help="Check results before timing.")
@click.option("--filter", "pattern", default="", help="Only cases whose label matches this regular expression.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=None, help="Default: bench/results/<date>_<gpu>_<suite>.jsonl"
)
@click.option("--graph", is_flag=True, help="Time replays of CUDA graphs: what the GPU takes, launches left out.")
@click.option("--predict", is_flag=True, help="Predict rows of a GPU by the emulator's clock; time nothing.")
@click.option("--gpu", help="GPU of --predict [default: B200; of the suite consumer RTX 5090].")
@click.option("--dry-run", "chip", type=int, default=None, help="Only compile fa4's kernels for this chip, e.g. 100.")
def main(suite, providers, device, seed, seconds, check, pattern, output, graph, predict, gpu, chip) -> None:
    """Check and time a suite; rows go to a JSONL file, a table to the terminal."""
    if providers is None:
        providers = ",".join(PEERS if suite in CHIP_SUITES else ("fa4", "sdpa"))
    names, known = [name.strip() for name in providers.split(",")], list(PROVIDERS)
    if predict:
        from .predicted import GPUS, PREDICTED

        known = [*dict.fromkeys((*PROVIDERS, *PREDICTED))]
        gpu = gpu or ("RTX 5090" if suite == "consumer" else "B200")
        if gpu not in GPUS:
            raise click.BadParameter(f"{gpu!r}: expected one of {', '.join(GPUS)}", param_hint="--gpu")
    elif gpu:
        raise click.UsageError("--gpu is given without --predict")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: expected some of {', '.join(known)}", param_hint="--providers")
    try:
        cases = [case for case in SUITES[suite] if re.search(pattern, case.label)]
    except re.error as error:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {error}", param_hint="--filter") from None
    if not cases:
        raise click.BadParameter(f"{pattern!r} matches no case of suite {suite}", param_hint="--filter")
    if not predict and any(case.is_predicted_only for case in cases):
        raise click.UsageError(f"suite {suite} is predicted only, by --predict; `python -m bench.fp8` times forwards")
    if chip is not None:
        try:
            chip_by_number(chip)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--dry-run") from None
        raise SystemExit(1 if dry_run(cases, chip) else 0)
    if predict:
        raise SystemExit(_predict(suite, cases, [name for name in names if name in PREDICTED], output, gpu))
    where = device_named(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if suite in CHIP_SUITES and where.type == "cpu":
        raise click.UsageError(
            f"suite {suite} is timed on a GPU, and the device is {where}. Without a GPU, "
            f"`--dry-run {CHIP_SUITES[suite]}` compiles its kernels, and `--predict` predicts times."
        )
    for name in names:
        reason = PROVIDERS[name].unavailable(where)
        if reason:
            console.print(f"{name} is skipped: {reason}")
    facts = machine.facts(where)
    gemm, copy = [machine.gemm_tflops(where)], machine.copy_gbps(where)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=console) as progress, _kept_on_interrupt():
        task = progress.add_task(suite, total=len(cases))
        for case in cases:
            progress.update(task, description=case.label)
            rows += run_case(case, [PROVIDERS[name] for name in names], where, seed, check, seconds, graph)
            for row in rows[-len(names) :]:
                if "error" in row or row.get("skipped", "").startswith(_NO_MEMORY):
                    why = row.get("error") or row["skipped"]
                    progress.console.print(f"{row['provider']}: {case.label}: {why}")
            progress.advance(task)
    try:
        gemm.append(machine.gemm_tflops(where))
        after = f"{gemm[1]:.3g} after"
    except RuntimeError as error:  # what was measured before a kernel broke the device is kept
        after = f"none after ({str(error).splitlines()[0]})"
    now = datetime.datetime.now(datetime.UTC)
    if output is None:
        output = RESULTS / f"{now:%Y-%m-%d}_{machine.slug(facts['device'])}_{suite}{'-graphs' * graph}.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as file:
        for row in rows:
            common = {"suite": suite, "time": now.isoformat(timespec="seconds"), "machine": facts, "gemm_tflops": gemm}
            common["copy_gbps"] = copy
            file.write(json.dumps({**common, **row}) + "\n")
    Console(width=40 + 30 * len(names)).print(
        _table(rows, names, gemm[0], copy, {case.label for case in cases if case.reads_memory})
    )
    console.print(f"GEMM {gemm[0]:.3g} TFLOP/s before, {after}; {len(rows)} rows appended to {output}")
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
