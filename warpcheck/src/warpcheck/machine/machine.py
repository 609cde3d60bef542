"""One emulated chip: give it PTX and memory, get results, a report, or an error by name and place."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from typing import Any

from warpcheck.errors import LaunchRefused, Place
from warpcheck.findings import FINAL, KINDS, Finding, Findings, repair_of
from warpcheck.machine.chips import chip_facts
from warpcheck.machine.lowering import SHARED_RESERVED, Lowering
from warpcheck.machine.names import names_in
from warpcheck.machine.ptx import Kernel, Module, parse
from warpcheck.machine.record import Record, RecordedLaunch

SCHEDULES = ("round_robin", "random", "adversarial")
Order = tuple[int, str]  # seed and schedule
ORDERS = ("practice", "letter")
ON_FINDING = ("raise", "collect")


def interleavings(seed: int, count: int, schedule: str | None = None) -> list[Order]:
    """`count` orders from `seed` on, each with the next schedule, or all with the given one."""
    return [(s, schedule or SCHEDULES[s % len(SCHEDULES)]) for s in range(seed, seed + count)]


@dataclass(frozen=True)
class Allocation:
    """A range of host memory that kernels may touch as global memory."""

    base: int
    nbytes: int
    name: str = ""


def three(extents: Sequence[int]) -> tuple[int, int, int]:
    """Extents of a grid, CTA or cluster, of which the last ones may be left out."""
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the host code asked for it; `params` holds each parameter's bytes."""

    ptx: str
    entry: str
    params: tuple[bytes, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    programmatic: bool = False
    cooperative: bool = False


@dataclass(frozen=True)
class Checks:
    """What is verified while a kernel runs.

    bounds, poison, races, tmem: groups of checks that cost time; one that is off is not even looked for.
    letter: tensor memory passes from thread to thread only by tcgen05.wait and tcgen05.fence, as PTX ISA 9.7.16.6 has
        it, cp.async.mbarrier.arrive hands over what was copied only, as 8.9.1.1 has it, and all warps of a warpgroup
        execute the same setmaxnreg, as 9.7.19.5 has it. Off by default: known-good kernels rely on the use of a
        register and on barriers alone, hand over stores beside copies, and give back registers in each role's branch.
    order: "practice": the tcgen05 operations of one thread execute in order. "letter": only where 9.7.16.6.2 pipelines
        them, an MMA after one with the same accumulator and shape; others complete in any order.
    leftovers: a CTA must not end in the middle of an mbarrier's phase, nor before its bulk stores have read their
        source, nor give back tensor memory that is still in use. Off by default: known-good kernels do.
    off: kinds of findings (`warpcheck.findings.KINDS`) that are neither raised nor noted; the machine goes on behind
        them as behind a finding that was collected.
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


@dataclass
class LaunchReport:
    """What one launch did.

    instructions: opcode text (without operands) -> warp-instructions executed.
    by_warp: warp index within its CTA -> opcode -> warp-instructions.
    bytes: path ("global_load", "global_store", "shared_load", "shared_store", "tma_load", "tma_store", ...) -> bytes.
    mma_flops: 2 * M * N * K summed over all matrix instructions.
    waits: place of a blocking instruction -> times that a warp had to park there.
    lines: line of the PTX text -> warp-instructions.
    roles: warp index within its CTA -> name, as given to the launch.
    findings: what was noted instead of raised (`on_finding="collect"`), by pair of instructions.
    record: with `timing=True`, what a clock needs to know: see `record`.
    differs: further orders in which the launch was run from the same memory and left other bytes.
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
    lines: dict[int, int] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    trace_hash: int = 0
    seconds: float = 0.0
    trace: list[tuple] = field(default_factory=list)
    record: Record | None = None
    differs: tuple[Order, ...] = ()
    findings: Findings = Findings()  # noqa: RUF009  (immutable)

    @property
    def warp_instructions(self) -> int:
        return sum(self.instructions.values())


class Machine:
    """A chip of `sms` streaming multiprocessors.

    chip: "sm_80", "sm_90a", "sm_100a", ...: what it has is `chips.CHIPS`.
    seed: decides every choice that the hardware leaves open; the same seed gives the same trace, bit for bit.
    schedule: "round_robin", "random" or "adversarial".
    timing: record what `warpcheck.timing` needs; the order is round_robin, in which a wait is executed once.
    limit: warp-instructions after which a launch is taken for a Deadlock; 0 for no limit.
    on_finding: "raise" the first error, or "collect": note what is found, the same pair of instructions once, and go on
        with the values that the machine has (an access that cannot be done is left out); the report has the findings.
    resident: how many clusters (CTAs, where there are none) run at a time, lowest index first; 0: as many as fit.
        [default: 1, which is all that a launch guarantees, with an odd seed, as many as fit with an even one or with
        timing]
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
        timing: bool = False,
        limit: int = 0,
        on_finding: str = "raise",
        resident: int | None = None,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule is {schedule!r}, expected one of {SCHEDULES}")
        if on_finding not in ON_FINDING:
            raise ValueError(f"on_finding is {on_finding!r}, expected one of {ON_FINDING}")
        if timing and schedule != "round_robin":
            raise ValueError(
                f"schedule is {schedule!r}, expected 'round_robin' with timing: others let waits give up and spin"
            )
        if resident is not None and resident < 0:
            raise ValueError(f"resident is {resident}, expected at least 1, or 0 for as many as fit")
        if timing and resident:
            raise ValueError(f"resident is {resident}, expected None or 0 with timing: a clock times a whole chip")
        self.resident = int(seed % 2 and not timing) if resident is None else resident
        self.on_finding = on_finding
        self.chip = chip
        self.facts = chip_facts(chip)
        self.sms = sms
        self.seed = seed
        self.schedule = schedule
        self.checks = checks or Checks()
        self.trace = trace
        self.timing = timing
        self.limit = limit
        self._options: dict[str, Any] = {
            "sms": sms, "checks": checks, "trace": trace, "limit": limit, "on_finding": on_finding,
            "resident": resident,
        }  # fmt: skip
        self._before: Any = None  # what the last grid touched, if the next may start before it ends

    def in_order(self, order: Order) -> Machine:
        """The same chip with another seed and schedule."""
        return Machine(self.chip, seed=order[0], schedule=order[1], **self._options)

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
        cooperative: bool = False,
        after_unknown: bool = False,
    ) -> LaunchReport:
        """Run one grid to its end.

        params: raw little-endian bytes of the entry's parameters, in order.
        smem_bytes: dynamic shared memory per CTA.
        roles: warp index within the CTA -> name, for errors and reports [default: those in the text, see `names`].
        programmatic: launched with programmatic stream serialisation: if the grid before executed
            griddepcontrol.launch_dependents, it may still run, and what both touch needs griddepcontrol.wait.
        cooperative: launched cooperatively: all CTAs are resident, or the launch is refused.
        after_unknown: (with programmatic) the grid before is not known; it may touch any global memory.
        Raises an EmulationError subclass when the kernel does something wrong.
        """
        core = load_core()
        loaded = _load(ptx, entry)
        _check_directives(loaded.kernel, tuple(block), tuple(cluster))
        roles = dict(roles or loaded.roles)
        start = time.perf_counter()
        config = self._config(core, grid, block, cluster, smem_bytes)
        config["params"] = _param_block(loaded.kernel, params)
        config["regions"] = [(a.base, a.nbytes, a.name) for a in allocations] + loaded.variables
        config["overlaps"] = programmatic and (after_unknown or self._before is not None)
        config["cooperative"] = cooperative
        config["before"] = None if after_unknown else self._before
        result = core.run(loaded.program, config)
        self._before = result["touched"]
        extent = tuple(int(g) for g in grid)
        run = {"kernel": entry, "chip": self.chip, "seed": self.seed, "schedule": self.schedule}
        findings = [loaded.finding(raw, extent, roles, count=count, **run) for raw, count in result["findings"]]
        if result["error"] is not None:
            last = loaded.finding(result["error"], extent, roles, **run)
            if self.on_finding == "raise":
                raise last.error
            findings.append(last)
        report = loaded.report(result, tuple(grid), tuple(block), tuple(cluster))
        report.seconds = time.perf_counter() - start
        report.roles = roles
        report.findings = Findings(findings)
        if self.timing:
            shape = RecordedLaunch(self.chip, ptx, entry, tuple(grid), tuple(block), tuple(cluster), smem_bytes)
            report.record = Record.of(shape, loaded.kernel, loaded.sources, result["records"], roles)
        return report

    def _config(self, core, grid, block, cluster, smem_bytes) -> dict[str, Any]:
        """The fields of `Config` in core/engine.hpp."""
        facts, checks = self.facts, self.checks
        return {
            "grid": tuple(grid), "block": tuple(block), "cluster": tuple(cluster),
            "explicit_cluster": tuple(cluster) != (1, 1, 1), "dynamic_shared": smem_bytes,
            "sms": self.sms, "seed": self.seed, "schedule": SCHEDULES.index(self.schedule),
            "arch": facts.number, "has_tmem": facts.tmem_columns > 0,
            "shared_per_block": facts.smem_per_block, "shared_per_sm": facts.smem_per_sm,
            "registers_per_sm": facts.registers_per_sm, "threads_per_sm": facts.threads_per_sm,
            "blocks_per_sm": facts.blocks_per_sm,
            "check_bounds": checks.bounds, "check_poison": checks.poison, "check_races": checks.races,
            "check_tmem": checks.tmem, "check_letter": checks.letter, "check_leftovers": checks.leftovers,
            "order_by_letter": checks.order == "letter", "collect": self.on_finding == "collect",
            "off": sum(1 << i for i, name in enumerate(core.CHECKS) if name in checks.off),
            "trace": self.trace, "timing": self.timing, "limit": self.limit, "resident": self.resident,
        }  # fmt: skip


def load_core():
    """The compiled core, or a clear error where it could not be built."""
    try:
        from warpcheck.machine import _core  # type: ignore[attr-defined]
    except ImportError as error:
        raise RuntimeError(
            "the emulator needs its compiled core; build it with a C++17 compiler: pip install -e . "
            "(or python setup.py build_ext --inplace)"
        ) from error
    return _core


def _check_directives(kernel: Kernel, block: tuple[int, ...], cluster: tuple[int, ...]) -> None:
    """What a launch must keep of the entry's own words (ISA 11.4 and 11.7). Raises LaunchRefused."""

    def declared(name: str) -> tuple[int, ...] | None:
        extents = kernel.directives.get(name)
        return None if extents is None else three(extents)

    for name, came in (("reqntid", block), ("reqnctapercluster", cluster)):
        if declared(name) not in (None, came):
            raise LaunchRefused(f"{kernel.name} says .{name} {declared(name)}, and is launched with {came}")
    most = declared("maxntid")
    if most is not None and math.prod(block) > math.prod(most):
        raise LaunchRefused(f"{kernel.name} says .maxntid {most}, and is launched with {block}")


def _param_block(kernel: Kernel, params: Sequence[bytes]) -> bytes:
    if len(params) != len(kernel.params):
        raise ValueError(f"{len(params)} parameters given, {kernel.name} has {len(kernel.params)}")
    block = bytearray(kernel.param_bytes)
    for param, raw in zip(kernel.params, params):
        if len(raw) < param.nbytes:
            raise ValueError(f"parameter {param.name} has {len(raw)} bytes, expected {param.nbytes}")
        block[param.offset : param.offset + param.nbytes] = raw[: param.nbytes]
    return bytes(block)


class _Loaded:
    """One entry, lowered and ready to run."""

    def __init__(self, module: Module, kernel: Kernel, roles: dict[int, str], barriers: dict[int, str]) -> None:
        core = load_core()
        self.roles = roles
        self.module, self.kernel = module, kernel
        self.buffers = {}
        self.variables: list[tuple[int, int, str]] = []
        for v in module.variables.values():
            if v.space in ("global", "const") and v.nbytes:
                buffer = ctypes.create_string_buffer(v.nbytes + v.align)
                base = -(-ctypes.addressof(buffer) // v.align) * v.align
                if v.data:
                    ctypes.memmove(base, v.data, len(v.data))
                self.buffers[v.name] = (buffer, base)
                self.variables.append((base, v.nbytes, v.name))
        lowering = Lowering(core, module, kernel, {name: base for name, (_, base) in self.buffers.items()})
        lowering.run()
        self.sources = lowering.sources
        self.opcodes = [kernel.instructions[s].opcode for s in self.sources]  # of each row
        self.lines = [kernel.instructions[s].line for s in self.sources]
        rows = [(r.op, r.type, r.type2, r.dst, r.src, r.modifiers, r.guard, r.aligned, r.sync) for r in lowering.rows]
        wide = [(value & (2**64 - 1), offset, words) for value, offset, words in lowering.constants]
        dynamic_shared = SHARED_RESERVED + lowering.layout.static_shared
        named = {dynamic_shared + offset: name for offset, name in barriers.items()}
        maxnreg = kernel.directives.get("maxnreg", (0,))[0]
        self.program = core.Program(
            rows, wide, lowering.constant_words, lowering.preset_rows, lowering.register_words,
            len(lowering.register_bits), lowering.layout.local_bytes, lowering.layout.static_shared, maxnreg, named,
        )  # fmt: skip

    def place(self, where: tuple[int, int, int, int], grid, roles: Mapping[int, str]) -> Place | None:
        row, cta, warp, lanes = where
        if row < 0:
            return None
        who: dict[str, Any] = {}
        if cta >= 0:
            who["cta"] = (cta % grid[0], cta // grid[0] % grid[1], cta // grid[0] // grid[1])
        if warp >= 0:
            who.update(warp=warp, role=roles.get(warp))
        if lanes not in (0, 0xFFFFFFFF):
            who["lanes"] = tuple(i for i in range(32) if lanes >> i & 1)
        return self.module.place(self.kernel.instructions[self.sources[row]], **who)

    def finding(self, raw: tuple, grid, roles: Mapping[int, str], **run: Any) -> Finding:
        kind, message, where, others, barrier = raw
        place = self.place(where, grid, roles)
        further = tuple((text, self.place(place, grid, roles)) for text, place in others)
        repair = repair_of(kind, place, further, barrier)
        return Finding(kind, KINDS[kind].severity, message, place, further, barrier, repair, **run)

    def report(self, result: dict, grid, block, cluster) -> LaunchReport:
        report = LaunchReport(self.kernel.name, grid, block, cluster)
        executed = [*map(sum, zip(*result["by_warp"]))]  # of each row
        report.instructions = _summed(self.opcodes, executed)
        report.lines = _summed(self.lines, executed)
        report.by_warp = {warp: _summed(self.opcodes, counts) for warp, counts in enumerate(result["by_warp"])}
        report.bytes = dict(result["bytes"])
        report.mma_flops = result["mma_flops"]
        for row, n in enumerate(result["waits"]):
            if n:
                ins = self.kernel.instructions[self.sources[row]]
                name = self.module.files.get(ins.file, "") if ins.file else ""
                report.waits[f"{ins.opcode} ({name}:{ins.source_line}, ptx {ins.line})"] = n
        report.trace_hash = result["trace_hash"]
        report.trace = [
            (t, cta, warp, self.place((row, cta, warp, 0), grid, {}), count, what)
            for t, cta, warp, row, count, what in result["trace"]
        ]
        return report


def _summed(keys: Sequence[Any], counts: Sequence[int]) -> dict[Any, int]:
    """The counts of each key, without those that are 0."""
    sums: dict[Any, int] = {}
    for key, n in zip(compress(keys, counts), filter(None, counts)):
        sums[key] = sums.get(key, 0) + n
    return sums


_parsed = lru_cache(maxsize=16)(parse)  # a text's kernels are launched one after the other


def kernel_of(ptx: str, entry: str) -> Kernel:
    """The parsed entry: its parameters and directives. Raises PtxSyntaxError, UnknownInstruction, ValueError."""
    return _load(ptx, entry).kernel


@lru_cache(maxsize=64)
def _load(ptx: str, entry: str) -> _Loaded:
    module = _parsed(ptx)
    if entry not in module.kernels:
        raise ValueError(f"the PTX has no entry {entry!r}; it has {sorted(module.kernels)}")
    return _Loaded(module, module.kernels[entry], *names_in(ptx, entry))
