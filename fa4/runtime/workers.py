"""Processes that compile kernels: CuTe DSL compiles one kernel at a time in a process, and holds the interpreter.

A worker is a fresh interpreter that reads requests from its standard input and writes an answer to each: None, or the
text of an error. It imports neither the caller's main module nor CUDA.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .jit import Request

_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from fa4.runtime import workers; workers._serve()"
)
_NICE = 10  # the training process comes first

_running: weakref.WeakSet[subprocess.Popen] = weakref.WeakSet()


class WorkerFailed(RuntimeError):
    """A worker could not start, ended, or could not compile; the message says why."""


class Worker:
    """A process that compiles kernels into a folder of entries. Close it, or use it as a context."""

    def __init__(self, folder: Path) -> None:
        if not sys.executable:
            raise WorkerFailed("this interpreter has no executable to start another one")
        self._folder = folder
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            _running.add(self._process)
            self._send(list(sys.path))
        except OSError as error:
            raise WorkerFailed(f"no process could be started: {error}") from error

    def compile(self, request: Request) -> None:
        """Compile a kernel unless it is in the folder; wait for it.

        Raises:
            WorkerFailed: it was not compiled.
        """
        try:
            self._send((self._folder, pickle.dumps(request)))
            assert self._process.stdout is not None
            error = pickle.load(self._process.stdout)
        except (OSError, EOFError, ValueError, pickle.PickleError, TypeError, AttributeError) as failure:
            self.close()
            raise WorkerFailed(f"a process that compiles kernels ended: {failure!r}") from failure
        if error is not None:
            raise WorkerFailed(error)

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process, also in the middle of a compilation."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.communicate()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _serve() -> None:
    """Answer requests until the input ends: the body of a worker."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the compiler prints must not mix with answers
    while True:
        try:
            folder, pickled = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        error = None
        try:
            pickle.loads(pickled).put_into(folder)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        pickle.dump(error, answers)
        answers.flush()


def compile_all(
    requests: Iterable[Request], folder: Path, jobs: int, done: Callable[[Request, str | None], None]
) -> None:
    """Compile kernels into a folder by `jobs` processes. done: called in the caller's thread after each, with the error
    or None."""
    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    count, finished = waiting.qsize(), queue.SimpleQueue[tuple[Request, str | None]]()

    def work() -> None:
        worker: Worker | None = None
        try:
            while True:
                try:
                    request = waiting.get_nowait()
                except queue.Empty:
                    return
                error = None
                try:
                    if not request.is_in(folder):
                        worker = worker or Worker(folder)
                        worker.compile(request)
                except WorkerFailed as failure:
                    error = str(failure)
                    if worker is not None:
                        worker.close()
                        worker = None
                finished.put((request, error))
        finally:
            if worker is not None:
                worker.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, count))]
    for thread in threads:
        thread.start()
    for _ in range(count):
        done(*finished.get())
    for thread in threads:
        thread.join()


@atexit.register
def _end_all() -> None:
    """End every worker of this process."""
    for process in list(_running):
        if process.poll() is None:
            process.kill()
