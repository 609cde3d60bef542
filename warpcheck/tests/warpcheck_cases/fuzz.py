"""Random pipelines that are right by construction: is any of them called wrong, and is each planted omission found?

PYTHONPATH=warpcheck/tests python -m warpcheck_cases.fuzz --count 10000
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import click
import numpy as np
from warpcheck.errors import EmulationError
from warpcheck.machine import SCHEDULES, Allocation, Checks, EmulationOptions, Machine, Order, load_core
from warpcheck.options import COUNT
from warpcheck_cases.pipelines import WORDS, Pipeline, Program, Site, drawn, result, written

CHIP = "sm_100a"
CHECKS = Checks(leftovers=True)
_GRIDS = 2  # clusters, or CTAs


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the kind of what was found, "wrong" for other values than the right ones, "" for none."""

    kind: str
    message: str = ""


def run(pipeline: Pipeline, ptx: str, order: Order) -> Outcome:
    """The pipeline's PTX, or a mutant of it, in one order."""
    ctas = _GRIDS * pipeline.cluster
    x = _aligned(ctas * pipeline.tiles * WORDS)
    x[:] = np.arange(x.size) * 2654435761 + 1
    y = _aligned(x.size)
    tensor_map = load_core().encode_tensormap({
        "base": x.ctypes.data, "type": 2, "tf32": False, "swizzle": 0, "atomicity": 0, "interleave": 0,
        "nan_fill": False, "extent": [x.size], "stride": [0], "box": [WORDS], "element_stride": [1],
    })  # fmt: skip
    machine = Machine(CHIP, EmulationOptions(seed=order[0], schedule=order[1], checks=CHECKS))
    try:
        machine.launch(
            ptx, "pipeline", grid=(ctas, 1, 1), block=(pipeline.block, 1, 1), cluster=(pipeline.cluster, 1, 1),
            smem_bytes=pipeline.smem_bytes,
            params=[x.ctypes.data.to_bytes(8, "little"), y.ctypes.data.to_bytes(8, "little"), tensor_map],
            allocations=[Allocation(a.ctypes.data, a.nbytes, name) for a, name in ((x, "x"), (y, "y"))],
        )  # fmt: skip
    except EmulationError as error:
        return Outcome(error.finding.kind if error.finding else type(error).__name__, str(error))
    want = np.concatenate([
        result(pipeline, part) for part in x.reshape(_GRIDS, pipeline.cluster, pipeline.tiles, WORDS)
    ])  # fmt: skip
    right = np.array_equal(y, want.reshape(-1))
    return Outcome("") if right else Outcome("wrong", "other values than the right ones")


def _aligned(words: int) -> np.ndarray:
    whole = np.zeros(words + 32, np.uint32)
    return whole[-whole.ctypes.data % 128 // 4 :][:words]


@dataclass
class Tally:
    """Results of many pipelines. false_alarms and missed: seed, and what it was about."""

    pipelines: int = 0
    planted: int = 0
    found: Counter[str] = field(default_factory=Counter)
    redundant: int = 0
    false_alarms: list[tuple[int, str]] = field(default_factory=list)
    missed: list[tuple[int, int, str, Site]] = field(default_factory=list)
    unexplained: list[tuple[int, int, str, Site, Outcome]] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.found.most_common())
        return (
            f"{self.pipelines:,} pipelines, {len(self.false_alarms)} false alarms; {self.planted:,} planted omissions: "
            f"{sum(self.found.values()):,} found ({kinds}), {len(self.missed)} missed; {self.redundant:,} redundant by "
            f"construction, {len(self.unexplained)} of them told all the same"
        )


def orders(seed: int, count: int) -> list[Order]:
    return [(seed + k, SCHEDULES[(seed + k) % len(SCHEDULES)]) for k in range(count)]


def judge(seed: int, tally: Tally, *, omissions: int | None = 1, tries: int = 3) -> Program:
    """One pipeline, drawn by its seed, and some of its omissions (None: all of them), into the tally.

    An omission counts as found if one of `tries` orders shows it; a redundant one must pass in all of them.
    """
    rng = random.Random(seed)
    program = written(drawn(rng), CHIP)
    tally.pipelines += 1
    outcome = run(program.pipeline, program.ptx, orders(seed, 1)[0])
    if outcome.kind:
        tally.false_alarms.append((seed, f"{program.pipeline}\n{outcome.message}"))
        return program
    planted = [(index, how) for index, site in program.sites.items() for how in site.broken]
    for index, how in planted if omissions is None else rng.sample(planted, min(omissions, len(planted))):
        site, ptx = program.sites[index], program.without(index, how)
        told = next((o for order in orders(seed, tries) if (o := run(program.pipeline, ptx, order)).kind), Outcome(""))
        if site.redundant:
            tally.redundant += 1
            if told.kind:
                tally.unexplained.append((seed, index, how, site, told))
            continue
        tally.planted += 1
        if told.kind:
            tally.found[told.kind] += 1
        else:
            tally.missed.append((seed, index, how, site))
    return program


@click.command(help=__doc__)
@click.option("--seed", default=0, show_default=True)
@click.option("--count", type=COUNT, default=200, show_default=True, help="Pipelines.")
@click.option("--omissions", type=click.IntRange(min=0), default=1, show_default=True, help="Of each pipeline.")
@click.option("--all", "everything", is_flag=True, help="Every omission of each pipeline.")
@click.option("--tries", type=COUNT, default=3, show_default=True, help="Orders in which an omission is run.")
def main(seed: int, count: int, omissions: int, everything: bool, tries: int) -> None:
    tally = Tally()
    for drawn_by in range(seed, seed + count):
        judge(drawn_by, tally, omissions=None if everything else omissions, tries=tries)
    for number, text in tally.false_alarms:
        click.echo(f"false alarm, seed {number}: {text}\n")
    for number, index, how, site in tally.missed:
        click.echo(f"missed, seed {number}, line {index}: {site.what} {how}: {site.code}\n")
    for number, index, how, site, told in tally.unexplained:
        click.echo(f"told, seed {number}, line {index}: {site.what} {how}, though {site.redundant}: {told.message}\n")
    click.echo(str(tally))
    raise SystemExit(int(bool(tally.false_alarms or tally.missed or tally.unexplained)))


if __name__ == "__main__":
    main()
