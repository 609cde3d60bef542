"""How much of the time of messages lies under kernels, from a trace of one run on every rank.

A message between GPUs is a kernel of NCCL. It begins when its stream is free and ends when the data has arrived, so its
time includes the wait for a rank that is late.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch

from .ranks import gathered

Interval = tuple[float, float]  # microseconds
MESSAGE = re.compile(r"^nccl(Dev)?Kernel")
ATTENTION = re.compile(r"^fa4_|flash|fmha|sdpa", re.IGNORECASE)  # fa4's main kernels, and torch's


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in disjoint intervals, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def total(intervals: Iterable[Interval]) -> float:
    """Microseconds in at least one interval."""
    return sum(end - start for start, end in union(intervals))


def common(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Microseconds in an interval of both."""
    a, b = list(a), list(b)
    return total(a) + total(b) - total(a + b)


def shares(events: list[tuple[str, float, float]]) -> dict[str, float]:
    """Milliseconds of a trace. events: name, start and end in microseconds of everything that ran on a GPU.

    Returns:
        span: from the first start to the last end. attention: of its kernels. messages: of NCCL's kernels; of those
        under_attention, under_others (but no attention kernel), and exposed, which is the rest.
    """
    kinds: dict[str, list[Interval]] = {"message": [], "attention": [], "other": []}
    for name, start, end in events:
        kind = "message" if MESSAGE.search(name) else "attention" if ATTENTION.search(name) else "other"
        kinds[kind].append((start, end))
    messages, attention, computed = kinds["message"], kinds["attention"], kinds["attention"] + kinds["other"]
    under_attention, under_any = common(messages, attention), common(messages, computed)
    points = [point for of_kind in kinds.values() for interval in of_kind for point in interval]
    microseconds = {
        "span": max(points, default=0.0) - min(points, default=0.0),
        "attention": total(attention),
        "messages": total(messages),
        "under_attention": under_attention,
        "under_others": under_any - under_attention,
        "exposed": total(messages) - under_any,
    }
    return {name: round(x / 1000, 4) for name, x in microseconds.items()}


def traced(run: Callable[[], object]) -> dict[str, float]:
    """`shares` of a run, of the rank with the most exposed messages; empty if no rank has a trace. Every rank calls
    it."""
    try:
        found = shares(_events(run))
    except RuntimeError:  # the profiler does not work here: rows need no trace
        found = {}
    return max(gathered(found), key=lambda x: x.get("exposed", -1.0))


def _events(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of everything that ran on this rank's GPU, in the second of two runs: the
    profiler does not start on all ranks at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            run()
        torch.cuda.synchronize()
    events = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(e, "is_user_annotation", False)
        and not e.name.startswith("nccl:")  # annotates the kernels of a message
    ]
    return sorted(events, key=lambda event: event[1])[len(events) // 2 :]


def table(rows: list[dict]) -> list[str]:
    """Lines of a table of the rows with a trace."""
    lines = ["| case | provider | span | attention | messages | under attention | under others | exposed |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    names = ("span", "attention", "messages", "under_attention", "under_others", "exposed")
    for row in rows:
        if row.get("overlap"):
            cells = (f"{row['overlap'][name]:.4g}" for name in names)
            lines.append(f"| {row['label']} | {row['provider']} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []
