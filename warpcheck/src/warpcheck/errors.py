"""Errors of emulated kernels, each with a name and a location."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Location:
    """Instruction, and the threads that executed it. `file`, `line`: from `.loc`, None without line information. calls:
    files and lines of the calls that were inlined, innermost first."""

    ptx_line: int
    ptx_text: str
    file: str | None = None
    line: int | None = None
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lanes: tuple[int, ...] = ()
    role: str | None = None
    calls: tuple[tuple[str, int], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return a dict with types of JSON only."""
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
        parts += [f"inlined at {file}:{line}" for file, line in self.calls]
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
    """Base class of all errors of a kernel.

    location: the offending instruction. others: further instructions, each with a sentence (the other access of a race,
    every waiter of a deadlock). finding: the record of the error (`warpcheck.findings.Finding`), None outside a run.
    """

    def __init__(
        self,
        message: str,
        location: Location | None = None,
        others: tuple[tuple[str, Location | None], ...] = (),
        finding: Any = None,
    ) -> None:
        self.message = message
        self.location = location
        self.others = others
        self.finding = finding
        super().__init__(self.render())

    def render(self) -> str:
        lines = [self.message]
        if self.location is not None:
            lines.append(f"  at {self.location}")
        for sentence, location in self.others:
            lines.append(f"  {sentence}" + (f"\n    at {location}" if location is not None else ""))
        return "\n".join(lines)


class PtxSyntaxError(EmulationError):
    """The PTX text itself cannot be read."""


class UnknownInstruction(EmulationError):
    """An opcode, modifier or operand form that the emulator does not model, or that the chip lacks."""


class Deadlock(EmulationError):
    """Nothing can run any more: who waits, on which barrier, at which phase."""


class Livelock(Deadlock):
    """A kernel that did not end within its budget of instructions or time, although warps still run."""


class CoResidency(Deadlock):
    """A CTA waits for a CTA that may start only after the first has ended: they need not be resident together."""


class OutOfBounds(EmulationError):
    """An access outside every allocation, shared memory window, or parameter."""


class Misaligned(EmulationError):
    """An address that lacks the alignment of its instruction."""


class UninitializedRead(EmulationError):
    """Poison (never written, or not yet written) reached global memory, an address or control flow."""


class UnwrittenOutput(EmulationError):
    """Elements of a tensor that a kernel must write wholly, which no thread and no copy wrote."""


class BarrierMisuse(EmulationError):
    """An mbarrier or named barrier used against its protocol: overflow, not initialised, wrong count."""


class TmemMisuse(EmulationError):
    """Tensor memory: leak, double allocation, use outside the allocation."""


class DivergentAligned(EmulationError):
    """A `.sync` or `.aligned` instruction that the lanes of a warp do not execute together."""


class RegisterFileOverflow(EmulationError):
    """More registers than the SM has, at launch or by setmaxnreg."""


class LaunchRefused(EmulationError):
    """A launch that the driver refuses: more threads, registers or shared memory than a CTA may have."""


class TensorMapRefused(EmulationError):
    """Arguments that the driver's cuTensorMapEncodeTiled refuses: alignment, strides, extents of the box."""


class IllegalInstruction(EmulationError):
    """An instruction used with operands that its definition forbids (also: a trap)."""


class DataRace(EmulationError):
    """Two conflicting accesses that the PTX memory model leaves unordered."""
