"""python -m bench.ranks_page FILE ... --output PAGE: results of several GPUs as a page of docs/results.

FILE: rows of `bench.context_parallel`, one file for each number of GPUs, and of `bench.progress`.
"""

from __future__ import annotations

from pathlib import Path

import click

from . import overlap
from .compare import read_rows
from .summary import among_gpus, efficiencies, messages, training_lines

_OF_SHARDED = """
Cells are milliseconds, the median of the slowest rank. In brackets: efficiency, which is the time of the fastest GPU
alone for the whole sequence, divided by the time of all GPUs and by their number. Providers take turns, with a pause
before each. "packed": causal sequences of 1/2, 1/4, 1/8 and 1/8 of the tokens. "window N": causal, N keys to the left.
"""
_OF_SAMPLES = """
A sample is several runs in a row, as the layers of a model: as many as take the slowest provider 100 ms, at most 8.
"""
_OF_MESSAGES = """
Bytes of fa4's messages that leave one rank, and the time that the link takes for them at the rate above.
"""
_OF_TRACES = """
Milliseconds of a traced run that follows another, of the rank with the most exposed messages. A message is a kernel of
NCCL; its time includes the wait for a rank that is late. "under attention": while an attention kernel runs. "exposed":
while nothing else runs.
"""
_OF_TRAINING = """
Steps of a small transformer. NCCL's kernels sum the gradients of one layer during the backward of the next one. A step
time is the median of rounds in which providers take turns; messages are ms of one traced step. "repeats bitwise": the
parameters of two trainings from the same start are equal after five steps.
"""


def page(title: str, files: dict[str, list[dict]]) -> str:
    """The text. files: rows by the name of their file."""
    parts = [f"# {title}", "How to call it, and what the methods are: [Distributed](../distributed.md)."]
    for name, rows in files.items():
        of_machine = rows[0]["machine"]
        world, software = of_machine["world"], f"torch {of_machine['versions']['torch']}, NCCL {of_machine['nccl']}"
        where = f"{world} x {of_machine['device']}, {software}, {rows[0]['time'][:10]}"
        rows_at = f"Rows: `bench/results/{name}`."
        if rows[0]["suite"] == "progress":
            shape = (
                f"{rows[0]['layers']} layers, {rows[0]['heads_q']}/{rows[0]['heads_kv']} heads of {rows[0]['head_dim']}"
            )
            parts += [f"## Training on {world} GPUs", f"{where}; {shape}, {rows[0]['seqlen']} tokens a rank. {rows_at}"]
            parts += [_OF_TRAINING.strip(), "\n".join(training_lines(rows))]
            continue
        link = f"{of_machine['passing_gbps']:.0f} GB/s from each rank to the next, each way at once"
        engine = "" if of_machine.get("transformer_engine") else " TransformerEngine is not installed there."
        parts += [f"## Sequences split over {world} GPUs", f"{where}; {link}.{engine} {rows_at}"]
        for text, lines in (
            (_OF_SHARDED, among_gpus(rows)),
            ("", [_OF_SAMPLES.strip()] if any("runs_in_a_row" in row for row in rows) else []),
            ("", efficiencies(rows)),
            (_OF_MESSAGES, messages(rows)),
            (_OF_TRACES, overlap.table(rows)),
        ):
            parts += [part for part in (text.strip(), "\n".join(lines)) if part] if lines else []
        problems = dict.fromkeys(
            f"* {row['provider']}, {row['label']}: {row['error']}" for row in rows if "error" in row
        )
        parts += ["Not measured:\n\n" + "\n".join(problems)] if problems else []
    return "\n\n".join(parts) + "\n"


@click.command(help=__doc__)
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--title", default="Several H100 GPUs", show_default=True)
@click.option("--output", required=True, type=click.Path(path_type=Path))
def main(results: tuple[Path, ...], title: str, output: Path) -> None:
    output.write_text(page(title, {file.name: read_rows(file) for file in results}))


if __name__ == "__main__":
    main()
