"""One emulated chip: give it PTX and memory, get results, a report, or an error by name and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SCHEDULES = ("round_robin", "random", "adversarial")


@dataclass(frozen=True)
class Allocation:
    """A range of host memory that kernels may touch as global memory."""

    base: int
    nbytes: int
    name: str = ""


@dataclass(frozen=True)
class Checks:
    """What is verified while a kernel runs; every check can be switched off to measure its cost."""

    bounds: bool = True
    poison: bool = True
    races: bool = True
    tmem: bool = True


@dataclass
class LaunchReport:
    """What one launch did.

    instructions: opcode text (without operands) -> warp-instructions executed.
    by_warp: warp index within its CTA -> opcode -> warp-instructions.
    bytes: path ("global_load", "global_store", "shared_load", "shared_store", "tma_load", "tma_store", ...) -> bytes.
    mma_flops: 2 * M * N * K summed over all matrix instructions.
    waits: place of a blocking instruction -> times that a warp had to park there.
    trace_hash: digest of every scheduling decision and completion; equal for equal seeds.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    instructions: dict[str, int] = field(default_factory=dict)
    by_warp: dict[int, dict[str, int]] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    mma_flops: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    trace_hash: int = 0
    seconds: float = 0.0
    printed: list[str] = field(default_factory=list)
    trace: list[tuple] = field(default_factory=list)

    @property
    def warp_instructions(self) -> int:
        return sum(self.instructions.values())


class Machine:
    """A chip of `sms` streaming multiprocessors.

    chip: "sm_80", "sm_90a", "sm_100a", ...: sizes of shared memory and TMEM, and the value of architecture registers.
    seed: decides every choice that the hardware leaves open; the same seed gives the same trace, bit for bit.
    schedule: "round_robin", "random" or "adversarial".
    """

    def __init__(
        self,
        chip: str,
        *,
        sms: int = 4,
        seed: int = 0,
        schedule: str = "round_robin",
        checks: Checks | None = None,
        trace: bool = False,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule is {schedule!r}, expected one of {SCHEDULES}")
        self.chip = chip
        self.sms = sms
        self.seed = seed
        self.schedule = schedule
        self.checks = checks or Checks()
        self.trace = trace

    def launch(
        self,
        ptx: str,
        entry: str,
        *,
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int] = (1, 1, 1),
        smem_bytes: int = 0,
        params: Sequence[bytes] = (),
        allocations: Sequence[Allocation] = (),
        roles: Mapping[int, str] | None = None,
        programmatic: bool = False,
    ) -> LaunchReport:
        """Run one grid to its end.

        params: raw little-endian bytes of the entry's parameters, in order.
        smem_bytes: dynamic shared memory per CTA.
        roles: warp index within the CTA -> name, for errors and reports.
        Raises an EmulationError subclass when the kernel does something wrong.
        """
        raise NotImplementedError
