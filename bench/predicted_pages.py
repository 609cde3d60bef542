"""Command of a page of predictions: it adds the rows of a GPU to a file, and prints the tables of a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from .compare import read_rows


def page_command(
    gpus: Iterable[str], rows_of: Callable[[str], Iterable[dict]], tables: Callable[[list[dict]], str]
) -> click.Command:
    """Return the command. rows_of: predicts the rows of a GPU. tables: of rows, as the page shows them."""

    @click.command()
    @click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
    @click.option("--gpu", type=click.Choice(sorted(gpus)), help="Predict its rows.")
    @click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File that the rows are appended to.")
    def main(file: Path | None, gpu: str | None, out: Path | None) -> None:
        """Print the tables of FILE, or append the rows of a GPU to a file. Nothing is measured."""
        if gpu and out:
            with out.open("a") as output:
                for row in rows_of(gpu):
                    output.write(json.dumps(row) + "\n")
                    click.echo(f"{row['gpu']}: {row['provider']} {row['label']}, predicted {row['tflops']:.1f} TFLOP/s")
        elif file:
            click.echo(tables(read_rows(file)), nl=False)
        else:
            raise click.UsageError("give a file, or --gpu and --out")

    return main
