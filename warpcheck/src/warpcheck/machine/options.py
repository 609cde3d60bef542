"""Options of an emulation: the order of events, the checks, and what is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from warpcheck.findings import FINAL, KINDS

SCHEDULES = ("round_robin", "random", "adversarial")
Order = tuple[int, str]  # seed and schedule
ORDERS = ("practice", "letter")
ON_FINDING = ("raise", "collect")


def interleavings(seed: int, count: int, schedule: str | None = None) -> list[Order]:
    """Return `count` orders from `seed` on, each with the next schedule, or all with the given one."""
    return [(s, schedule or SCHEDULES[s % len(SCHEDULES)]) for s in range(seed, seed + count)]


@dataclass(frozen=True)
class Budget:
    """What a launch may take before it ends as a Livelock; 0 for no limit.

    A first order has 10^10 warp-instructions and four hours. Later orders of the same launch have a hundred times what
    the first one took, and at least a million warp-instructions and a minute.
    """

    instructions: int = 10**10
    seconds: float = 4 * 3600.0

    @staticmethod
    def after(instructions: int, seconds: float) -> Budget:
        """Return the budget of a later order, after a first one that took so much."""
        return Budget(max(_MORE * instructions, 10**6), max(_MORE * seconds, 60.0))

    def asked(self, options: EmulationOptions) -> Budget:
        """Return this budget with the limits that the options set."""
        instructions, seconds = options.max_instructions, options.max_seconds
        return Budget(
            self.instructions if instructions is None else instructions, self.seconds if seconds is None else seconds
        )


_MORE = 100


@dataclass(frozen=True)
class Checks:
    """Rules that a kernel is checked against while it runs.

    bounds, poison, races, tmem: groups of checks that cost time; a group that is off costs none.
    letter: hold four rules to the text of the PTX ISA. Tensor memory passes from thread to thread only by
        tcgen05.wait and tcgen05.fence (9.7.16.6). cp.async.mbarrier.arrive orders only the copies of its thread
        (8.9.1.1). All warps of a warpgroup execute the same setmaxnreg (9.7.19.5). An arrival from another CTA and the
        wait for it have the scope of the cluster (8.7). Off by default: known-good kernels rely on the use of a loaded
        register and on barriers alone, order stores with their copies, give back registers in each role's branch, and
        wait with the default scope.
    order: "practice": the tcgen05 operations of one thread execute in order. "letter": only those that 9.7.16.6.2
        pipelines do, an MMA after an MMA with the same accumulator and shape; others complete in any order.
    leftovers: a CTA must not end in the middle of an mbarrier's phase, nor before its bulk stores have read their
        source, nor free tensor memory that is still in use. Off by default: known-good kernels do.
    off: kinds of findings (`warpcheck.findings.KINDS`) that are neither raised nor noted; the kernel continues as
        after a finding that is collected.
    """

    bounds: bool = True
    poison: bool = True
    races: bool = True
    tmem: bool = True
    letter: bool = False
    leftovers: bool = False
    order: str = "practice"
    off: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "off", frozenset([self.off] if isinstance(self.off, str) else self.off))
        for kind in sorted(self.off):
            if kind in FINAL:
                raise ValueError(f"off has {kind!r}, which cannot be switched off: nothing can follow it")
            if kind not in KINDS:
                raise ValueError(f"off has {kind!r}, expected some of {', '.join(k for k in KINDS if k not in FINAL)}")
        if self.order not in ORDERS:
            raise ValueError(f"order is {self.order!r}, expected one of {ORDERS}")


@dataclass(frozen=True)
class EmulationOptions:
    """How launches run on an emulated chip; the keywords of `warpcheck.emulate` and `warpcheck.Emulated`.

    sms: multiprocessors; grids larger than the chip run in waves.
    seed: decides every choice that the hardware leaves open; the same seed gives the same trace, bit for bit.
    schedule: "round_robin", "random" or "adversarial" (starves one role, or lets one run far ahead).
    checks: groups and kinds of checks [default: all].
    trace: record events for `warpcheck.trace.write`.
    timing: record what `warpcheck.timing` needs; requires round_robin, in which a wait executes once.
    sample: (with timing) run about so many clusters (CTAs of a launch without clusters) of each grid instead of all,
        for the time of the whole grid on `sms` multiprocessors. Values are then those of the clusters that ran.
    on_finding: "raise" the first error, or "collect" all findings, the same pair of instructions once, and continue
        with the values that the machine has. An access that is impossible is left out.
    seeds: number of orders in which every launch runs, from the same memory: `seed` and its successors, each with the
        next schedule. The results are those of the first order.
    resident: clusters (CTAs of a launch without clusters) that run at a time, lowest index first; 0 for as many as fit.
        Cooperative launches are resident as a whole. [default: 1 in orders with an odd seed, which is all that a
        launch guarantees; as many as fit in the others, and with timing]
    max_instructions, max_seconds: warp-instructions and seconds after which a launch counts as a Livelock, for every
        order; 0 for no limit. [default: those of `Budget`]
    progress: seconds after which a launch that still runs prints a line to stderr, and then again after as many; 0 for
        no line.

    Raises:
        ValueError: an option, or a combination of options, that does not exist.
    """

    sms: int = 4
    seed: int = 0
    schedule: str = "round_robin"
    checks: Checks = Checks()
    trace: bool = False
    timing: bool = False
    sample: int | None = None
    on_finding: str = "raise"
    seeds: int = 1
    resident: int | None = None
    max_instructions: int | None = None
    max_seconds: float | None = None
    progress: float = 30.0

    def __post_init__(self) -> None:
        if self.checks is None:
            object.__setattr__(self, "checks", Checks())
        for name, least in (("sms", 1), ("seeds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {least}")
        for name in ("max_instructions", "max_seconds", "progress"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")
        for name, choices in (("schedule", SCHEDULES), ("on_finding", ON_FINDING)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {choices}")
        if self.timing and self.schedule != "round_robin":
            raise ValueError(
                f"schedule is {self.schedule!r}, expected 'round_robin' with timing: others let waits give up and spin"
            )
        if self.resident is not None and self.resident < 0:
            raise ValueError(f"resident is {self.resident}, expected at least 1, or 0 for as many as fit")
        if self.sample is not None and (self.sample < 1 or not self.timing):
            raise ValueError(f"sample is {self.sample}, expected None, or at least 1 with timing")
        if self.sample is not None and (self.seeds > 1 or self.checks.races or self.checks.poison):
            raise ValueError(
                f"sample is {self.sample}, expected None with seeds > 1 or checks of races or poison: most of a grid "
                "does not run, and does not write its results"
            )
        if self.timing and self.resident:
            raise ValueError(f"resident is {self.resident}, expected None or 0 with timing: a clock times a whole chip")

    @property
    def resident_limit(self) -> int:
        """`resident` of this seed; 0 for as many as fit."""
        return int(self.seed % 2 and not self.timing) if self.resident is None else self.resident
