"""Rows of arrays as calls on a chip, each judged; and many rows by processes of their own, none of which may hang."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import random
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch

from fa4.runtime import dispatch
from fa4.runtime.device import chip_by_number, chip_of
from tests.covering import caches, calls, eight_bits, sparse
from tests.covering.arrays import ARRAYS, IN_TORCH, PAIRS
from tests.covering.model import Row
from tests.forget import forget_calls
from tests.poisoned import fresh_memory_is_poison

OWN = {"sm_80": "sm80", "sm_90a": "sm90", "sm_100a": "sm100", "sm_120a": "sm120"}
CHIPS = tuple(OWN)
BUILD: dict[str, Callable[..., Any]] = {
    "calls": calls.build,
    "caches": caches.build,
    "eight bits": eight_bits.build,
    "training in eight bits": eight_bits.build_training,
    "four bits": eight_bits.build_four_bits,
    "sparse": sparse.build,
}


@dataclass
class Outcome:
    """What came of one call. status: "right", "wrong", "refused", "error", "hung" or "died"."""

    label: str
    seed: int
    status: str
    seconds: float = 0.0
    backend: str = ""
    text: str = ""
    row: Row = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.label} seed {self.seed}: {self.status} ({self.backend or 'no backend'}, {self.seconds:.1f} s)"


@dataclass(frozen=True)
class Where:
    """A chip: "torch" for the path in plain torch on the CPU, one of CHIPS to be emulated, or "cuda"."""

    chip: str

    @property
    def device(self) -> str:
        return "cuda" if self.chip == "cuda" else "cpu"

    @property
    def backend(self) -> str:
        """The chip's own; where there is no GPU, that of an H100 for "cuda"."""
        if self.chip == "cuda":
            here = chip_of(torch.device("cuda")) if torch.cuda.is_available() else chip_by_number(90)
            return next(row.name for row in dispatch.BACKENDS if row.on(here))
        return OWN[self.chip]

    @property
    def arrays(self) -> tuple[str, ...]:
        if self.chip == "torch":
            return IN_TORCH
        backends = {self.backend, "sm80"} if self.chip == "cuda" else {self.backend}
        own = (name for name, array in ARRAYS.items() if backends.intersection(array.backends))
        return (*PAIRS, *own)

    @contextlib.contextmanager
    def emulated(self, row: Row, seed: int) -> Iterator[None]:
        """A seeded emulated chip around a call; nothing where the chip is here. Kernels compiled meanwhile go through
        ptxas, too: emulation does not need that, but it may refuse a kernel."""
        if self.chip in ("torch", "cuda"):
            yield
            return
        from warpcheck.host import assembly
        from warpcheck.machine import SCHEDULES

        from fa4.emulator import emulate

        draw = random.Random(seed)
        # Keys are cut into parts where there are more multiprocessors than other work.
        sms = 8 if row["lengths"] in ("few_queries", "long") else draw.choice((2, 3, 4))
        assembled = mock.patch.object(assembly, "split", lambda pipeline: None)
        with assembled, emulate(self.chip, sms=sms, seed=seed, schedule=draw.choice(SCHEDULES)):
            yield


def labels(where: Where) -> list[str]:
    """training:0, training:1 and so on: every row for a chip."""
    return [f"{name}:{i}" for name in where.arrays for i in range(len(ARRAYS[name].rows()))]


def row_of(label: str) -> tuple[str, Row]:
    """The surface and the row of a label."""
    name, number = label.split(":")
    return ARRAYS[name].model.name, ARRAYS[name].rows()[int(number)]


@contextlib.contextmanager
def _chosen() -> Iterator[list[str]]:
    """Names of the backends that calls within get."""
    names: list[str] = []
    select = dispatch.select
    forget_calls()

    def noted(*arguments: Any, **named: Any) -> Any:
        row = select(*arguments, **named)
        if row.name not in names:
            names.append(row.name)
        return row

    with mock.patch.object(dispatch, "select", noted):
        yield names


def run(label: str, seed: int, where: Where, **build: Any) -> Outcome:
    """One row's call, judged."""
    return run_row(*row_of(label), Outcome(label, seed, ""), where, **build)


def run_row(surface: str, row: Row, outcome: Outcome, where: Where, **build: Any) -> Outcome:
    """Fill in what came of it."""
    outcome.row, begin, chosen = row, time.perf_counter(), list[str]()
    try:
        with fresh_memory_is_poison(), _chosen() as chosen:
            call = BUILD[surface](row, outcome.seed, where.device, **build)
            with where.emulated(row, outcome.seed):
                results = call.run("torch" if where.chip == "torch" and row.get("form") != "compat" else "auto")
            wrong = [str(one) for one in call.judged(results) if not one.right]
        outcome.status, outcome.text = ("wrong", "; ".join(wrong)) if wrong else ("right", "")
    except AssertionError as error:
        outcome.status, outcome.text = "wrong", str(error)
    except Exception as error:
        outcome.status = "error"
        outcome.text = f"{type(error).__name__}: {error}\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
    outcome.backend, outcome.seconds = "+".join(chosen), time.perf_counter() - begin
    return outcome


def run_task(chip: str, task: tuple[str, int]) -> list[Outcome]:
    """Of a label and a seed."""
    return [run(*task, Where(chip))]


def lost_task(task: tuple[str, int], status: str) -> Outcome:
    """What is known of a row whose process is gone."""
    return Outcome(*task, status, row=row_of(task[0])[1])


def is_lost(outcome: Outcome) -> bool:
    """Whether the process has lost its CUDA context."""
    return "CUDA error" in outcome.text or "illegal memory" in outcome.text


def _work(pipe: Connection, do: Callable[[Any], list[Outcome]]) -> None:
    """A process that does what it is told until it is told nothing."""
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        outcomes = do(task)
        pipe.send(outcomes)
        if any(outcome.status == "error" and is_lost(outcome) for outcome in outcomes):
            return  # another process goes on


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    task: Any = None
    begin: float = 0.0


def in_processes(
    do: Callable[[Any], list[Outcome]],
    lost: Callable[[Any, str], Outcome],
    tasks: Iterable[Any],
    jobs: int,
    limit: float,
    until: float = float("inf"),
) -> Iterator[Outcome]:
    """What do(task) gives for each task, `jobs` at a time; lost(task, status) where its process took longer than
    `limit` seconds ("hung"), or ended ("died"). From `until` (of time.monotonic) on no task begins, and those that run
    are given up after a while."""
    context, pending = mp.get_context("spawn"), iter(tasks)
    workers: list[_Worker] = []

    def start() -> _Worker:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, do), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here)

    def give(worker: _Worker) -> bool:
        task = next(pending, None) if time.monotonic() < until else None
        if task is None:
            worker.task = None
            return False
        worker.task, worker.begin = task, time.monotonic()
        worker.pipe.send(task)
        return True

    for _ in range(jobs):
        worker = start()
        if not give(worker):
            worker.process.kill()
            break
        workers.append(worker)
    while workers:
        wait([worker.pipe for worker in workers], timeout=1.0)
        for i, worker in reversed(list(enumerate(workers))):
            ended = ""
            try:
                if worker.pipe.poll():
                    yield from worker.pipe.recv()
                elif not worker.process.is_alive():
                    ended = "died"
                elif time.monotonic() - worker.begin > limit:
                    ended = "hung"
                elif time.monotonic() > until + limit / 4:
                    worker.process.kill()
                    del workers[i]
                    continue
                else:
                    continue
            except (EOFError, OSError):
                ended = "died"
            if ended:
                worker.process.kill()
                yield lost(worker.task, ended)
            if not ended:
                worker.process.join(0.05)  # it may have lost its context
            if ended or not worker.process.is_alive():
                worker.process.kill()
                workers[i] = worker = start()
            if not give(worker):
                worker.process.kill()
                del workers[i]
