"""warpcheck catalogue: kernels of NVIDIA's examples and of public packages, run by the repository's own tests."""

from __future__ import annotations

from typing import Any

import click

from warpcheck import repository


class _Elsewhere(click.Command):
    """The command of the repository, whose options and texts it has; in a wheel it says where that is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []

    def invoke(self, ctx: click.Context) -> Any:
        try:
            command = repository.module("tests.emulator.foreign").main
        except ImportError as error:
            raise click.UsageError(str(error)) from None
        return command.main(ctx.args, prog_name="warpcheck catalogue")


main = _Elsewhere(
    "catalogue", short_help="Run kernels of NVIDIA's examples and of public packages (in a checkout only)."
)
