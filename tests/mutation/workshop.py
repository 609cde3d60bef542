"""A copy of the tree to spoil: one mistake is planted, the tests that answer for it run, and it is taken out again.

The tests run in a fork of this process, which has imported torch, pytest and CuTe DSL but nothing of the package: a
kernel's test would otherwise spend longer on imports than on the kernel. Kernels that a mutant compiles go to a cache
of its own, which starts as the unspoilt tree left it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import resource
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.mutation.plant import Mutant
from tests.mutation.reach import Reach, Tracer, digest

_WARM = ("torch", "cutlass.cute")  # what takes seconds to import and is not mutated
_LEFT_BEHIND = (".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache")
# A mutant that loops takes this many times the processor time of the unspoilt tree; a deadlock, so much longer.
_PATIENCE, _SPARE_SECONDS, _SLEEPERS = 2, 20, 8


class Red(Exception):
    """The tests fail as it is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests said. `how`: "" where all of them passed, else the test that failed, or how the run ended."""

    how: str
    cpu_seconds: float
    seconds: float

    def then(self, other: Outcome) -> Outcome:
        return Outcome(other.how, self.cpu_seconds + other.cpu_seconds, self.seconds + other.seconds)


class Workshop:
    """Holds the copy in `scratch`. `seed` is what tests that draw a fresh seed get."""

    def __init__(self, root: Path, scratch: Path, seed: int) -> None:
        self.root, self.tree, self.scratch, self.seed = root, scratch / "tree", scratch, seed
        self.log, self.dsl_cache = scratch / "log", scratch / "dsl"
        self.kernels = root / "build" / "mutation" / "kernels"  # of the unspoilt tree, kept from run to run
        shutil.copytree(root, self.tree, ignore=shutil.ignore_patterns(*_LEFT_BEHIND))
        for name in _WARM:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    def source(self, path: str) -> bytes:
        return (self.tree / path).read_bytes()

    def unspoilt(self, tests: Sequence[str]) -> Outcome:
        """Run tests on the tree as it is.

        Raises:
            Red: one of them fails, so that no mutant could be judged.
        """
        return self._green(self._run(tests, self.kernels, None))

    def reach(self, test: str) -> Reach:
        """Run one test alone, and see which lines it runs.

        Raises:
            Red: it fails.
        """
        cold, traced = self.scratch / "cold cache", self.scratch / "lines"
        outcome = self._green(self._run(shlex.split(test), cold, None, traced))
        if cold.exists():
            shutil.copytree(cold, self.kernels, dirs_exist_ok=True)
            shutil.rmtree(cold)
        lines = json.loads(traced.read_text())
        return Reach(outcome.cpu_seconds, outcome.seconds, lines, {path: digest(self.tree / path) for path in lines})

    def _green(self, outcome: Outcome) -> Outcome:
        if outcome.how:
            raise Red(f"{outcome.how} fails without any mutant:\n" + self.log.read_text()[-4000:])
        return outcome

    def judge(self, mutant: Mutant, tests: Sequence[str], usual: Outcome) -> Outcome:
        """Run tests on the tree with a mutant in it, up to the first failure; `usual` is the tree's without it."""
        place, private = self.tree / mutant.path, self.scratch / "cache of a mutant"
        source = place.read_bytes()
        if self.kernels.exists():
            shutil.copytree(self.kernels, private)
        place.write_bytes(mutant.applied(source))
        try:
            return self._run(tests, private, usual)
        finally:
            place.write_bytes(source)
            shutil.rmtree(private, ignore_errors=True)

    def _run(self, tests: Sequence[str], cache: Path, usual: Outcome | None, traced: Path | None = None) -> Outcome:
        notes = self.scratch / "failure"
        notes.unlink(missing_ok=True)
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            self._be_the_tests(tests, cache, notes, usual, traced)
        deadline = None if usual is None else started + _SLEEPERS * usual.seconds + _SPARE_SECONDS
        status, usage = _wait(child, deadline)
        cpu = usage.ru_utime + usage.ru_stime
        return Outcome(_how(status, notes), cpu, time.monotonic() - started)

    def _be_the_tests(
        self, tests: Sequence[str], cache: Path, notes: Path, usual: Outcome | None, traced: Path | None
    ) -> NoReturn:
        code: int = pytest.ExitCode.INTERNAL_ERROR
        try:
            os.setsid()
            log = os.open(self.log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(log, stream)
            Path("/proc/self/oom_score_adj").write_text("1000")  # a mutant that eats memory dies before its neighbours
            if usual is not None:
                limit = int(_PATIENCE * usual.cpu_seconds + _SPARE_SECONDS)
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            os.environ.update(
                PYTHONPATH=str(self.tree), PYTHONDONTWRITEBYTECODE="1", FA4_CACHE_DIR=str(cache),
                CUTE_DSL_CACHE_DIR=str(self.dsl_cache),  # the same for each: it is part of the fingerprint of kernels
            )  # fmt: skip
            shutil.rmtree(self.dsl_cache, ignore_errors=True)
            self.dsl_cache.mkdir(mode=0o700)
            sys.dont_write_bytecode = True
            _import_from(self.tree, instead_of=self.root)
            random.SystemRandom = partial(random.Random, self.seed)  # type: ignore[assignment,misc]
            quiet = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not soak and not gpu", "--rootdir", str(self.tree)]
            tracer = Tracer(self.tree)
            if traced is not None:
                tracer.start()
            code = pytest.main([*quiet, *tests], plugins=[_FirstFailure(notes)])
            if traced is not None:
                traced.write_text(json.dumps(tracer.stop()))
        except BaseException as error:
            notes.write_text(json.dumps(f"{type(error).__name__} outside of tests"))
        finally:
            os._exit(code)


class _FirstFailure:
    """Writes down which test failed first."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def _note(self, report: Any) -> None:
        if report.failed and not self.notes.exists():
            self.notes.write_text(json.dumps(report.nodeid or "collection"))

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)


def _import_from(tree: Path, instead_of: Path) -> None:
    """Let `fa4`, `tests` and `bench` mean the copy's."""
    os.chdir(tree)
    roots = {entry.stem for entry in tree.iterdir()}
    for name in [name for name in sys.modules if name.split(".")[0] in roots]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry and Path(entry).resolve() != instead_of.resolve())]
    importlib.invalidate_caches()


def _wait(child: int, deadline: float | None) -> tuple[int, Any]:
    """The child's status and what it and its own used; past the deadline it is ended."""
    try:
        while deadline is not None and time.monotonic() < deadline:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                return status, usage
            time.sleep(0.05)
        if deadline is not None:
            os.killpg(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        return status, usage
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the tests may have started and left
            os.killpg(child, signal.SIGKILL)


def _how(status: int, notes: Path) -> str:
    if notes.exists():
        return json.loads(notes.read_text())
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "took too long" if number in (signal.SIGXCPU, signal.SIGKILL) else signal.Signals(number).name
    code = os.WEXITSTATUS(status)
    return "" if code == pytest.ExitCode.OK else pytest.ExitCode(code).name if code < 6 else f"exit code {code}"
