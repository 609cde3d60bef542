"""Mutation test of a kernel's synchronisation.

    warpcheck mutate SCRIPT.py [--chip sm_90a] [-- ARGUMENTS [-- ...]]   a kernel of a script
    warpcheck mutate FILE.npz [FILE.npz ...]                             launches that were recorded
    warpcheck mutate EXAMPLE --cutlass PATH [-- ARGUMENTS [-- ...]]      an example of NVIDIA/cutlass
    warpcheck mutate "PACKAGE CALL CHIP" ["PACKAGE ..."]                 calls of `warpcheck catalogue --packages`

Removes or weakens each synchronising instruction of one kernel, one at a time, and runs the mutant under every schedule
with seeds 0, 1, ... until it is killed by an error or by another result than the original's. Instructions that no run
of the original reaches are not counted. Prints a table by kind, and every survivor with its location.

The need for a synchronisation may show in one shape only (a stage that wraps, a tile of one key block). Several shapes
of one kernel are therefore tried on each mutant: arguments after a further --, or several files or calls.

For large kernels: --count limits the number of mutants, drawn by --seed, --limit the seconds of each mutant, and
--ledger keeps the verdicts, so that a second run of the same command continues the first.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import click
import numpy as np

from warpcheck import repository
from warpcheck.errors import DataRace, EmulationError
from warpcheck.host.buffers import aligned_buffer
from warpcheck.machine import SCHEDULES, Allocation, Checks, EmulationOptions, LaunchReport, Machine
from warpcheck.machine.ptx import parse
from warpcheck.options import CHIP, COUNT, PATTERN
from warpcheck.tools.mutations import Mutant, mutants
from warpcheck.tools.recording import Recorder, Recording
from warpcheck.tools.verdicts import Ledger, Verdict, summary

Order = tuple[int, str]  # seed and schedule
_PATIENCE = 20  # times the instructions of the original, after which a mutant counts as endless
_SPREAD = 16.0  # largest difference of a sum in another order, in multiples of the spread of the original
_SUMS = re.compile(r"\b(red|atom|cp\.reduce|multimem)\.")  # instructions whose results depend on the order


class Stage:
    """A recorded launch with its own memory, for repeated runs."""

    def __init__(self, recording: Recording, sms: int, checks: Checks) -> None:
        self.recording, self.sms, self.checks = recording, sms, checks
        self.buffers = [aligned_buffer(len(content)) for content in recording.before]
        addresses = [ctypes.addressof(buffer) for buffer in self.buffers]
        self.params = recording.moved_params(addresses)
        self.allocations = [
            Allocation(address, len(content), name)
            for address, content, name in zip(addresses, recording.before, recording.names)
        ]
        self.after_unknown = recording.programmatic and self._touches_only_after_waiting()

    def _touches_only_after_waiting(self) -> bool:
        """Return whether the kernel is clean after an unknown grid.

        A kernel that reads its caller's tensors before its griddepcontrol.wait depends on the actual grid before; its
        wait cannot be judged from one launch.
        """
        self.after_unknown = True
        try:
            self.run(self.recording.ptx, (0, SCHEDULES[0]))
        except DataRace:
            return False
        return True

    def run(
        self, ptx: str, order: Order, max_instructions: int | None = None, sms: int | None = None
    ) -> tuple[LaunchReport, list[bytes]]:
        """Run `ptx` instead of the recorded text; return the report and the contents of memory.

        max_instructions: as in `EmulationOptions`. sms: multiprocessors [default: those of the stage].
        """
        for buffer, content in zip(self.buffers, self.recording.before):
            buffer.raw = content
        launch, (seed, schedule) = self.recording, order
        options = EmulationOptions(sms or self.sms, seed, schedule, self.checks, max_instructions=max_instructions)
        report = Machine(launch.chip, options).launch(
            ptx, launch.entry, grid=launch.grid, block=launch.block, cluster=launch.cluster,
            smem_bytes=launch.smem_bytes, params=self.params, allocations=self.allocations,
            programmatic=launch.programmatic, cooperative=launch.cooperative, after_unknown=self.after_unknown,
        )  # fmt: skip
        return report, [buffer.raw for buffer in self.buffers]


@dataclass(frozen=True)
class Original:
    """Results of the unchanged kernel.

    memory: final contents of each range of memory. slack: largest allowed difference of a range whose float32 sums
    depend on the order of atomics; None for a range whose bytes must be equal.
    """

    memory: tuple[bytes, ...]
    slack: tuple[float | None, ...]
    reached: frozenset[int]
    instructions: int

    def agrees(self, memory: list[bytes]) -> bool:
        return all(
            mine == theirs if slack is None else _difference(mine, theirs) <= slack
            for mine, theirs, slack in zip(self.memory, memory, self.slack)
        )


def _difference(one: bytes, other: bytes) -> float:
    """Return the largest difference of two float32 arrays; infinite if a value is finite in one only."""
    if one == other:
        return 0.0
    a, b = (np.frombuffer(raw, np.float32).astype(np.float64) for raw in (one, other))
    with np.errstate(invalid="ignore"):
        difference = np.where(a.view(np.uint64) == b.view(np.uint64), 0.0, np.abs(a - b))
    return float(np.nan_to_num(difference, nan=np.inf).max())


def observe(stage: Stage, orders: Iterable[Order]) -> Original:
    """Run the original in every order.

    Raises:
        EmulationError: the original is not clean.
        ValueError: its results depend on the order by more than the rounding of sums.
    """
    # Several numbers of multiprocessors, so that sums whose order depends on the CTAs show their spread.
    sizes = cycle((stage.sms, stage.sms + 1, 2 * stage.sms, 3 * stage.sms))
    runs = [stage.run(stage.recording.ptx, order, sms=sms) for order, sms in zip(orders, sizes)]
    reports, memories = zip(*runs)
    slack: list[float | None] = []
    for index, versions in enumerate(zip(*memories)):
        if len(set(versions)) == 1:
            slack.append(None)
            continue
        name = f"{stage.recording.names[index]} ({len(versions[0])} bytes) of {stage.recording.entry}"
        if len(versions[0]) % 4:
            raise ValueError(f"{name} depends on the order, but is no array of float32")
        spread = max(_difference(versions[0], version) for version in versions)
        largest = float(np.nanmax(np.abs(np.frombuffer(versions[0], np.float32))))
        if not spread <= 1e-4 * largest:
            raise ValueError(f"{name} depends on the order by {spread:.3g} of {largest:.3g}: these are no float32 sums")
        slack.append(_SPREAD * max(spread, largest * 2.0**-24))
    reached = frozenset().union(*(report.lines for report in reports))
    return Original(memories[0], tuple(slack), reached, max(report.warp_instructions for report in reports))


@dataclass(frozen=True)
class Trial:
    """How mutants are run: on which launches of one PTX text, against what each left unchanged, in which orders.

    seconds: no further run of a mutant begins after so many; None: all orders are tried.
    """

    stages: tuple[Stage, ...]
    originals: tuple[Original, ...]
    orders: tuple[Order, ...]
    seconds: float | None = None

    @property
    def ptx(self) -> str:
        return self.stages[0].recording.ptx

    @property
    def reached(self) -> frozenset[int]:
        """Lines that any of the launches reaches."""
        return frozenset().union(*(original.reached for original in self.originals))

    def judge(self, mutant: Mutant) -> Verdict:
        launches = [pair for pair in zip(self.stages, self.originals) if mutant.line in pair[1].reached]
        runs, start = 0, time.monotonic()
        for order, (stage, original) in product(self.orders, launches):
            if self.seconds is not None and runs and time.monotonic() - start > self.seconds:
                break
            runs += 1
            try:
                _, memory = stage.run(mutant.ptx, order, _PATIENCE * original.instructions)
            except EmulationError as error:
                return Verdict(mutant, type(error).__name__, runs)
            if not original.agrees(memory):
                return Verdict(mutant, "wrong result", runs)
        return Verdict(mutant, "", runs)


def prepare(
    recordings: Recording | Sequence[Recording], *, sms: int = 4, seeds: int = 10, checks: Checks | None = None,
    seconds: float | None = None,
) -> Trial:  # fmt: skip
    """Observe the original in each of its launches, and get ready to judge its mutants.

    Raises:
        ValueError: the launches are not of one kernel; and as `observe` does.
    """
    launches = [recordings] if isinstance(recordings, Recording) else list(recordings)
    for launch in launches[1:]:
        if (launch.ptx, launch.entry) != (launches[0].ptx, launches[0].entry):
            raise ValueError(f"{launch.name}: this shape runs another kernel than the first one; mutate them apart")
    stages = tuple(Stage(launch, sms, checks or Checks()) for launch in launches)
    orders = tuple(product(range(seeds), SCHEDULES))
    observed = _observed(orders, launches[0].ptx)
    return Trial(stages, tuple(observe(stage, observed) for stage in stages), orders, seconds)


def _observed(orders: tuple[Order, ...], ptx: str) -> list[Order]:
    """In which orders the original is run: those of its mutants, and where it may add up in any order, again and again
    up to a number that shows the spread of the sums."""
    fewest = 24 if _SUMS.search(ptx) else 1
    return list(islice(cycle(orders), max(fewest, min(len(orders), 48))))


def reached_mutants(trial: Trial, only: str = "") -> list[Mutant]:
    """The mutants of instructions that the original reaches; `only` is searched in "line N, kind change"."""
    reached = trial.reached
    return [mutant for mutant in mutants(trial.ptx) if mutant.line in reached and re.search(only, str(mutant))]


_trial: Trial  # of this worker process


def _start_worker(
    recordings: list[Recording], sms: int, checks: Checks, originals: tuple[Original, ...], orders: tuple[Order, ...],
    seconds: float | None,
) -> None:  # fmt: skip
    global _trial
    _trial = Trial(tuple(Stage(recording, sms, checks) for recording in recordings), originals, orders, seconds)


def _judge_in_worker(mutant: Mutant) -> Verdict:
    return _trial.judge(mutant)


def drawn(mutants: Sequence[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """`count` of them in an order that the seed decides, of which a larger count takes more. None: all, as they are."""
    return list(mutants) if count is None else random.Random(seed).sample(list(mutants), len(mutants))[:count]


def judge_all(trial: Trial, chosen: list[Mutant], processes: int = 1) -> Iterator[Verdict]:
    """One verdict per mutant, in their order."""
    if processes == 1:
        yield from map(trial.judge, chosen)
        return
    recordings, first = [stage.recording for stage in trial.stages], trial.stages[0]
    with ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(recordings, first.sms, first.checks, trial.originals, trial.orders, trial.seconds),
    ) as pool:
        yield from pool.map(_judge_in_worker, chosen)


def _record_row(row: Any, sms: int, folder: Path) -> None:
    from warpcheck import emulate

    with emulate(row.chip, sms=sms, on_finding="collect", tells_devices_apart=True) as gpu:
        Recorder(gpu, folder, row.name)
        list(row.run(0))


def _record_example(name: str, arguments: tuple[str, ...], cutlass: Path, sms: int, folder: Path) -> None:
    from warpcheck import emulate
    from warpcheck.tools.examples import EXAMPLES

    example = next((example for example in EXAMPLES if example.name == name), None)
    if example is None:
        raise click.UsageError(f"{name} is neither a script, a file nor one of {', '.join(e.name for e in EXAMPLES)}")
    if arguments:
        example = dataclasses.replace(example, arguments=arguments)
    with emulate(example.chip, sms=sms) as gpu:
        Recorder(gpu, folder, name)
        example.run(cutlass)


def record_script(words: tuple[str, ...], chip: str, sms: int, folder: Path) -> None:
    """Record the launches of `python WORDS` into a folder. Raises ClickException if the script fails."""
    from warpcheck import emulate
    from warpcheck.scripts import run_as_from_the_shell

    with emulate(chip, sms=sms, on_finding="collect", tells_devices_apart=True) as gpu:
        Recorder(gpu, folder, Path(words[0]).stem)
        exit_code = run_as_from_the_shell(words)
    if exit_code:
        raise click.ClickException(f"{words[0]} ended with {exit_code}")


@dataclass(frozen=True)
class Judging:
    """How mutants of a kernel are judged, as options say it: see `judging`."""

    sms: int
    launch: int | None
    seeds: int
    only: str
    letter: bool
    leftovers: bool
    processes: int
    count: int | None
    seed: int
    limit: float | None
    ledger: Path | None

    def run(self, recorders: Sequence[Callable[[Path], None]]) -> None:
        """Record one launch by each of `recorders`, which write launches into a folder, and judge the mutants on
        them.
        """
        self.judge(recorded(recorders, self.launch))

    def judge(self, recordings: Sequence[Recording]) -> None:
        recording = recordings[0]
        checks = Checks(letter=self.letter, leftovers=self.leftovers)
        trial = prepare(recordings, sms=self.sms, seeds=self.seeds, checks=checks, seconds=self.limit)
        reached = reached_mutants(trial, self.only)
        chosen = drawn(reached, self.count, self.seed)
        shapes = [(launch.ptx, launch.entry, launch.grid, launch.name) for launch in recordings]
        ledger = Ledger(self.ledger, (shapes, self.sms, self.seeds, checks)) if self.ledger else None
        verdicts = [verdict for verdict in map(ledger.verdict_of, chosen) if verdict] if ledger else []
        judged = {str(verdict.mutant) for verdict in verdicts}
        left = [mutant for mutant in chosen if str(mutant) not in judged]
        with click.progressbar(length=len(chosen), label="mutants", file=sys.stderr, show_pos=True) as progress:
            progress.update(len(verdicts))
            for verdict in judge_all(trial, left, self.processes):
                verdicts.append(verdict)
                if ledger:
                    ledger.note(verdict)
                if not verdict.how:
                    click.echo(f"\nsurvived: {verdict.mutant}", err=True)
                progress.update(1)
        names = ", ".join(f"{launch.name} on a grid of {launch.grid}" for launch in recordings)
        click.echo(
            f"{recording.entry}: {names}; {self.sms} SMs, {self.seeds} seeds x {len(SCHEDULES)} schedules; "
            f"{len(chosen)} of {len(reached)} mutants\n"
        )
        click.echo(summary(recording, verdicts))


_JUDGING = (
    click.option("--sms", type=COUNT, default=4, show_default=True, help="Multiprocessors of the chip."),
    click.option("--launch", type=int, help="Which launch of the target [default: the one with the most mutants]."),
    click.option("--seeds", type=COUNT, default=10, show_default=True,
                 help="Tried on a mutant, each with every schedule."),
    click.option("--only", type=PATTERN, default="", help="Regular expression on 'line N, kind change'."),
    click.option("--letter", is_flag=True, help="Hold the kernel to the letter of the ISA, see Checks.letter."),
    click.option("--leftovers", is_flag=True, help="No CTA may end in the middle of a phase, see Checks.leftovers."),
    click.option("--processes", type=COUNT, default=1, show_default=True),
    click.option("--count", type=COUNT, help="Judge so many mutants, drawn at random [default: all]."),
    click.option("--seed", type=int, default=1, show_default=True, help="Which ones --count draws."),
    click.option("--limit", type=click.FloatRange(min=0),
                 help="Begin no further run of a mutant after so many seconds."),
    click.option("--ledger", type=click.Path(dir_okay=False, path_type=Path), help="File of verdicts, used again."),
)  # fmt: skip


def judging(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `Judging`; it gets them as `judging`."""
    names = [field.name for field in dataclasses.fields(Judging)]

    @functools.wraps(command)
    def with_judging(*args: Any, **kwargs: Any) -> Any:
        return command(*args, judging=Judging(**{name: kwargs.pop(name) for name in names}), **kwargs)

    for option in reversed(_JUDGING):
        with_judging = option(with_judging)
    return with_judging


@click.command("mutate", help=__doc__, short_help="Would a missing synchronisation of a kernel be noticed?")
@click.argument("target")
@click.argument("arguments", nargs=-1)
@click.option("--cutlass", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--chip", type=CHIP, default="sm_100a", show_default=True, help="For scripts.")
@judging
def main(target: str, arguments: tuple[str, ...], cutlass: Path | None, chip: str, judging: Judging) -> None:
    if target.endswith(".npz"):
        judging.judge([Recording.load(Path(path)) for path in (target, *arguments)])
        return
    recorders: list[Callable[[Path], None]]
    if target.endswith(".py"):
        lines = _split(arguments)
        recorders = [partial(record_script, (target, *line), chip, judging.sms) for line in lines]
    elif " " in target and cutlass is None and (rows := _calls_of_packages()) and target in rows:
        unknown = [key for key in arguments if key not in rows]
        if unknown:
            raise click.UsageError(f"{unknown[0]} is no call of `warpcheck catalogue --packages`")
        recorders = [partial(_record_row, rows[key], judging.sms) for key in (target, *arguments)]
    elif cutlass is None:
        raise click.UsageError(f"{target} is a foreign example: --cutlass says where it is")
    else:
        recorders = [partial(_record_example, target, line, cutlass, judging.sms) for line in _split(arguments)]
    judging.run(recorders)


def _calls_of_packages() -> dict[str, Any]:
    """By their keys, the calls of public packages that the repository has; none in an installed wheel."""
    if not repository.is_here():
        return {}
    return {row.key: row for row in repository.module("tests.emulator.public.run").all_rows()}


def _split(arguments: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The command lines between further `--`."""
    lines: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--":
            lines.append([])
        else:
            lines[-1].append(argument)
    return [tuple(line) for line in lines]


def recorded(recorders: Sequence[Callable[[Path], None]], launch: int | None) -> list[Recording]:
    """One launch of each: number `launch`, or the one that has the most mutants in the first."""
    chosen = []
    for record in recorders:
        with tempfile.TemporaryDirectory(prefix="warpcheck-mutate-") as scratch:
            record(Path(scratch))
            launches = [Recording.load(path) for path in sorted(Path(scratch).glob("*.npz"))]
        launch = _richest(launches) if launch is None else launch
        chosen.append(launches[launch])
    return chosen


def _richest(recordings: list[Recording]) -> int:
    return max(range(len(recordings)), key=lambda i: count_mutants(recordings[i]))


def count_mutants(recording: Recording) -> int:
    """Mutants of the recorded entry; its PTX may hold other kernels too."""
    lines = {instruction.line for instruction in parse(recording.ptx).kernels[recording.entry].instructions}
    return sum(mutant.line in lines for mutant in mutants(recording.ptx))


if __name__ == "__main__":
    main()
