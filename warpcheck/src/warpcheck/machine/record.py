"""Record of a launch for the clock: executed instructions of each warp, and the values that determine their time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from warpcheck.machine.ptx import Kernel

# Kinds of events, by number, with the names of their values: core/recorder.hpp.
EVENTS = (
    ("init", "cta", "barrier", "arrivals"),
    ("arrive", "cta", "barrier", "arrivals", "bytes"),
    ("wait", "cta", "barrier", "phases"),
    ("load", "cta", "barrier_cta", "barrier", "bytes", "address", "pieces"),
    ("store", "lane", "adds", "bytes", "address", "pieces"),
    ("put", "cta", "barrier_cta", "barrier", "bytes"),
    ("product", "m", "n", "k", "group", "tmem", "kind"),
    ("commit", "cta", "barrier"),
    ("named", "barrier", "threads"),
    ("shared", "bytes", "passes", "cta"),
    ("global", "bytes", "sectors", "address", "access", "lines"),
    ("cancel", "cta", "barrier"),
    ("copy_arrive", "cta", "barrier", "arrivals", "added"),
    ("tensor_copy", "bytes"),
    ("box", "rows", "cut", "cut_sectors", "sectors", "bytes", "partial"),
)
KINDS = {names[0]: number for number, names in enumerate(EVENTS)}


@dataclass(frozen=True)
class Part:
    """Part of a grid that runs for the clock.

    clusters: numbers of the clusters that run, in the order of their starts. sms: multiprocessors for them. resident:
    clusters that run at a time. slots: clusters that the whole chip runs at a time. takes: whether CTAs take the tiles
    of clusters that have not started. regions: base and bytes of the memory that the kernel may access.
    """

    clusters: tuple[int, ...]
    sms: int
    resident: int
    slots: int
    takes: bool = False
    regions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RecordedLaunch:
    """How the kernel was launched. smem_bytes: dynamic shared memory of a CTA. part: of the grid that ran [default:
    all]."""

    chip: str
    ptx: str
    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    smem_bytes: int
    part: Part | None = None


@dataclass(frozen=True)
class WarpRecord:
    """Record of a warp.

    runs: (n, 2) first row of the core's table and number of consecutive rows, in the order of execution. events: (m, 8)
    index among the executed rows, kind (`KINDS`), and up to six values (`EVENTS`).
    """

    cta: int
    warp: int
    sm: int
    executed: int
    runs: np.ndarray
    events: np.ndarray


@dataclass(frozen=True)
class Record:
    """Record of a launch. instructions: index of the PTX instruction for each row of the core's table."""

    launch: RecordedLaunch
    kernel: Kernel
    instructions: np.ndarray
    warps: tuple[WarpRecord, ...]
    roles: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, launch: RecordedLaunch, kernel: Kernel, sources: Sequence[int], raw: Sequence[tuple],
           roles: Mapping[int, str]) -> Record:  # fmt: skip
        """Return the record from the data of the core."""
        warps = tuple(
            WarpRecord(
                cta, warp, sm, executed,
                np.frombuffer(runs, dtype=np.uint32).reshape(-1, 2),
                np.frombuffer(events, dtype=np.int64).reshape(-1, 8),
            )
            for cta, warp, sm, executed, runs, events in raw
        )  # fmt: skip
        return cls(launch, kernel, np.asarray(sources, dtype=np.int32), warps, dict(roles))
