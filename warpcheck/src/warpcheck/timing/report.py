"""Printable predicted times of the launches of an emulated chip."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from warpcheck.machine.record import Record
from warpcheck.timing.chips import ChipTable, chip_table
from warpcheck.timing.parts import Whole, whole
from warpcheck.timing.replay import Times, replay

_SHOWN = 8  # units and waits listed per launch


@dataclass(frozen=True)
class Timing:
    """Predicted times; `str` formats them, `launches` has the numbers. docs/timing.md describes their accuracy.

    wholes: of each launch the time of its whole grid, if a part of it ran. clock: GHz.
    """

    launches: tuple[Times, ...]
    wholes: tuple[Whole | None, ...]
    clock: float

    @classmethod
    def of(
        cls, records: Iterable[Record | None], *, timeline: bool = False, sms: int | None = None,
        table: ChipTable | None = None, clock: float | None = None, watts: float | None = None,
    ) -> Timing:  # fmt: skip
        """Replay the records.

        sms: multiprocessors of the chip, for records of a part of a grid [default: the table's]. table: of the GPU
        [default: the chip's]. clock: GHz [default: the table's]. watts: power limit, from which the clock of all
        launches follows instead: it changes more slowly than kernels do.

        Raises:
            ValueError: there is no record, the clock has no table of the chip, or the table no law of power.
        """
        if clock is not None and watts is not None:
            raise ValueError(f"clock is {clock} and watts {watts}, expected one of the two")
        found = [record for record in records if record is not None]
        if not found:
            raise ValueError("no launch was recorded: use emulate(..., timing=True)")
        table = table or chip_table(found[0].launch.chip)
        wholes = [
            whole(record, table, sms or table.sms, timeline=timeline) if record.launch.part else None
            for record in found
        ]
        launches = [
            grid.part if grid else replay(record, chip=table, timeline=timeline) for record, grid in zip(found, wholes)
        ]
        if watts is not None and table.power is None:
            raise ValueError(f"watts is {watts:g}, and the power of the {table.gpu} is unknown")
        timing = cls(tuple(launches), tuple(wholes), clock or table.clock.value)
        if watts is not None and table.power is not None:
            each = zip(timing.each, (times.shares().get("tensor", 0.0) for times in launches))
            share = sum(cycles * of_launch for cycles, of_launch in each) / timing.cycles
            return replace(timing, clock=table.power.clock(watts, share))
        return timing

    @property
    def cycles(self) -> float:
        """Cycles of all launches in sequence."""
        return sum(self.each)

    @property
    def each(self) -> list[float]:
        """Cycles of each launch: of the whole grid, or on the SMs that the launch was recorded on."""
        return [grid.cycles if grid else times.cycles for times, grid in zip(self.launches, self.wholes)]

    @property
    def microseconds(self) -> float:
        """Time of all launches in sequence, at the clock."""
        return self.cycles / self.clock / 1000

    def __str__(self) -> str:
        return "\n\n".join(_text(*of, self.clock) for of in zip(self.launches, self.wholes))


def _text(times: Times, grid: Whole | None, clock: float) -> str:
    cycles = grid.cycles if grid else times.cycles
    lines = [
        f"{times.record.launch.entry[:70]}: predicted {cycles:,.0f} cycles of {times.chip.gpu}, "
        f"{cycles / clock / 1000:,.2f} us at {clock:.4g} GHz, "
        + (f"{_part(grid)}" if grid else f"on {times.sms} SM{'' if times.sms == 1 else 's'}")
    ]
    if times.flops:
        lines.append(f"  products: {times.flops / times.sms / times.cycles:,.0f} FLOPs a cycle and SM")
    lines.append(f"  issue model: from {times.source}" + _untied(times.untied))
    busiest = list(times.shares().items())[:_SHOWN]
    lines.append("  busy: " + ", ".join(f"{name} {share:.0%}" for name, share in busiest))
    lines.append("  longest waits, cycles of a role's warps together:")
    lines += [f"    {cycles:>12,.0f}  {role}: {where}" for role, where, cycles in times.waits(_SHOWN)]
    return "\n".join(lines)


def _part(grid: Whole) -> str:
    told = f"from {grid.ran} of {grid.clusters:,} clusters, {grid.slots} at a time"
    if grid.spread:
        told += f"; standard error of their mean {grid.spread:.1%}"
    if grid.has_atomics:
        told += "; too long if its atomics hand out tiles"
    return told + ("; bound by device memory" if grid.cycles <= grid.floor * 1.05 else "")


def _untied(untied: tuple[int, int]) -> str:
    events, instructions = untied
    if not (events or instructions):
        return ", every event tied"
    return f", {events} events and {instructions} instructions untied"
