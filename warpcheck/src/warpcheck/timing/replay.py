"""Replay of a recorded launch on the clock model of a chip: the Python interface of the compiled replay."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from warpcheck.machine.record import KINDS, Record
from warpcheck.timing.chips import ChipTable, chip_table
from warpcheck.timing.code import issue_of
from warpcheck.timing.issue import Issue

TRACKS = ("tensor core", "copies in", "copies out", "warp", "waits")
_PARTITIONS = 4


@dataclass(frozen=True)
class Times:
    """Predicted times of a launch on the SMs that it was recorded on. All times are in cycles.

    ends: CTA -> (start, end). busy: unit -> busy cycles, summed over the SMs. pipes: pipe -> busy cycles, summed over
    the schedulers. products: (n, 3) start, end and FLOPs. waited: (warp, PTX instruction) -> cycles. clocks: (n, 3)
    CTA, warp and time of each reading of an SM's clock. untied: numbers of events, and of instructions, without a slot
    in the issue model that the warp executed; each got a slot of its own.
    """

    record: Record
    chip: ChipTable
    cycles: float
    ends: dict[int, tuple[float, float]]
    busy: dict[str, float]
    pipes: dict[str, float]
    issued: int
    instructions: int
    products: np.ndarray
    waited: dict[tuple[int, int], float]
    intervals: list[tuple]
    clocks: np.ndarray
    untied: tuple[int, int]
    misses: float
    source: str

    @cached_property
    def sms(self) -> int:
        return len({warp.sm for warp in self.record.warps})

    @property
    def flops(self) -> float:
        return float(self.products[:, 2].sum())

    @property
    def global_bytes(self) -> int:
        """Bytes that threads and copies move between multiprocessors and global memory.

        Accesses of fewer bytes than their sectors have: the next accesses take the others from the L1 cache.
        """
        moved = 0
        for warp in self.record.warps:
            kinds, values = warp.events[:, 1], warp.events[:, 2:]
            asked, sectors = values[kinds == KINDS["global"], :2].sum(0)
            moved += min(int(asked), 32 * int(sectors))
            moved += int(values[kinds == KINDS["load"], 3].sum() + values[kinds == KINDS["store"], 2].sum())
        return moved

    def shares(self) -> dict[str, float]:
        """Return the utilization of each unit, the busiest unit first."""
        ports = {"tmem load": _PARTITIONS, "tmem store": _PARTITIONS}
        whole = {name: value / self.sms / ports.get(name, 1) for name, value in self.busy.items()}
        whole |= {f"{name} pipe": value / (self.sms * _PARTITIONS) for name, value in self.pipes.items() if value}
        whole["issue"] = self.issued / (self.sms * _PARTITIONS)
        return {name: value / self.cycles for name, value in sorted(whole.items(), key=lambda item: -item[1])}

    def waits(self, most: int = 12) -> list[tuple[str, str, float]]:
        """Return role, location and cycles of the longest waits, summed over the warps of a role."""
        code, roles = self.record.kernel.instructions, self.record.roles
        summed: dict[tuple[str, str], float] = defaultdict(float)
        for (warp, instruction), cycles in self.waited.items():
            where = f"{code[instruction].opcode} line {code[instruction].line}" if instruction >= 0 else "untied"
            summed[roles.get(warp, f"warp {warp}"), where] += cycles
        ranked = sorted(summed.items(), key=lambda item: -item[1])[:most]
        return [(role, where, cycles) for (role, where), cycles in ranked]


def replay(
    record: Record,
    issue: Issue | None = None,
    chip: ChipTable | None = None,
    *,
    timeline: bool = False,
    cold: bool = False,
    ranges: Sequence[tuple[int, int, float, bool]] = (),
) -> Times:
    """Predict the times of a recorded launch on the SMs that it was recorded on.

    issue: issue model [default: `issue_of` the record]. chip: [default: the table of the record's chip]. cold: the
    first access to an address comes from DRAM; with few SMs nearly all accesses are first ones, on a whole chip few
    are. ranges: global addresses with known use: begin, end, number of SMs of the whole chip that read the same
    addresses at about the same time, and whether the first access comes from DRAM. Other addresses count as read by all
    SMs: the link from a GPC to L2 does not limit them.

    Raises:
        RuntimeError: the replay deadlocked, because issue model and record contradict each other.
        ValueError: the record has no CTA.
    """
    if not record.warps:
        raise ValueError(f"the record of {record.launch.entry} has no warp: nothing took any time")
    from warpcheck.timing import _replay  # type: ignore[attr-defined]

    issue = issue or issue_of(record)
    chip = chip or chip_table(record.launch.chip)
    places = list(_places(record, issue.registers))
    warps = [(w.cta, w.warp, w.sm, w.runs.tobytes(), w.events.tobytes()) for w in record.warps]
    result = _replay.run(
        chip.values(), len(issue.pipes), *map(_rows, (issue.slots, issue.instructions, issue.blocks)),
        record.instructions.tolist(), warps, _rows(places), timeline, cold, list(ranges), 0.0,
    )  # fmt: skip
    if result["stuck"]:
        raise RuntimeError(f"the replay got stuck: {result['stuck']}")
    ctas = sorted({warp.cta for warp in record.warps})
    order = [place[0] for place in places]
    ends = {cta: (result["cta_start"][order.index(cta)], result["cta_end"][order.index(cta)]) for cta in ctas}
    return Times(
        record, chip, result["end"] - min(start for start, _ in ends.values()), ends, result["busy"],
        dict(zip(issue.pipes, result["pipe_busy"])), result["issued"], result["instructions"],
        np.array(result["products"]).reshape(-1, 3), _waited(result["waited"]), result["intervals"],
        np.array(result["clocks"]).reshape(-1, 3),
        (result["untied_events"], result["untied_instructions"]),
        result["misses"] / max(1, result["loads"]), issue.source,
    )  # fmt: skip


def _rows(array: Any) -> np.ndarray:
    """Return a contiguous array of int64, as the core reads it."""
    return np.ascontiguousarray(array, dtype=np.int64)


def _waited(raw: Mapping[str, float]) -> dict[tuple[int, int], float]:
    return {(int(a), int(b)): value for (a, b), value in ((key.split(), value) for key, value in raw.items())}


def _places(record: Record, registers: int) -> Iterable[tuple[int, ...]]:
    """Return CTA, SM, cluster, rank, preceding CTA on its SM (-1: none) and threads, in the order of the starts."""
    size = int(np.prod(record.launch.cluster))
    threads = int(np.prod(record.launch.block))
    extent = record.launch.grid
    seen: dict[int, int] = {}
    for warp in record.warps:
        seen.setdefault(warp.cta, warp.sm)
    resident = resident_ctas(record, registers)
    on_sm: dict[int, list[int]] = {}
    for cta, sm in seen.items():
        before = on_sm.setdefault(sm, [])
        after = before[-resident] if len(before) >= resident else -1
        before.append(cta)
        x, y, z = cta % extent[0], cta // extent[0] % extent[1], cta // (extent[0] * extent[1])
        cx, cy, cz = record.launch.cluster
        cluster = (x // cx) + (y // cy) * extent[0] + (z // cz) * extent[0] * extent[1]
        rank = x % cx + y % cy * cx + z % cz * cx * cy
        assert rank < size
        yield cta, sm, cluster, rank, after, threads


_REGISTERS, _REGISTER_STEP = 65536, 8  # registers of an SM, and the granularity of a thread's


def resident_ctas(record: Record, registers: int) -> int:
    """Return the CTAs that an SM holds, limited by shared memory, threads, and registers of a thread (0: unknown)."""
    from warpcheck.machine.chips import RESERVED_SHARED, chip_facts

    facts = chip_facts(record.launch.chip)
    threads = math.prod(record.launch.block)
    static = sum(v.nbytes for v in record.kernel.variables.values() if v.space == "shared")
    found = [facts.threads_per_sm // threads, facts.blocks_per_sm]
    found.append(facts.smem_per_sm // (record.launch.smem_bytes + static + RESERVED_SHARED))
    if registers:
        each = math.ceil(registers / _REGISTER_STEP) * _REGISTER_STEP
        found.append(_REGISTERS // (each * threads))
    return max(1, min(found))
