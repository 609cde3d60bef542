"""Printable predicted times of the launches of an emulated chip."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from warpcheck.machine.record import Record
from warpcheck.timing.replay import Times, replay

_SHOWN = 8  # units and waits listed per launch


@dataclass(frozen=True)
class Timing:
    """Predicted times; `str` formats them, `launches` has the numbers. docs/timing.md describes their accuracy."""

    launches: tuple[Times, ...]

    @classmethod
    def of(cls, records: Iterable[Record | None], *, timeline: bool = False) -> Timing:
        """Replay the records.

        Raises:
            ValueError: there is no record, or the clock has no table of the chip.
        """
        found = [record for record in records if record is not None]
        if not found:
            raise ValueError("no launch was recorded: use emulate(..., timing=True)")
        return cls(tuple(replay(record, timeline=timeline) for record in found))

    @property
    def cycles(self) -> float:
        """Cycles of all launches in sequence."""
        return sum(times.cycles for times in self.launches)

    @property
    def microseconds(self) -> float:
        """Time of all launches in sequence, at the chip's clock."""
        return sum(times.cycles / times.chip.clock.value / 1000 for times in self.launches)

    def __str__(self) -> str:
        return "\n\n".join(map(_text, self.launches))


def _text(times: Times) -> str:
    clock = times.chip.clock.value
    lines = [
        f"{times.record.launch.entry[:70]}: predicted {times.cycles:,.0f} cycles of {times.chip.gpu}, "
        f"{times.cycles / clock / 1000:,.2f} us at {clock} GHz, on {times.sms} SM{'' if times.sms == 1 else 's'}",
    ]
    if times.flops:
        lines.append(f"  products: {times.flops / times.sms / times.cycles:,.0f} FLOPs a cycle and SM")
    lines.append(f"  issue model: from {times.source}" + _untied(times.untied))
    busiest = list(times.shares().items())[:_SHOWN]
    lines.append("  busy: " + ", ".join(f"{name} {share:.0%}" for name, share in busiest))
    lines.append("  longest waits, cycles of a role's warps together:")
    lines += [f"    {cycles:>12,.0f}  {role}: {where}" for role, where, cycles in times.waits(_SHOWN)]
    return "\n".join(lines)


def _untied(untied: tuple[int, int]) -> str:
    events, instructions = untied
    if not (events or instructions):
        return ", every event tied"
    return f", {events} events and {instructions} instructions untied"
