"""How time and memory are taken: medians with quartiles, cold L2, CUDA events on GPUs and a wall clock on CPUs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")
LEAST = 15  # runs of each function that takes turns
L2_FLUSH_BYTES = 256 * 2**20  # larger than the L2 of any chip so far (B200: 126 MB)


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds: median, lower and upper quartile, and how many runs they are of."""

    median_ms: float
    q25_ms: float
    q75_ms: float
    repeats: int

    @staticmethod
    def of(samples: list[float]) -> Timing:
        q25, median, q75 = statistics.quantiles(samples, n=4, method="inclusive")
        return Timing(median, q25, q75, len(samples))


def captured(
    function: Callable[[], Result], stream: torch.cuda.Stream | None = None
) -> tuple[Callable[[], None], Result]:
    """Capture a CUDA graph of `function`, which has run before. Return what replays it, and the result, whose tensors
    the replays fill. stream: of the capture [default: one of torch's]."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = function()
    return graph.replay, result


def measure(
    function: Callable[[], object], device: torch.device, *, seconds: float = 0.5, min_repeats: int = 7
) -> Timing:
    """Time `function` after one warm-up, for about `seconds`, at least `min_repeats` and at most 200 times."""
    return Timing.of(_samples(function, device, _repeats(_estimate_ms(function, device), seconds, min_repeats)))


def measure_in_turns(
    functions: dict[str, Callable[[], object]], device: torch.device, *, seconds: float = 0.5, rounds: int = 0
) -> dict[str, Timing]:
    """Time each of the functions for about `seconds`, in rounds in which all take turns: what drifts meets them all.

    Each turn begins with a run that does not count, and comes after another function's in every round (`orders`): after
    one that draws little power a function runs at a higher clock for a while, by several percent. rounds: 0 for as many
    as let everybody follow everybody, if these are between 4 and 10.
    """
    every = orders(len(functions))
    rounds = rounds or min(max(len(every), 4), 10)
    repeats = {
        name: _repeats(_estimate_ms(function, device), seconds / rounds, -(-LEAST // rounds))
        for name, function in functions.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for _, order in zip(range(rounds), itertools.cycle(every)):
        for name in (names[place] for place in order):
            samples[name] += _samples(functions[name], device, 1 + repeats[name])[1:]
    return {name: Timing.of(times) for name, times in samples.items()}


def measure_rested(function: Callable[[], object], device: torch.device, rest: float, runs: int, rounds: int) -> Timing:
    """Time runs after rests of so many seconds, before the power limit lowers the clock. The first run of each round
    does not count."""
    samples: list[float] = []
    for _ in range(rounds):
        time.sleep(rest)
        samples += _samples(function, device, 1 + runs)[1:]
    return Timing.of(samples)


def orders(n: int) -> list[list[int]]:
    """Orders of n things in which each is first equally often and follows each other one equally often: n of them, 2 n
    if n is odd. (A zigzag 0, 1, n - 1, 2, ... has neighbours at all distances, and is shifted; backwards, too, if n is
    odd, as it has half of the distances twice then.)"""
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    shifted = [[(place + shift) % n for place in zigzag] for shift in range(n)]
    if n % 2 == 0 or n == 1:
        return shifted
    return [way for order in shifted for way in (order, order[::-1])]


def _estimate_ms(function: Callable[[], object], device: torch.device) -> float:
    """Of three runs after one that does not count."""
    return statistics.median(_samples(function, device, 4)[1:])


def _repeats(estimate_ms: float, seconds: float, least: int) -> int:
    return int(min(200, max(least, 1000 * seconds / max(estimate_ms, 1e-3))))


def _samples(function: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of single runs."""
    return (cuda_samples if device.type == "cuda" else _cpu_samples)(function, repeats)


def _cpu_samples(function: Callable[[], object], repeats: int) -> list[float]:
    def once() -> float:
        started = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - started)

    return [once() for _ in range(repeats)]


def cuda_samples(function: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of single runs with a cold L2 cache. Waits for the current stream alone: another one may have a
    kernel that does not end."""
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        flush.zero_()
        start.record()
        function()
        stop.record()
    events[-1][1].synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def peak_extra_bytes(function: Callable[[], object], device: torch.device) -> int | None:
    """How much memory `function` takes on top of what is there before it; None where it cannot be told."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return None

    def kibibytes(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1])

    _give_free_memory_back()  # or what an earlier call left with the allocator would be taken again unseen
    clear.write_text("5")  # resets the high-water mark of the resident set
    before = kibibytes("VmRSS")
    function()
    return 1024 * (kibibytes("VmHWM") - before)


def _give_free_memory_back() -> None:
    """Return the allocator's free pages to the system, where the C library can (glibc)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
