"""Emulated chip: runs PTX on host memory; returns a report, or raises an error with its location."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress
from typing import Any

from warpcheck.errors import LaunchRefused, Location, UnknownInstruction
from warpcheck.findings import KINDS, Finding, Findings, repair_of
from warpcheck.machine.chips import ChipFacts, chip_facts
from warpcheck.machine.lowering import SHARED_RESERVED, Lowering
from warpcheck.machine.names import names_in, names_of_variables
from warpcheck.machine.options import SCHEDULES, Budget, EmulationOptions, Order
from warpcheck.machine.outputs import Output
from warpcheck.machine.ptx import Kernel, Module, parse
from warpcheck.machine.record import Part, Record, RecordedLaunch
from warpcheck.machine.targets import chips_with, missing_on


@dataclass(frozen=True)
class Allocation:
    """Range of host memory that kernels may access as global memory."""

    base: int
    nbytes: int
    name: str = ""


def three(extents: Sequence[int]) -> tuple[int, int, int]:
    """Complete the extents of a grid, CTA or cluster with ones."""
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


@dataclass(frozen=True)
class Launch:
    """Kernel launch as requested by host code. `params` holds the bytes of each parameter."""

    ptx: str
    entry: str
    params: tuple[bytes, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    programmatic: bool = False
    cooperative: bool = False


@dataclass
class LaunchReport:
    """Report of a launch.

    instructions: opcode text (without operands) -> warp-instructions executed.
    by_warp: warp index within its CTA -> opcode -> warp-instructions.
    bytes: path ("global_load", "global_store", "shared_load", "shared_store", "tma_load", "tma_store", ...) -> bytes.
    mma_flops: 2 * M * N * K summed over all matrix instructions.
    waits: location of a blocking instruction -> number of times that a warp waited there.
    lines: line of the PTX text -> warp-instructions.
    roles: warp index within its CTA -> name, as given to the launch.
    findings: recorded instead of raised (`on_finding="collect"`), by pair of instructions.
    record: with `timing=True`, the input of the clock model; see `record`.
    differs: further orders in which the launch, from the same initial memory, left other bytes. differences: the
        first of these bytes in each, by tensor and offset.
    clock_slots: components of the vector clocks, of warps and of asynchronous operations at a time.
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
    clock_slots: int = 0
    seconds: float = 0.0
    trace: list[tuple] = field(default_factory=list)
    record: Record | None = None
    differs: tuple[Order, ...] = ()
    differences: tuple[str, ...] = ()
    findings: Findings = Findings()  # noqa: RUF009  (immutable)

    @property
    def warp_instructions(self) -> int:
        return sum(self.instructions.values())


class Machine:
    """Emulated chip that runs launches in one order of events.

    chip: "sm_80", "sm_90a", "sm_100a", ...: `chips.CHIPS` has its resources.
    options: see `EmulationOptions`; `seeds` is for `warpcheck.Emulated`, which has a machine for each order.
    """

    def __init__(self, chip: str, options: EmulationOptions | None = None) -> None:
        self.chip = chip
        self.facts = chip_facts(chip)
        self.options = options or EmulationOptions()
        self._before: Any = None  # memory that the last grid accessed, if the next grid may start before it ends

    def in_order(self, order: Order) -> Machine:
        """Return the same chip with another seed and schedule, without timing."""
        return Machine(self.chip, replace(self.options, seed=order[0], schedule=order[1], timing=False))

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
        budget: Budget = Budget(),  # noqa: B008  (immutable)
        outputs: Sequence[Output] = (),
        part: Part | None = None,
        placed: Mapping[int, int] | None = None,
        stopped: threading.Event | None = None,
    ) -> LaunchReport:
        """Run one grid to its end.

        params: raw little-endian bytes of the entry's parameters, in order.
        smem_bytes: dynamic shared memory per CTA.
        roles: warp index within the CTA -> name, for errors and reports [default: those in the text, see `names`].
        programmatic: launched with programmatic stream serialisation: if the grid before executed
            griddepcontrol.launch_dependents, it may still run, and what both touch needs griddepcontrol.wait.
        cooperative: launched cooperatively: all CTAs are resident, or the launch is refused.
        after_unknown: (with programmatic) the grid before is unknown and may access any global memory.
        budget: what the launch may take, as far as the options set no limit.
        outputs: tensors whose writes are recorded; the races check records them.
        part: of the grid that runs [default: all of it].
        placed: base of an allocation or of a variable of the module -> host address of a copy that the kernel reads and
            writes instead; addresses that it sees stay the same.
        stopped: set by another thread, it ends the launch with LaunchStopped.
        Raises an EmulationError subclass when the kernel does something wrong.
        """
        core = load_core()
        loaded = _load(ptx, entry)
        loaded.check_chip(self.facts)
        _check_directives(loaded.kernel, tuple(block), tuple(cluster))
        roles = dict(roles or loaded.roles)
        start = time.perf_counter()
        config = self._config(core, grid, block, cluster, smem_bytes)
        config["params"] = _param_block(loaded.kernel, params)
        placed = placed or {}
        regions = (*allocations, *loaded.variables)
        config["regions"] = [(a.base, a.nbytes, a.name, placed.get(a.base, a.base)) for a in regions]
        config["outputs"] = [output.recorded(self) for output in outputs]
        config["overlaps"] = programmatic and (after_unknown or self._before is not None)
        config["cooperative"] = cooperative
        config["before"] = None if after_unknown else self._before
        allowed = budget.asked(self.options)
        if part is not None:
            config["clusters"], config["sms"], config["resident"] = part.clusters, part.sms, part.resident
        config["max_instructions"], config["max_seconds"] = allowed.instructions, allowed.seconds
        result = core.run(loaded.program, config, self._progress_of(entry, stopped))
        self._before = result["touched"]
        extent = tuple(int(g) for g in grid)
        options = self.options
        run = {"kernel": entry, "chip": self.chip, "seed": options.seed, "schedule": options.schedule}
        findings = [loaded.finding(raw, extent, roles, count=count, **run) for raw, count in result["findings"]]
        if result["error"] is not None:
            last = loaded.finding(result["error"], extent, roles, **run)
            if options.on_finding == "raise":
                raise last.error
            findings.append(last)
        report = loaded.report(result, tuple(grid), tuple(block), tuple(cluster))
        report.seconds = time.perf_counter() - start
        report.roles = roles
        report.findings = Findings(findings)
        if options.timing:
            shape = RecordedLaunch(self.chip, ptx, entry, tuple(grid), tuple(block), tuple(cluster), smem_bytes, part)
            report.record = Record.of(shape, loaded.kernel, loaded.sources, result["records"], roles)
        return report

    def _config(self, core, grid, block, cluster, smem_bytes) -> dict[str, Any]:
        """Return the fields of `Config` in core/engine.hpp."""
        facts, options, checks = self.facts, self.options, self.options.checks
        return {
            "grid": tuple(grid), "block": tuple(block), "cluster": tuple(cluster),
            "explicit_cluster": tuple(cluster) != (1, 1, 1), "dynamic_shared": smem_bytes,
            "sms": options.sms, "seed": options.seed, "schedule": SCHEDULES.index(options.schedule),
            "arch": facts.number, "shared_per_block": facts.smem_per_block, "shared_per_sm": facts.smem_per_sm,
            "registers_per_sm": facts.registers_per_sm, "threads_per_sm": facts.threads_per_sm,
            "blocks_per_sm": facts.blocks_per_sm,
            "check_bounds": checks.bounds, "check_poison": checks.poison, "check_races": checks.races,
            "check_tmem": checks.tmem, "check_letter": checks.letter, "check_leftovers": checks.leftovers,
            "order_by_letter": checks.order == "letter", "collect": options.on_finding == "collect",
            "off": sum(1 << i for i, name in enumerate(core.CHECKS) if name in checks.off),
            "trace": options.trace, "timing": options.timing, "resident": options.resident_limit,
        }  # fmt: skip

    def _progress_of(self, entry: str, stopped: threading.Event | None) -> Callable[[int, float, int, int], None]:
        """Return a function that the core calls several times a second; it prints a line every `progress` seconds."""
        options, told = self.options, 0.0

        def tell(executed: int, seconds: float, ended: int, clusters: int) -> None:
            nonlocal told
            if stopped is not None and stopped.is_set():
                raise LaunchStopped(f"{entry} was stopped after {executed:,} warp-instructions")
            if options.progress and seconds >= told + options.progress:
                told = seconds
                print(
                    f"warpcheck: {entry[:60]}, seed {options.seed}, {options.schedule}: {executed:,} warp-instructions "
                    f"in {seconds:.0f} s, {ended} of {clusters} clusters have ended", file=sys.stderr, flush=True,
                )  # fmt: skip

        return tell


class LaunchStopped(Exception):
    """A launch ended because nobody waits for it."""


def load_core():
    """Import the compiled core. Raises an error that says how to build it."""
    try:
        from warpcheck.machine import _core  # type: ignore[attr-defined]
    except ImportError as error:
        raise RuntimeError(
            "the emulator needs its compiled core; build it with a C++17 compiler: pip install -e . "
            "(or python setup.py build_ext --inplace)"
        ) from error
    return _core


def _check_directives(kernel: Kernel, block: tuple[int, ...], cluster: tuple[int, ...]) -> None:
    """Check a launch against the directives of the kernel (ISA 11.4 and 11.7). Raises LaunchRefused."""

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
    """Lowered kernel with its program in the core."""

    def __init__(self, module: Module, kernel: Kernel, roles: dict[int, str], barriers: dict[int, str]) -> None:
        core = load_core()
        self.roles = roles
        self.module, self.kernel = module, kernel
        self.buffers = {}
        self.variables: list[Allocation] = []
        for v in module.variables.values():
            if v.space in ("global", "const") and v.nbytes:
                buffer = ctypes.create_string_buffer(v.nbytes + v.align)
                base = -(-ctypes.addressof(buffer) // v.align) * v.align
                if v.data:
                    ctypes.memmove(base, v.data, len(v.data))
                self.buffers[v.name] = (buffer, base)
                self.variables.append(Allocation(base, v.nbytes, v.name))
        lowering = Lowering(core, module, kernel, {name: base for name, (_, base) in self.buffers.items()})
        lowering.run()
        self.sources = lowering.sources
        self.opcodes = [kernel.instructions[s].opcode for s in self.sources]  # of each row
        self.lines = [kernel.instructions[s].line for s in self.sources]
        rows = [(r.op, r.type, r.type2, r.dst, r.src, r.modifiers, r.guard, r.aligned, r.sync) for r in lowering.rows]
        wide = [(value & (2**64 - 1), offset, words) for value, offset, words in lowering.constants]
        self.runs_on: set[str] = set()  # chips that have all instructions
        dynamic_shared = SHARED_RESERVED + lowering.layout.static_shared
        sizes = {v.name: v.nbytes for v in (*module.variables.values(), *kernel.variables.values())}
        named = names_of_variables(lowering.layout.shared, sizes)
        named |= {dynamic_shared + offset: name for offset, name in barriers.items()}
        maxnreg = kernel.directives.get("maxnreg", (0,))[0]
        moves_registers = bool({"maxnreg", "minnctapersm"} & kernel.directives.keys())
        self.program = core.Program(
            rows, wide, lowering.constant_words, lowering.preset_rows, lowering.register_words,
            len(lowering.register_bits), lowering.layout.local_bytes, lowering.layout.static_shared, maxnreg, named,
            moves_registers,
        )  # fmt: skip

    def check_chip(self, facts: ChipFacts) -> None:
        """Raise UnknownInstruction if the chip lacks an instruction of the kernel."""
        if facts.target in self.runs_on:
            return
        opcode = missing_on(facts, dict.fromkeys(self.opcodes))
        if opcode is not None:
            place = self.module.location(self.kernel.instructions[self.sources[self.opcodes.index(opcode)]])
            chips = ", ".join(chips_with(opcode)) or "no modelled chip"
            raise UnknownInstruction(f"{facts.target} has no {opcode}; chips that have it: {chips}", place)
        self.runs_on.add(facts.target)

    def location(self, where: tuple[int, int, int, int], grid, roles: Mapping[int, str]) -> Location | None:
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
        return self.module.location(self.kernel.instructions[self.sources[row]], **who)

    def finding(self, raw: tuple, grid, roles: Mapping[int, str], **run: Any) -> Finding:
        kind, message, where, others, barrier = raw
        location = self.location(where, grid, roles)
        further = tuple((text, self.location(location, grid, roles)) for text, location in others)
        repair = repair_of(kind, location, further, barrier)
        return Finding(kind, KINDS[kind].severity, message, location, further, barrier, repair, **run)

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
        report.clock_slots = result["clock_slots"]
        report.trace = [
            (t, cta, warp, self.location((row, cta, warp, 0), grid, {}), count, what)
            for t, cta, warp, row, count, what in result["trace"]
        ]
        return report


def _summed(keys: Sequence[Any], counts: Sequence[int]) -> dict[Any, int]:
    """Sum the counts of each key, and leave out sums of 0."""
    sums: dict[Any, int] = {}
    for key, n in zip(compress(keys, counts), filter(None, counts)):
        sums[key] = sums.get(key, 0) + n
    return sums


_parsed = lru_cache(maxsize=16)(parse)  # kernels of one text are often launched in sequence


def kernel_of(ptx: str, entry: str) -> Kernel:
    """Return the parsed entry. Raises PtxSyntaxError, UnknownInstruction, ValueError."""
    return _load(ptx, entry).kernel


def variables_of(ptx: str, entry: str) -> list[Allocation]:
    """Return the global variables of the entry's module. Raises as `kernel_of`."""
    return _load(ptx, entry).variables


@lru_cache(maxsize=64)
def _load(ptx: str, entry: str) -> _Loaded:
    module = _parsed(ptx)
    if entry not in module.kernels:
        raise ValueError(f"the PTX has no entry {entry!r}; it has {sorted(module.kernels)}")
    return _Loaded(module, module.kernels[entry], *names_in(ptx, entry))
