"""Further orders of a launch, on all cores: each runs in a thread, on a copy of the memory from before the launch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from warpcheck.machine import Allocation, LaunchReport, Machine

# Runs a launch on a machine; `placed` and `stopped` as in `Machine.launch`.
Run = Callable[[Machine, Mapping[int, int], threading.Event], LaunchReport]


class Snapshot:
    """Contents of allocations at one time, from which further orders start."""

    def __init__(self, allocations: Sequence[Allocation]) -> None:
        self.allocations = [a for a in allocations if a.nbytes]
        self._contents = [_live(a).copy() for a in self.allocations]

    def copied(self) -> Memory:
        return Memory(self.allocations, [content.copy() for content in self._contents])


class Memory:
    """Copy of allocations, which a kernel reads and writes in their place."""

    def __init__(self, allocations: Sequence[Allocation], contents: Sequence[np.ndarray]) -> None:
        self.allocations, self._contents = allocations, contents

    @property
    def placed(self) -> dict[int, int]:
        """Base of an allocation -> address of its copy."""
        return {a.base: content.ctypes.data for a, content in zip(self.allocations, self._contents)}

    def difference(self) -> str:
        """Return the place of the first byte that is not as in the allocations; empty if all are."""
        for allocation, content in zip(self.allocations, self._contents):
            differs = content != _live(allocation)
            if differs.any():
                return f"{allocation.name or hex(allocation.base)} + {int(np.argmax(differs))}"
        return ""


@contextlib.contextmanager
def run_in(machines: Sequence[Machine], snapshot: Snapshot, run: Run) -> Iterator[Iterator[tuple[LaunchReport, str]]]:
    """Start a launch in the orders of `machines`, as many at a time as there are cores.

    Yields the report and the `Memory.difference` of each, in the order of the machines; the iterator raises what the
    launch raised. Orders that nobody waits for are stopped at the end of the context.
    """
    stopped = threading.Event()

    def one(machine: Machine) -> tuple[LaunchReport, str]:
        memory = snapshot.copied()
        report = run(machine, memory.placed, stopped)
        return report, memory.difference()

    with ThreadPoolExecutor(min(len(machines), _cores())) as threads:
        futures = [threads.submit(one, machine) for machine in machines]
        try:
            yield (future.result() for future in futures)
        finally:
            stopped.set()
            for future in futures:
                future.cancel()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _live(allocation: Allocation) -> np.ndarray:
    """Return the bytes of an allocation, not copied."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * allocation.nbytes).from_address(allocation.base))
