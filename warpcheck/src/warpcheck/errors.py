"""What an emulated kernel can do wrong, by name and place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where in the program, and who. `file`/`line` come from `.loc` and are None without line information."""

    ptx_line: int
    ptx_text: str
    file: str | None = None
    line: int | None = None
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lanes: tuple[int, ...] = ()
    role: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """With JSON's types only."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def __str__(self) -> str:
        parts = []
        if self.cta is not None:
            parts.append(f"cta {self.cta}")
        if self.warp is not None:
            parts.append(f"warp {self.warp}" + (f" ({self.role})" if self.role else ""))
        if self.lanes:
            parts.append(f"lane{'s' if len(self.lanes) > 1 else ''} {_spans(self.lanes)}")
        parts.append(f"ptx line {self.ptx_line}: {self.ptx_text}")
        if self.file is not None:
            parts.append(f"{self.file}:{self.line}")
        return ", ".join(parts)


def _spans(lanes: tuple[int, ...]) -> str:
    spans: list[list[int]] = []
    for lane in lanes:
        if spans and spans[-1][1] == lane - 1:
            spans[-1][1] = lane
        else:
            spans.append([lane, lane])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


class EmulationError(RuntimeError):
    """Base of everything a kernel can do wrong. `place` is the offending instruction, `others` further ones
    (the other access of a race, every waiter of a deadlock), each with a sentence. `finding`: the record of it, where
    it was found in a run (warpcheck.findings.Finding)."""

    def __init__(
        self,
        message: str,
        place: Place | None = None,
        others: tuple[tuple[str, Place | None], ...] = (),
        finding: Any = None,
    ) -> None:
        self.message = message
        self.place = place
        self.others = others
        self.finding = finding
        super().__init__(self.render())

    def render(self) -> str:
        lines = [self.message]
        if self.place is not None:
            lines.append(f"  at {self.place}")
        for sentence, place in self.others:
            lines.append(f"  {sentence}" + (f"\n    at {place}" if place is not None else ""))
        return "\n".join(lines)


class PtxSyntaxError(EmulationError):
    """The PTX text itself cannot be read."""


class UnknownInstruction(EmulationError):
    """An opcode, modifier or operand form that the emulator does not model."""


class Deadlock(EmulationError):
    """Nothing can run any more: who waits, on which barrier, at which phase."""


class CoResidency(Deadlock):
    """A CTA waits for one that starts only after it has ended, unless both are resident by luck."""


class OutOfBounds(EmulationError):
    """An access outside every allocation, shared memory window, or parameter."""


class Misaligned(EmulationError):
    """An address that is not a multiple of what the instruction requires."""


class UninitializedRead(EmulationError):
    """Poison (never written, or not yet written) reached global memory, an address or control flow."""


class BarrierMisuse(EmulationError):
    """An mbarrier or named barrier used against its protocol: overflow, not initialised, wrong count."""


class TmemMisuse(EmulationError):
    """Tensor memory: leak, double allocation, use outside the allocation."""


class DivergentAligned(EmulationError):
    """A `.sync`/`.aligned` instruction that its warp does not execute together."""


class RegisterFileOverflow(EmulationError):
    """More registers than the SM has: at launch, or asked for by setmaxnreg."""


class LaunchRefused(EmulationError):
    """A launch that the driver refuses: more threads, registers or shared memory than the chip gives a block."""


class TensorMapRefused(EmulationError):
    """Arguments that the driver's cuTensorMapEncodeTiled refuses: alignment, strides, extents of the box."""


class IllegalInstruction(EmulationError):
    """An instruction used with operands that its definition forbids (also: a trap)."""


class DataRace(EmulationError):
    """Two conflicting accesses without the ordering that the PTX memory model asks for."""
