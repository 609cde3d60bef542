"""Command-line options and parameter types that the commands share."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from warpcheck.findings import FINAL, KINDS
from warpcheck.machine import ORDERS, Checks
from warpcheck.machine.chips import CHIPS

CHIP = click.Choice(list(CHIPS))
COUNT = click.IntRange(min=1)
LENGTH = click.IntRange(min=0)
SIDE_OF_WINDOW = click.IntRange(min=-1)  # -1 is open


class _Pattern(click.ParamType):
    """A regular expression."""

    name = "regex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            re.compile(value)
        except re.error as error:
            self.fail(f"{value!r} is no regular expression: {error}", param, ctx)
        return value


class _NewFile(click.Path):
    """A file that the command writes at its end, perhaps minutes later."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if not Path(os.fsdecode(path)).absolute().parent.is_dir():
            self.fail(f"{value!r} is in no directory that exists", param, ctx)
        return path


def check_torch() -> None:
    """Refuse a command that runs Python scripts if torch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise click.UsageError("scripts need torch, which is missing; `warpcheck ptx` runs PTX and CUDA C++ without it")


PATTERN = _Pattern()
NEW_FILE = _NewFile(dir_okay=False, writable=True)


_EMULATION = ("sms", "seed", "resident", "max_instructions", "max_seconds", "progress")


def emulation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of an emulation to a command, which receives them as a dict `options`.

    Its keys are fields of `warpcheck.EmulationOptions`: sms, seed, resident, checks, max_instructions, max_seconds,
    progress.
    """

    @click.option("--sms", type=COUNT, default=4, show_default=True, help="Multiprocessors of the chip.")
    @click.option("--seed", default=0, show_default=True)
    @click.option(
        "--resident", type=click.IntRange(min=0), metavar="N",
        help="Clusters (CTAs, where there are none) that run at a time, lowest index first; 0: as many as fit. "
        "[default: 1 with an odd seed, else as many as fit]",
    )  # fmt: skip
    @click.option("--max-instructions", type=LENGTH, metavar="N",
                  help="Warp-instructions after which a launch counts as a livelock; 0: no limit. "
                  "[default: 10^10; in later orders 100 times the first one's]")  # fmt: skip
    @click.option("--max-seconds", type=click.FloatRange(min=0), metavar="S",
                  help="Seconds after which a launch counts as a livelock; 0: no limit. "
                  "[default: 4 hours; in later orders 100 times the first one's]")  # fmt: skip
    @click.option("--progress", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="S",
                  help="Seconds after which a running launch prints a line to stderr; 0: never.")  # fmt: skip
    @click.option("--races/--no-races", default=True, show_default=True, help="Check for data races.")
    @click.option("--letter", is_flag=True, help="Hold tensor memory and setmaxnreg to the letter of the ISA.")
    @click.option("--order", type=click.Choice(ORDERS), default="practice", show_default=True,
                  help="In which order the products that one thread issues execute.")  # fmt: skip
    @click.option("--leftovers", is_flag=True, help="No CTA may end in the middle of an mbarrier's phase.")
    @click.option("--off", multiple=True, type=click.Choice([kind for kind in KINDS if kind not in FINAL]),
                  metavar="KIND", help="A kind of finding to disable; may be repeated.")  # fmt: skip
    @functools.wraps(command)
    def with_options(*args: Any, races: bool, letter: bool, order: str, leftovers: bool, off: tuple[str, ...],
                     **kwargs: Any) -> Any:  # fmt: skip
        checks = Checks(races=races, letter=letter, leftovers=leftovers, order=order, off=frozenset(off))
        options = {name: kwargs.pop(name) for name in _EMULATION} | {"checks": checks}
        return command(*args, options=options, **kwargs)

    return with_options
