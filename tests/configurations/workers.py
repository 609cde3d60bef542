"""What processes of `python -m tests.configurations` do; spawned ones import it by name."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .kernels import Kernel, enumerated


def enumerate_target(target: tuple[int, str], every: int) -> tuple[int, list[Kernel]]:
    """How many kernels calls to a target ask for, and those that stand for them, in a fixed order."""
    found = enumerated(*target, every)
    return len(found.seen), sorted(found.chosen(), key=lambda kernel: repr(kernel.key))


def compile_share(kernels: Sequence[Kernel]) -> list[tuple[str, float, str]]:
    """(kernel, seconds, what went wrong or nothing) of each."""
    results = []
    for kernel in kernels:
        started, error = time.perf_counter(), ""
        try:
            kernel.compile()
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[-1500:]}"
        results.append((str(kernel), time.perf_counter() - started, error))
    return results
