"""Kinds of command-line options that the emulator's commands share; each refuses what it cannot use."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from fa4.emulator.machine.chips import CHIPS

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
    """A file that can be written when there is something to write, which may be minutes later."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if not Path(os.fsdecode(path)).absolute().parent.is_dir():
            self.fail(f"{value!r} is in no directory that exists", param, ctx)
        return path


PATTERN = _Pattern()
NEW_FILE = _NewFile(dir_okay=False, writable=True)
