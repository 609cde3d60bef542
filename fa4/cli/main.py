"""Command line, python -m fa4: env, explain, compile, cache, demo."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import string
import time
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .. import __version__
from ..runtime import dispatch
from ..runtime.device import Chip, chip_by_number, chip_of
from ..runtime.env import VARIABLES
from ..runtime.spec import AttentionInputs, AttentionSpec, Feature, Flags
from .options import DTYPES, POSITIVE, ChipNumber, problem_from_options, problem_options

console = Console(highlight=False, soft_wrap=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="fa4")
def main() -> None:
    """Attention kernels for NVIDIA Blackwell in CuTe DSL, with portable paths for every other device."""


if dispatch.is_installed("warpcheck.machine"):
    from ..emulator.cli import emulate_command

    main.add_command(emulate_command)
else:

    @main.command("emulate", context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def emulate_without_emulator(arguments: tuple[str, ...]) -> None:
        """Run our attention kernels on an emulated chip: needs the package warpcheck."""
        raise click.ClickException("the emulator is not installed: pip install warpcheck")


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def device_named(name: str | None) -> torch.device:
    """Return the device of a --device option; without one the accelerator, else the CPU.

    Raises:
        click.BadParameter: torch has no such device, or this machine has none.
    """
    if name is None:
        return _default_device()
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()  # a meta device has no values to train with
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise click.BadParameter(f"{name!r} is not a device of this machine: {reason}", param_hint="--device") from None
    return device


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict:
    """Return what determines the kernels that run here, as plain data."""
    chip = chip_of(_default_device())
    spec = AttentionSpec(torch.bfloat16, 128, 128, 16, 16, 128**-0.5, window_right=0, needs_backward=True)
    # Of a backend with several rows, the first one counts.
    backends = {row.name: row.refusals(spec, chip) for row in reversed(dispatch.BACKENDS)}
    distributions = ("torch", "numpy", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton", "flash-attn-4")
    return {
        "fa4": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in distributions},
        "cuda": torch.version.cuda,
        "chip": {**dataclasses.asdict(chip), "text": str(chip)},
        "emulator": dispatch.is_installed("warpcheck.machine._core"),
        "backends": {name: {"runs": not reasons, "reasons": reasons} for name, reasons in backends.items()},
        "variables": {v.name: {"value": os.environ.get(v.name), "default": v.default} for v in VARIABLES},
    }


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Versions, chip, and which backends can run here."""
    found = environment()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = Table(show_header=False, box=None)
    table.add_row("fa4", found["fa4"])
    table.add_row("python", f"{found['python']} on {found['platform']}")
    for name, version in found["versions"].items():
        table.add_row(name, version or "not installed")
    table.add_row("cuda", found["cuda"] or "not in this torch")
    table.add_row("chip", found["chip"]["text"])
    table.add_row("emulator", "installed" if found["emulator"] else "not installed (pip install warpcheck)")
    for name, state in found["backends"].items():
        table.add_row(f"backend {name}", "runs here" if state["runs"] else "; ".join(state["reasons"]))
    for variable in VARIABLES:
        table.add_row(variable.name, f"{os.environ.get(variable.name, variable.default)}  ({variable.meaning})")
    console.print(table)


@main.command()
@problem_options
@click.option(
    "--chip",
    type=ChipNumber(),
    default=None,
    help="Ask for another chip: sm_100a or 100 for B200, sm_90a for H100, sm_120a for RTX 50, sm_121a for GB10, 0 for "
    "no GPU.",
)
@click.option("--table", is_flag=True, help="Print the whole support table instead.")
def explain(chip: int | None, table: bool, backend: str, **shape) -> None:
    """Which backend and tiles a call would get, and why not the others."""
    if table:
        click.echo(support_table())
        return
    try:
        where = chip_of(_default_device()) if chip is None else chip_by_number(chip) if chip else Chip("cpu")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--chip") from None
    spec, extent = problem_from_options(shape)
    try:
        explanation = dispatch.explain(spec, extent, where, backend)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    click.echo(str(explanation))
    if explanation.chosen is None:
        raise SystemExit(1)


@main.command("compile")
@problem_options
@click.option("--chip", type=ChipNumber(), default="sm_100a", show_default=True, help="Or its number: 100, 90.")
@click.option(
    "--sms",
    default=None,
    type=POSITIVE,
    help="Multiprocessors, if the GPU has others than the chip's first: H100 PCIe 114, H20 78, RTX PRO 6000 188, RTX "
    "5070 48.",
)
@click.option(
    "--record", "--from", "record", type=click.Path(exists=True, dir_okay=False),
    help="Compile what FA4_RECORD wrote instead, for the chips it ran on.",
)  # fmt: skip
@click.option("--batch-to", default=None, type=POSITIVE, help="Of a range of batches that begins with --batch.")
@click.option("--seqlen-q-to", "--seqlen-to", default=None, type=POSITIVE, help="Of a range of lengths, likewise.")
@click.option("--seqlen-k-to", default=None, type=POSITIVE, help="Default: as many keys as queries, or --seqlen-k.")
@click.option("--jobs", default=None, type=POSITIVE, help="Processes; default: one for each CPU core.")
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Directory for FA4_CACHE_DIR.")
def compile_command(
    chip: int,
    sms: int | None,
    record: str | None,
    batch_to: int | None,
    seqlen_q_to: int | None,
    seqlen_k_to: int | None,
    jobs: int | None,
    out: str,
    backend: str,
    **shape,
) -> None:
    """Compile the kernels of a call, of a range of calls, or of all calls that a run recorded, ahead of time; no GPU is
    needed."""
    from ..api import ahead, call_ranges
    from ..runtime import jit, workers

    try:
        chip_by_number(chip)
        problems: list[ahead.AheadProblem | ahead.AppendProblem]
        is_range = not (batch_to is seqlen_q_to is seqlen_k_to is None)
        if record is not None and is_range:
            raise click.BadParameter(
                "--batch-to or --seqlen-to is given too, expected one of both", param_hint="--record"
            )
        if is_range:
            spec, (batch, rows, _) = problem_from_options(shape)
            keys = (shape["seqlen_k"] or rows, seqlen_k_to) if seqlen_k_to else shape["seqlen_k"]
            ranges = call_ranges.Ranges((batch, batch_to or batch), (rows, seqlen_q_to or rows), keys)
            problems = [*call_ranges.problems_of(spec, ranges, chip_by_number(chip, sms=sms), backend)]
        elif record is None:
            problems = [ahead.AheadProblem(chip, *problem_from_options(shape), backend, sms)]
        else:
            problems = [x if sms is None else x._replace(sms=sms) for x in ahead.recorded(Path(record))]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not problems:
        raise click.ClickException(f"{record} records no problem: nothing ran a kernel of fa4")
    requests: dict[tuple, jit.Request] = {}
    started = time.perf_counter()
    try:
        for problem in problems:
            requests |= ahead.requests_of(problem)
        if requests:
            call_ranges.compile_requests(requests.values(), ahead.prepare(Path(out)), jobs)
    except (ValueError, workers.WorkerFailed) as error:
        raise click.ClickException(str(error)) from None
    if not requests:
        raise click.ClickException("nothing is compiled for this: plain torch serves it")
    targets, seconds = ", ".join(sorted({target for target, _ in requests})), time.perf_counter() - started
    click.echo(f"{len(requests)} kernels for {targets} in {seconds:.1f} s, of {len(problems)} problems")
    click.echo(f"use them with FA4_CACHE_DIR={out}")


@main.command()
@click.option("--clean", is_flag=True, help="Remove what is beyond the limits of FA4_CACHE_DAYS and FA4_CACHE_GB.")
@click.option("--all", "everything", is_flag=True, help="Remove every kernel that no process holds at this moment.")
@click.option("--kernels", "listed", is_flag=True, help="List the kernels of this package's sources and compiler.")
def cache(clean: bool, everything: bool, listed: bool) -> None:
    """Compiled kernels on disk: where, how many, and their removal."""
    from ..runtime import disk, jit, manifest

    root = jit.cache_root()
    try:
        age, size = (-1.0, 0.0) if everything else disk.limits()
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if everything or (clean and not disk.is_kept(root)):
        removed = disk.prune(root, age, size)
        click.echo(f"removed {len(removed)} kernels, {sum(entry.size for entry in removed) / 1e6:.1f} MB")
    elif clean:
        click.echo("nothing is removed from a directory of `fa4 compile`; --all removes all")
    current = jit.current_folder(root)
    folders: dict[str, list[disk.Entry]] = {}
    for entry in disk.entries(root):
        folders.setdefault(entry.path.parent.name, []).append(entry)
    shown = Table(box=None)
    for column in ("sources and compiler", "kernels", "MB", "last used"):
        shown.add_column(column)
    for name, folder_entries in folders.items():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(entry.used for entry in folder_entries)))
        label = f"{name} (those of this package)" if name == current else name
        shown.add_row(label, str(len(folder_entries)), f"{sum(entry.size for entry in folder_entries) / 1e6:.1f}", when)
    click.echo(f"{root}: {sum(map(len, folders.values()))} kernels")
    if folders:
        console.print(shown)
    if listed and current:
        for kernel in sorted(manifest.kernels(root / current)):
            fields = ", ".join(f"{name} {x}" for name, x in kernel.fields.items() if x not in ("None", "False"))
            click.echo(f"{kernel.target}{' (emulated)' * kernel.emulated} {kernel.program}: {fields}")


def support_table() -> str:
    """Return the dispatch table as markdown; the README contains this text."""
    lines = ["| backend | runs on | dtypes | head_dim | lacks | what it is |", "|---|---|---|---|---|---|"]
    limits: dict[str, str] = {}  # letter of each text
    for row in dispatch.BACKENDS:
        dtypes = ", ".join(name for name, dtype in DTYPES.items() if dtype in row.dtypes)
        if row.multiplies_low:
            of_8_bits = "mxfp8" if Feature.BLOCK_SCALES in row.features else "e4m3"
            dtypes = f"{of_8_bits if Feature.OPERANDS_8BIT in row.features else 'nvfp4'}, out {dtypes}"
        own = [limit.text for limit in row.limits if limit.of & row.features]
        letters = [f"({limits.setdefault(text, string.ascii_lowercase[len(limits)])})" for text in own]
        lacks = (
            ", ".join([*(f.value for f in Feature if f in dispatch.ALL_FEATURES - row.features), *letters]) or "nothing"
        )
        lines.append(f"| `{row.name}` | {row.chips} | {dtypes} | {row.head_dims} | {lacks} | {row.summary} |")
    return "\n".join([*lines, "", *(f"* ({letter}) {text}" for text, letter in limits.items())])


@main.command()
@click.option("--steps", default=100, type=POSITIVE, show_default=True)
@click.option("--seed", default=0, type=click.IntRange(0, 2**63 - 1), show_default=True)
@click.option("--device", default=None, help="Default: the accelerator if there is one, else cpu.")
@click.option("--backend", default="auto", show_default=True)
@click.option("--emulated/--no-emulated", default=True, show_default=True, help="End on an emulated B200-class chip.")
def demo(steps: int, seed: int, device: str | None, backend: str, emulated: bool) -> None:
    """Train a small causal transformer on real English text, twice, and compare the weights; then run its attention by
    the Blackwell kernel, on an emulated chip."""
    where = device_named(device)
    # cuBLAS is deterministic only with a fixed workspace, chosen before its first call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    from . import demo as job

    model = job.ModelConfig(dtype=torch.float32 if where.type == "cpu" else torch.bfloat16)
    config = job.TrainConfig(steps=steps, seed=seed)
    try:
        explanation = job.explain_attention(model, config, where, backend)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--backend") from None
    console.print(f"{explanation}\n")
    if explanation.chosen is None:
        raise SystemExit(1)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    results = []
    with Progress(*columns, console=console) as progress:
        for run in ("first run ", "second run"):
            task = progress.add_task(run, total=steps, loss=float("nan"))

            def advance(step: int, loss: float, task=task) -> None:
                progress.update(task, completed=step + 1, loss=loss)

            results.append(job.train(model, config, where, backend=backend, on_step=advance))
    first, second = results
    before, after = first.held_out[0], first.held_out[steps]
    same = first.weights_digest == second.weights_digest
    console.print(
        f"\nheld-out loss   {before:.3f} before, {after:.3f} after {steps} steps (nats per byte)"
        f"\nspeed           {first.tokens_per_second:,.0f}, then {second.tokens_per_second:,.0f} tokens/s"
        f"\nbackend         {explanation.chosen} on {explanation.chip}"
        f"\ndeterministic   two runs with seed {seed} end with {'bitwise equal' if same else 'DIFFERENT'} weights"
        f" (sha256 {first.weights_digest[:16]}{'' if same else ' and ' + second.weights_digest[:16]})"
    )
    if not same:
        raise SystemExit(1)
    if emulated:
        console.print("\n".join(_attention_on_an_emulated_chip(first.model)))


_EMULATED_TOKENS = 128


def _attention_on_an_emulated_chip(model) -> list[str]:
    """Return the demo's last lines: the trained model's first attention, by the Blackwell kernel."""
    from ..api.dense import flash_attn_func
    from ..oracle import cases, reference
    from .demo import first_attention

    missing = [name for name in ("cutlass", "warpcheck.machine._core") if not dispatch.is_installed(name)]
    if missing:
        return [f"emulated        not here: {' and '.join(missing)} is not installed"]
    from ..emulator import emulate

    q, k, v = first_attention(model, _EMULATED_TOKENS)
    started = time.perf_counter()
    with torch.no_grad(), emulate("sm_100a") as gpu:
        out = flash_attn_func(q, k, v, causal=True, backend="sm100")
    seconds, report = time.perf_counter() - started, gpu.report()
    roles = [role for launch in gpu.launches for role in report.by_role(launch)]
    inputs = AttentionInputs(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
    spec = AttentionSpec.of(inputs, Flags(q.shape[3] ** -0.5, window_right=0))
    exact, low = (reference.forward(inputs, spec, precise=precise)[0] for precise in (True, False))
    verdict = cases.judge("error", out, exact, low)
    portable = float((flash_attn_func(q, k, v, causal=True) - exact).abs().max())
    if not verdict.right:
        raise SystemExit(f"the emulated kernel errs: {verdict}")
    return [
        f"emulated        the first layer's attention once more, {_EMULATED_TOKENS} tokens, by the Blackwell kernel: "
        f"{report.warp_instructions:,} instructions of a warp, no finding, {seconds:.1f} s",
        f"                roles {', '.join(dict.fromkeys(roles))}",
        f"                error {verdict.error:.2g} against float64, allowed {verdict.allowed:.2g}; "
        f"the path that trained errs {portable:.2g}",
    ]
