"""Printable summary of the launches of an emulated chip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from warpcheck.machine import LaunchReport

_SHOWN = 12  # opcodes and waits listed per launch before "others"


@dataclass(frozen=True)
class Report:
    """Printable summary; the numbers are in `launches` and in the methods."""

    launches: tuple[LaunchReport, ...]

    @property
    def warp_instructions(self) -> int:
        return sum(launch.warp_instructions for launch in self.launches)

    @property
    def mma_flops(self) -> int:
        return sum(launch.mma_flops for launch in self.launches)

    def by_role(self, launch: LaunchReport) -> dict[str, Counter]:
        """Role (or "warp N" where no role is named) -> opcode -> warp-instructions."""
        summed: dict[str, Counter] = {}
        for warp, opcodes in sorted(launch.by_warp.items()):
            summed.setdefault(launch.roles.get(warp, f"warp {warp}"), Counter()).update(opcodes)
        return summed

    def __str__(self) -> str:
        return "\n\n".join(self._one(launch) for launch in self.launches) or "no kernel was launched"

    def _one(self, launch: LaunchReport) -> str:
        rate = launch.warp_instructions / launch.seconds if launch.seconds else 0.0
        lines = [
            f"{launch.entry}: grid {_dims(launch.grid)}, block {_dims(launch.block)}, cluster {_dims(launch.cluster)}",
            f"  {launch.warp_instructions:,} warp-instructions in {launch.seconds:.2f} s ({rate:,.0f} per second), "
            f"{launch.mma_flops:,} MMA FLOPs",
        ]
        lines += _table("instructions by opcode", launch.instructions)
        for role, opcodes in self.by_role(launch).items():
            top = ", ".join(f"{opcode} {count:,}" for opcode, count in opcodes.most_common(4))
            lines.append(f"  {role}: {sum(opcodes.values()):,} ({top})")
        lines += _table("bytes by path", launch.bytes)
        lines += _table("times a warp waited, by place", launch.waits)
        return "\n".join(lines)


def _dims(extent: tuple[int, int, int]) -> str:
    return "x".join(map(str, extent))


def _table(title: str, counts: Mapping[str, int]) -> list[str]:
    if not counts:
        return []
    ranked = Counter(counts).most_common()
    lines = [f"  {title}:"] + [f"    {count:>14,}  {name}" for name, count in ranked[:_SHOWN]]
    if len(ranked) > _SHOWN:
        lines.append(f"    {sum(count for _, count in ranked[_SHOWN:]):>14,}  {len(ranked) - _SHOWN} others")
    return lines
