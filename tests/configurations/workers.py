"""What processes of `python -m tests.configurations` do; spawned ones import it by name."""

from __future__ import annotations

import functools
import time

from .kernels import Kernel, enumerated


@functools.cache
def _chosen(number: int, backend: str, every: int) -> list[Kernel]:
    return sorted(enumerated(number, backend, every).chosen(), key=lambda kernel: repr(kernel.key))


def count(target: tuple[int, str], every: int) -> tuple[int, int]:
    """Kernels that calls ask for, and those that stand for them; of one target."""
    found = enumerated(*target, every)
    return len(found.seen), len(found.chosen())


def compile_share(target: tuple[int, str], every: int, share: int, shares: int) -> list[tuple[str, float, str]]:
    """(kernel, seconds, what went wrong or nothing) of every `shares`-th kernel of a target."""
    results = []
    for kernel in _chosen(*target, every)[share::shares]:
        started, error = time.perf_counter(), ""
        try:
            kernel.compile()
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[-1500:]}"
        results.append((str(kernel), time.perf_counter() - started, error))
    return results
