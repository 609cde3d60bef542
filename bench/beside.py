"""python -m bench.beside: attention beside a kernel that holds some SMs, as communication kernels do.

All providers in one run, checked, in balanced turns, first on the whole chip, then beside a kernel that holds 8, 16 and
24 SMs until they have ended. `share` is the speed that is left, over the share of the SMs that is left: 1 loses its
share and no more. "fa4, shared" is fa4 inside `fa4.runtime.device.sharing`, as `fa4.distributed` calls it. Rows go to
--out, and --page writes their page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch

from fa4.runtime.device import sharing

from . import machine
from .check import Judge
from .providers import PROVIDERS
from .row_pages import rows_by_file, wrapped
from .run import checked_work
from .suites import BenchCase, made_tensors, square
from .timing import Timing, cuda_samples, orders

PAGE = Path("docs/results/beside-communication.md")
HELD = 0, 8, 16, 24
SHARED = "fa4, shared"
CASES = [
    square(direction, 8192, head_dim, causal)
    for direction in ("fwd", "bwd")
    for head_dim in (64, 128)
    for causal in (False, True)
]
INTRODUCTION = """
# Attention beside a communication kernel

```
python -m bench.beside --out FILE    # on a GPU
python -m bench.beside --page
```

A kernel holds 8, 16 or 24 SMs, as NCCL's kernels do, until the attention has ended. Milliseconds on the whole chip,
then the share: the speed that is left, over the share of the SMs that is left. 1.00 loses its share and no more. More
than 1 is possible where power or memory is the limit of the whole chip. 2 x 8192 tokens, hidden size 2048, bfloat16.
"fa4, shared" is what `fa4.distributed` calls while messages are under way.

The rows of "fa4" are of forwards in which a tile belongs to a CTA by its index, at the commit of the rows: a CTA that
starts late ends late. Kernels take tiles by an atomic counter, except for few queries and caches ([Hopper
forward](../hopper-forward.md)). The last cases compare schedules, and CTA pairs with single CTAs of 2 or 3 warpgroups
and 64 or 128 keys, in runs of their own, at commits that their rows name.
"""


def measure_case(
    case: BenchCase, names: list[str], held: tuple[int, ...], repeats: int, seed: int
) -> Iterator[dict]:  # fmt: skip
    """Yield rows of a case, by provider and number of held SMs."""
    from .held import Holder

    device, holder, own = torch.device("cuda"), Holder(), torch.cuda.Stream()
    tensors = made_tensors(case, device, seed)
    judge = Judge(case, tensors)
    torch.cuda.synchronize()
    with torch.set_grad_enabled(case.direction == "bwd"), torch.cuda.stream(own):
        works = {}
        for name in names:
            with sharing() if name == SHARED else contextlib.nullcontext():
                facts, work = checked_work(case, PROVIDERS[name.partition(",")[0]], tensors, judge, device)
            if work is None:
                yield dict(provider=name, **facts)
            else:
                works[name] = (facts, _within_sharing(work) if name == SHARED else work)
        times: dict[tuple[str, int], list[float]] = {(name, sms): [] for name in works for sms in held}
        for order in orders(len(works)):
            for sms, place in itertools.product(held, order):
                name = [*works][place]
                cuda_samples(works[name][1], 2)
                with holder.holding(sms):
                    times[name, sms] += cuda_samples(works[name][1], 1 + repeats)[1:]
    for (name, sms), samples in times.items():
        yield dict(provider=name, held=sms, **works[name][0], **dataclasses.asdict(Timing.of(samples)))


def _within_sharing(work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with sharing():
            return work()

    return run


@click.command(help=__doc__)
@click.option("--providers", default=f"fa4;{SHARED};fa4-deterministic;cudnn;flash-attn-4", show_default=True)
@click.option("--repeats", default=8, show_default=True, type=click.IntRange(2), help="Of each turn.")
@click.option("--out", default=None, type=click.Path(path_type=Path), help="File that rows are added to, JSON lines.")
@click.option("--page", is_flag=True, help="Write the page of all committed rows; measure nothing.")
def main(providers: str, repeats: int, out: Path | None, page: bool) -> None:
    if page:
        PAGE.write_text(text())
        return
    if not torch.cuda.is_available():
        raise click.UsageError("needs a GPU")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    facts = dict(
        suite="beside", machine=machine.facts(torch.device("cuda")), commit=machine.commit(), sms=sms,
        date=f"{datetime.date.today()}",
    )  # fmt: skip
    for case in CASES:
        names = [name for name in providers.split(";") if case.direction == "bwd" or name != "fa4-deterministic"]
        rows = [dict(label=case.label, **row, **facts) for row in measure_case(case, names, HELD, repeats, seed=0)]
        for line in table(rows):
            click.echo(line)
        if out is not None:
            with out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


def share(whole: dict, beside: dict) -> float:
    """Speed that is left, over the share of the SMs that is left."""
    return whole["median_ms"] / beside["median_ms"] * whole["sms"] / (whole["sms"] - beside["held"])


def table(rows: list[dict]) -> Iterator[str]:
    """Yield the lines of a table of rows."""
    times = {(row["label"], row["provider"], row["held"]): row for row in rows if "median_ms" in row}
    held = sorted({sms for *_, sms in times if sms})
    yield "| case | provider | ms | " + " | ".join(f"{sms} SMs held" for sms in held) + " |"
    yield "|---|---|--:|" + "--:|" * len(held)
    for label, provider in dict.fromkeys(key[:2] for key in times):
        whole = times[label, provider, 0]
        found = (times.get((label, provider, sms)) for sms in held)
        cells = ("" if row is None else f"{share(whole, row):.2f}" for row in found)
        yield f"| {label} | {provider} | {whole['median_ms']:.2f} | " + " | ".join(cells) + " |"


def text() -> str:
    """Return the page."""
    parts = [INTRODUCTION.strip()]
    for name, rows in rows_by_file("*_beside.jsonl").items():
        row, first = rows[0], next(row for row in rows if "median_ms" in row)
        said = f"Rows: `bench/results/{name}`, {row['date']}, commit {row['commit']}, {first['repeats']} runs each."
        parts += [f"## {row['machine']['device']}", wrapped(said), "\n".join(table(rows))]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
