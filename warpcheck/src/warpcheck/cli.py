"""The command `warpcheck`: kernels on an emulated chip, from the shell."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, ClassVar

import click
import numpy as np

from warpcheck.emulated import Emulated, chip_of
from warpcheck.errors import EmulationError
from warpcheck.findings import KINDS
from warpcheck.machine import SCHEDULES, interleavings
from warpcheck.machine.arguments import written
from warpcheck.nvrtc import CompilationError, compile_cuda
from warpcheck.options import CHIP, COUNT, check_torch, emulation_options
from warpcheck.telling import WORDS, Telling, telling
from warpcheck.timing.command import clock_options, clocked, timed


class _Commands(click.Group):
    """With commands whose modules are imported when one is asked for: some need more than NumPy."""

    LATER: ClassVar = {
        "timing": "warpcheck.timing.command",
        "mutate": "warpcheck.tools.mutate",
        "verify": "warpcheck.tools.verify",
        "compare": "warpcheck.tools.compare",
        "catalogue": "warpcheck.tools.catalogue",
    }

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self.LATER]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.LATER:
            return importlib.import_module(self.LATER[cmd_name]).main
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="warpcheck")
def main() -> None:
    """A GPU in software: run kernels without a GPU, and find what a GPU would not show."""


@main.command("run", context_settings={"ignore_unknown_options": True})
@click.option("--chip", type=CHIP, default="sm_100a", show_default=True)
@click.option("--seeds", type=COUNT, default=3, show_default=True,
              help="In how many orders every launch is run, each with the next schedule.")  # fmt: skip
@click.option("--schedule", type=click.Choice(SCHEDULES), help="[default: one after the other]")
@click.option(
    "--timing", "predicts", is_flag=True, help="Run the script once more, and predict the time of each launch."
)
@clock_options
@emulation_options
@telling
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- SCRIPT.py [ARGUMENTS]...")
def run(
    chip: str, seeds: int, schedule: str | None, predicts: bool, gpu: str | None, sample: int, clock: float | None,
    watts: float | None, options: dict[str, Any], telling: Telling, script: tuple[str, ...],
) -> None:  # fmt: skip
    """Run a script that launches CuTe DSL kernels, unmodified, as `python SCRIPT.py ARGUMENTS` would (or `-m MODULE`).

    Every launch runs in several orders from the same memory; the script sees the results of the first. The exit code is
    the script's own, or 1 where it is 0 and something was found.
    """
    from warpcheck.scripts import run_script

    if script[0] == "-m":
        if len(script) < 2:
            raise click.BadParameter("-m needs the name of a module", param_hint="SCRIPT")
    elif not Path(script[0]).is_file():
        raise click.BadParameter(f"there is no file {script[0]!r}", param_hint="SCRIPT")
    check_torch()
    if not predicts and (gpu or clock or watts):
        raise click.UsageError("--gpu, --clock and --power are for predicted times: they need --timing")
    what = clocked(chip, gpu, None, sample, clock, watts) if predicts else None
    orders = interleavings(options["seed"], seeds, schedule)
    outcome = run_script(script, chip, orders, **options)
    found = telling.tell(outcome.findings, outcome.launches, chip, seeds)
    if not outcome.launches:
        click.echo("the script launched no kernel", err=True)
    elif what is not None:
        click.echo(f"\n{timed(script, what)[1]}")
    raise SystemExit(outcome.exit_code or found or int(not outcome.launches))


class _Extents(click.ParamType):
    """One to three numbers, such as 8 or 8,2,1."""

    name = "X[,Y[,Z]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return tuple(int(extent) for extent in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: expected one to three numbers, such as 8 or 8,2,1", param, ctx)


@main.command("ptx")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--entry", help="The kernel, or a part of its name [default: the only one].")
@click.option("--grid", type=_Extents(), default="1", show_default=True)
@click.option("--block", type=_Extents(), help="[default: the entry's .reqntid]")
@click.option("--cluster", type=_Extents(), help="[default: the entry's .reqnctapercluster, or 1]")
@click.option("--smem", "smem_bytes", type=click.IntRange(min=0), default=0, help="Bytes of dynamic shared memory.")
@click.option("--arg", "args", multiple=True,
              help="One per parameter, in order: f32[64x64] (random), i32[256]=zeros, x.npy, 7, f32=0.5.")  # fmt: skip
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), help="Write the arrays there after the run.")
@click.option("--chip", type=CHIP, help="[default: the target in the text; sm_90a for CUDA C++]")
@click.option("--seeds", type=COUNT, default=10, show_default=True, help="In how many orders the launch is run.")
@click.option("--schedule", type=click.Choice(SCHEDULES), help="[default: one after the other]")
@click.option("--data-seed", type=int, help="Seed of random arrays. [default: --seed]")
@click.option("-D", "defines", multiple=True, metavar="NAME[=VALUE]", help="CUDA C++: define a macro; may be repeated.")
@click.option("-I", "includes", multiple=True, metavar="DIR", type=click.Path(exists=True, file_okay=False),
              help="CUDA C++: a directory of headers; may be repeated.")  # fmt: skip
@click.option("--output", "outputs", multiple=True, type=click.IntRange(min=0), metavar="N",
              help="Position of an --arg, from 0, that the launch must write wholly; may be repeated.")  # fmt: skip
@click.option("--cooperative", is_flag=True, help="Launch it cooperatively: all CTAs are resident.")
@emulation_options
@telling
def ptx(
    source: Path, entry: str | None, args: tuple[str, ...], save: Path | None, chip: str | None, seeds: int,
    schedule: str | None, data_seed: int | None, defines: tuple[str, ...], includes: tuple[str, ...],
    outputs: tuple[int, ...], options: dict[str, Any], telling: Telling, **shape: Any,
) -> None:  # fmt: skip
    """Run one kernel of a PTX file, or of a CUDA C++ file (.cu, through NVRTC), in several orders.

    Needs neither torch nor CuTe DSL.
    """
    text = source.read_text()
    try:
        if source.suffix == ".cu":
            chip = chip or "sm_90a"
            words = [f"-D{define}" for define in defines] + [f"-I{folder}" for folder in includes]
            text = compile_cuda(text, chip, name=str(source), options=words)
        elif defines or includes:
            raise ValueError(f"-D and -I are for CUDA C++ (.cu), and {source} is PTX")
        chip = chip or chip_of(text)
        data_seed = options["seed"] if data_seed is None else data_seed
        rng = np.random.default_rng(data_seed)
        values = [written(arg, rng) for arg in args]
        if outputs and max(outputs) >= len(values):
            raise ValueError(f"--output is {max(outputs)}, and there are {len(values)} --arg")
        (seed, first), *others = interleavings(options.pop("seed"), seeds, schedule)
        emulated = Emulated(chip, seed=seed, schedule=first, on_finding="collect", **options)
        emulated.repeat(others)
        emulated.launch(text, entry, args=values, outputs=outputs, **shape)
    except (ValueError, TypeError, EmulationError, CompilationError) as error:
        raise click.ClickException(str(error)) from None
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
    for index, value in enumerate(values):
        if isinstance(value, np.ndarray):
            first = ", ".join(f"{x:g}" for x in value.flat[:4])
            click.echo(f"argument {index}, {args[index]}: {first}{', ...' if value.size > 4 else ''}")
            if save is not None:
                np.save(save / f"{index}.npy", value)
    raise SystemExit(telling.tell(emulated.findings, emulated.launches, chip, seeds, data_seed))


@main.command("kinds")
def kinds() -> None:
    """List the kinds of findings; docs/findings.md has a section for each."""
    for kind in KINDS.values():
        asked = f" (asked for by {kind.asked})" if kind.asked else ""
        click.echo(f"{kind.name:20} {kind.severity.value:10} {kind.what}, ISA {kind.isa}{asked}")
