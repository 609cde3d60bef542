"""Time of a whole grid of any kernel, from a part of its clusters.

The host sees the whole chip, so that a kernel has the grid, the tiles and the schedule of its own. Of this grid some
clusters run in the emulator, and are replayed:

    at once     all clusters of the grid are resident. Some of them run, and the grid takes as long as the longest.
    in waves    a cluster starts when another one has ended. The time of clusters that do not run is interpolated, and
                all are given to the places of the chip in the order of their numbers.
    taken       resident clusters take the tiles of those that have not started (cluster launch control). Fewer clusters
                take as many fewer tiles.

Bytes that several clusters of the part read count as shared by as many of the whole grid: how often the grid reads a
tensor follows from its size. If the tensors of a grid do not fit into L2, what one cluster reads alone comes from
device memory, and no grid is faster than device memory.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warpcheck.machine import Allocation, Launch, Part, kernel_of
from warpcheck.machine.record import EVENTS, KINDS, Record, RecordedLaunch
from warpcheck.timing.chips import ChipTable
from warpcheck.timing.code import issue_of
from warpcheck.timing.replay import Times, replay, resident_ctas

_ALONE = 2  # readers; of more, another one has mostly waited for device memory
_COLD = 0.5  # share of a grid's bytes that L2 does not hold, from which on what is read alone comes from device memory
_AT_ONCE = 4  # clusters of a resident grid that run
_GOLDEN = (math.sqrt(5) - 1) / 2


def part_of(launch: Launch, chip: str, sms: int, most: int, allocations: Iterable[Allocation]) -> Part:
    """Return the part of a grid to run, of at most about `most` clusters. sms: of the whole chip.

    Raises:
        ValueError: the cluster has more CTAs than the chip has multiprocessors.
    """
    size = math.prod(launch.cluster)
    if size > sms:
        raise ValueError(f"sms is {sms}, expected at least {size}: {launch.entry} has clusters of {size} CTAs")
    clusters = math.prod(launch.grid) // size
    shape = RecordedLaunch(chip, launch.ptx, launch.entry, launch.grid, launch.block, launch.cluster, launch.smem_bytes)
    kernel = kernel_of(launch.ptx, launch.entry)
    record = Record(shape, kernel, np.zeros(0, dtype=np.int32), ())
    resident = resident_ctas(record, issue_of(record).registers)
    places = sms // size
    slots = places * resident
    takes = clusters > slots and any("try_cancel" in instruction.opcode for instruction in kernel.instructions)
    regions = tuple((a.base, a.nbytes) for a in allocations)
    if clusters <= slots:
        together = math.ceil(clusters / places)  # on a multiprocessor
        chosen = _spread(clusters, max(_AT_ONCE, together) if clusters > most else clusters)
        groups = math.ceil(len(chosen) / together)
        return Part(chosen, groups * size, len(chosen), slots, regions=regions)
    if takes:
        each = math.ceil(clusters / slots)  # tiles of a place
        count = min(2 * most, each * resident)  # tiles are not interpolated: more of them
        chosen = tuple(sorted({int((i + 0.5) * _GOLDEN % 1 * clusters) for i in range(count)}))
        return Part(chosen, size, resident, slots, takes=True, regions=regions)
    count = max(most // resident, 2) * resident
    return Part(_spread(clusters, min(count, clusters)), size, resident, slots, regions=regions)


def _spread(clusters: int, count: int) -> tuple[int, ...]:
    """Return numbers spread over the grid, and over every period of it: the first, the last, and a golden sequence."""
    if count >= clusters:
        return tuple(range(clusters))
    found = dict.fromkeys((0, clusters - 1))
    i = 0
    while len(found) < count:
        i += 1
        found[int(i * _GOLDEN % 1 * clusters)] = None
    return tuple(sorted(list(found)[:count]))


@dataclass(frozen=True)
class Whole:
    """Predicted time of a whole grid.

    cycles: of the grid, with its launch. part: replay of the clusters that ran. chip: with the multiprocessors of the
    whole chip. ran: clusters of the part. clusters: of the grid. slots: that run at a time. spread: standard error of
    the mean time of a cluster, as a share of it. floor: cycles that device memory takes for the bytes of the grid;
    `cycles` is not below it. has_atomics: whether a resident grid of which a part ran reads the results of atomics in
    global memory: if these hand out tiles, the part took the tiles of all, and the time is too long.
    """

    cycles: float
    part: Times
    chip: ChipTable
    ran: int
    clusters: int
    slots: int
    spread: float
    floor: float
    has_atomics: bool = False


def whole(record: Record, chip: ChipTable, sms: int, *, timeline: bool = False) -> Whole:
    """Replay a part of a grid, and return the time of the whole grid. sms: of the chip.

    Raises:
        ValueError: the record is of a whole grid.
        RuntimeError: the replay deadlocked.
    """
    launch, part = record.launch, record.launch.part
    if part is None:
        raise ValueError(f"the record of {launch.entry} has all clusters: it was not sampled")
    size = math.prod(launch.cluster)
    clusters = math.prod(launch.grid) // size
    resident_sms = min(sms, clusters * size)
    ranges, floor = _ranges(record, part, clusters, sms, chip)
    # A burst of one multiprocessor finds device memory unused: the rate of all of them is in the floor.
    burst = chip.but(dram_bytes=chip.numbers["l2_bytes"].value * part.sms)
    times = replay(record, chip=burst, timeline=timeline, ranges=ranges)
    each = _of_clusters(times)
    spread = float(np.std(list(each.values())) / np.mean(list(each.values())) / math.sqrt(len(each)))
    if len(part.clusters) == clusters or clusters <= part.slots:
        cycles = max(end for _, end in times.ends.values()) - min(start for start, _ in times.ends.values())
        spread = 0.0
    elif part.takes:
        ran, of_grid = len(part.clusters) / part.resident, clusters / part.slots
        cycles = times.cycles * max(1.0, of_grid / ran)
        spread = 0.0
    else:
        cycles = _waves(_interpolated(each, launch.grid, launch.cluster), clusters, part.slots, chip)
    cycles = max(cycles, floor) + chip.numbers["launch"].value
    busy_sms = dataclasses.replace(chip, sms=resident_sms)
    is_part = len(part.clusters) < clusters <= part.slots
    opcodes = (instruction.opcode for instruction in record.kernel.instructions)
    has_atomics = is_part and any(opcode.startswith("atom.") and ".shared" not in opcode for opcode in opcodes)
    return Whole(cycles, times, busy_sms, len(part.clusters), clusters, part.slots, spread, floor, has_atomics)


def _of_clusters(times: Times) -> dict[int, float]:
    """Return cluster -> cycles from the start of its first CTA to the end of its last."""
    grid, cluster = times.record.launch.grid, times.record.launch.cluster
    found: dict[int, list[tuple[float, float]]] = {}
    for cta, ends in times.ends.items():
        at = cta % grid[0], cta // grid[0] % grid[1], cta // (grid[0] * grid[1])
        x, y, z = (a // c for a, c in zip(at, cluster))
        extent = [g // c for g, c in zip(grid, cluster)]
        found.setdefault(x + extent[0] * (y + extent[1] * z), []).append(ends)
    return {number: max(e for _, e in of) - min(s for s, _ in of) for number, of in found.items()}


def _interpolated(each: dict[int, float], grid: Sequence[int], cluster: Sequence[int]) -> Callable[[int], float]:
    """Return the cycles of a cluster by its number: by a plane through the coordinates where that explains the part
    better than its neighbour in the order of the numbers does, else as the nearest cluster that ran."""
    numbers = np.array(sorted(each))
    cycles = np.array([each[int(n)] for n in numbers])
    extent = [g // c for g, c in zip(grid, cluster)]

    def coordinates(n: Any) -> np.ndarray:
        n = np.atleast_1d(n)
        at = [n % extent[0], n // extent[0] % extent[1], n // (extent[0] * extent[1])]
        varying = [a / e for a, e in zip(at, extent) if e > 1]
        return np.stack([np.ones(len(n)), *varying], 1)

    points = coordinates(numbers)
    if len(numbers) > points.shape[1] + 1:
        found = np.linalg.lstsq(points, cycles, rcond=None)[0]
        # Leave-one-out errors of the plane, from its hat matrix.
        hat = np.einsum("ij,ji->i", points, np.linalg.pinv(points))
        by_plane = np.abs((cycles - points @ found) / np.maximum(1 - hat, 1e-6)).mean()
        by_neighbour = np.abs(np.diff(cycles)).mean()
        if by_plane < by_neighbour:
            low, high = cycles.min(), cycles.max()
            return lambda n: float(np.clip(coordinates(n) @ found, low, high)[0])
    return lambda n: float(cycles[np.abs(numbers - n).argmin()])


def _waves(cycles_of: Callable[[int], float], clusters: int, slots: int, chip: ChipTable) -> float:
    """Return the end of the last cluster, each of which starts in the place that is free first."""
    free = [0.0] * slots
    last = 0.0
    for number in range(clusters):
        begin = heapq.heappop(free)
        end = begin + cycles_of(number) + (chip.numbers["replace"].value if number >= slots else 0.0)
        last = max(last, end)
        heapq.heappush(free, end)
    return last


_L2_OF_LOADS = {"load": (3, 4), "global": (0, 2)}  # columns of bytes and address
_BOX = {name: column for column, name in enumerate(EVENTS[KINDS["box"]][1:])}  # columns of a box


@dataclass(frozen=True)
class _Traffic:
    """Bytes of each region that a part of a grid reads, stores and adds. outside: of the sectors that boxes read, what
    is of other rows. partial: sectors that TMA stores write in part."""

    read: np.ndarray
    outside: np.ndarray
    stored: np.ndarray
    added: np.ndarray
    partial: np.ndarray

    @classmethod
    def of(cls, record: Record, bases: np.ndarray) -> _Traffic:
        found = cls(*(np.zeros(len(bases)) for _ in range(5)))
        for warp in record.warps:
            kinds, values = warp.events[:, 1], warp.events[:, 2:].copy()
            boxes = np.flatnonzero(kinds == KINDS["box"])
            boxes, of_box, to = boxes + 1, values[boxes], kinds[boxes + 1]
            is_load = to == KINDS["load"]
            values[boxes[is_load], _L2_OF_LOADS["load"][0]] = of_box[is_load, _BOX["bytes"]]
            values[boxes[~is_load], 2] = of_box[~is_load, _BOX["bytes"]]
            for kind, (bytes_at, address_at) in _L2_OF_LOADS.items():
                chosen = values[kinds == KINDS[kind]]
                is_read = chosen[:, 3] == 0 if kind == "global" else np.ones(len(chosen), dtype=bool)
                _add(bases, found.read, chosen[is_read, address_at], chosen[is_read, bytes_at])
                _add(bases, found.stored, chosen[~is_read, address_at], chosen[~is_read, bytes_at])
            stores = values[kinds == KINDS["store"]]
            adds = stores[:, 1] == 1
            _add(bases, found.stored, stores[~adds, 3], stores[~adds, 2])
            _add(bases, found.added, stores[adds, 3], stores[adds, 2])
            excess = 32 * of_box[:, _BOX["sectors"]] - of_box[:, _BOX["bytes"]]
            _add(bases, found.outside, values[boxes[is_load], _L2_OF_LOADS["load"][1]], excess[is_load])
            _add(bases, found.partial, values[boxes[~is_load], 3], of_box[~is_load, _BOX["partial"]])
        return found


def _ranges(
    record: Record, part: Part, clusters: int, sms: int, chip: ChipTable
) -> tuple[list[tuple[int, int, float, bool]], float]:
    """Return how the grid reads each region, as `replay` takes it, and the cycles that device memory takes."""
    traffic = _Traffic.of(record, np.array([base for base, _ in part.regions]))
    scale = clusters / len(part.clusters)
    size = np.array([nbytes for _, nbytes in part.regions], dtype=float)

    def once(nbytes: np.ndarray) -> np.ndarray:
        return np.minimum(size, nbytes * scale)

    touched = once(traffic.read + traffic.stored + traffic.added)
    missing = chip.l2_misses(float(touched.sum()))
    read, stored, added = once(traffic.read), once(traffic.stored), once(traffic.added)
    outside = traffic.outside * read / np.maximum(traffic.read, 1)
    partial = traffic.partial * stored / np.maximum(traffic.stored, 1)
    cycles = missing * chip.device_memory(*(float(x.sum()) for x in (read, outside, stored, added, partial))) / sms
    found = []
    unused = max(1.0, part.slots / clusters)
    for (base, nbytes), of_part, lines in zip(part.regions, traffic.read, touched):
        if of_part:
            sharers = min(max(1.0, of_part * scale / max(lines, 1.0)) * unused, float(sms))
            found.append((base, base + nbytes, sharers, missing > _COLD and sharers < _ALONE))
    return found, cycles


def _add(bases: np.ndarray, to: np.ndarray, addresses: np.ndarray, amounts: np.ndarray) -> None:
    """Add amounts to the regions of addresses."""
    if len(addresses):
        at = np.searchsorted(bases, addresses, side="right") - 1
        np.add.at(to, np.maximum(at, 0), amounts)
