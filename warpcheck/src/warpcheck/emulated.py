"""An emulated chip: the memory of its kernels, launches, findings and a report.

Needs only NumPy, for PTX from any compiler. `warpcheck.emulate` puts a chip behind torch and CuTe DSL.
"""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from warpcheck.findings import FINAL, KINDS, Finding, Findings
from warpcheck.machine import (
    Allocation,
    Budget,
    EmulationOptions,
    Launch,
    LaunchReport,
    Machine,
    Order,
    Output,
    interleavings,
    kernel_of,
    three,
    variables_of,
)
from warpcheck.machine.arguments import packed
from warpcheck.machine.chips import CHIPS
from warpcheck.machine.ptx import entries
from warpcheck.orders import Snapshot, run_in
from warpcheck.report import Report
from warpcheck.timing.chips import ChipTable
from warpcheck.timing.parts import part_of
from warpcheck.timing.report import Timing

Extent = int | Sequence[int]


class Emulated:
    """An emulated chip.

    launches: one LaunchReport per kernel run so far, in order.
    roles: warp index within its CTA -> name, shown in errors, reports and traces, for kernels that bring no names of
        their own (`warpcheck.libraries`); set it before a launch. A function of the kernel's entry name where
        several kernels run.
    """

    def __init__(self, chip: str, **options: Any) -> None:
        """
        Args:
            chip: "sm_80", "sm_90a", "sm_100a", ...
            options: fields of `warpcheck.EmulationOptions`: seed, seeds, schedule, sms, checks, on_finding, ...

        Raises:
            ValueError: an unknown chip, or options that do not exist.
        """
        self.options = EmulationOptions(**options)
        self.machine = Machine(chip, self.options)
        self.launches: list[LaunchReport] = []
        self.roles: Mapping[int, str] | Callable[[str], Mapping[int, str]] = {}
        self._others: list[Machine] = []
        self._found: list[Finding] = []
        self._outputs: list[Output] = []
        self.repeat(interleavings(self.options.seed + 1, self.options.seeds - 1))

    def repeat(self, orders: Iterable[Order]) -> None:
        """Repeat every later launch from the same memory in each of `orders`.

        The results, and the reports in `launches`, are those of the first run. Findings of the repetitions are raised
        or collected, too.
        """
        self._others = [self.machine.in_order(order) for order in orders]

    @property
    def findings(self) -> Findings:
        """Findings of all launches so far with `on_finding="collect"`, each once."""
        return Findings.merged(self._found)

    def take_findings(self) -> Findings:
        """Return `findings`, and clear them and the reports of the launches."""
        found, self._found = Findings.merged(self._found), []
        self.launches.clear()
        return found

    def report(self) -> Report:
        """Instructions by opcode and role, bytes by path, MMA FLOPs and waits of every launch so far."""
        return Report(tuple(self.launches))

    def timing(
        self, *, timeline: bool = False, table: ChipTable | None = None, clock: float | None = None,
        watts: float | None = None,
    ) -> Timing:  # fmt: skip
        """Return the predicted time of every launch so far, on the SMs of this chip.

        timeline: keep the intervals of each unit, for `warpcheck.timing.timeline.write`. table: of
        `warpcheck.timing.chips` [default: the chip's]. clock: GHz [default: the table's]. watts: power limit, from
        which the clock follows instead.

        Raises:
            ValueError: nothing was recorded (`timing=True` records), or the clock has no table of the chip.
        """
        records = [launch.record for launch in self.launches]
        return Timing.of(records, timeline=timeline, sms=self.options.sms, table=table, clock=clock, watts=watts)

    def allocations(self) -> list[Allocation]:
        """Memory that every kernel may access, in addition to its own arguments."""
        return []

    def launch(
        self,
        ptx: str,
        entry: str | None = None,
        *,
        grid: Extent,
        block: Extent | None = None,
        args: Sequence[Any] = (),
        cluster: Extent | None = None,
        smem_bytes: int = 0,
        cooperative: bool = False,
        outputs: Iterable[int] = (),
    ) -> LaunchReport:
        """Run one grid of a PTX text to its end.

        Args:
            ptx: the text of a module.
            entry: name of the kernel, or a part of it that no other entry has [default: the only one].
            grid: CTAs, up to three extents.
            block: threads, up to three extents [default: the entry's `.reqntid`].
            args: one per parameter. NumPy arrays and torch tensors on the CPU are global memory, written in place;
                numbers become the parameter's type; bytes are passed as they are (structures, tensor maps).
            cluster: CTAs of a cluster [default: the entry's `.reqnctapercluster`, or 1].
            smem_bytes: dynamic shared memory per CTA.
            cooperative: a cooperative launch: all CTAs are resident, or it is refused.
            outputs: positions in `args` of arrays that the launch must write wholly, as in `must_write`.

        Raises:
            ValueError, TypeError: an entry that is not there, or arguments that do not fit its parameters.
            EmulationError: an error of the kernel, if findings are raised.
        """
        name = entry_named(ptx, entry)
        kernel = kernel_of(ptx, name)
        block = block or kernel.directives.get("reqntid")
        if block is None:
            raise ValueError(f"block is missing, and {name} has no .reqntid")
        if cluster is None:
            cluster = kernel.directives.get("reqnctapercluster", (1,))
        params, memory = packed(kernel.params, args)
        launch = Launch(
            ptx, name, params, _extent("grid", grid), _extent("block", block), _extent("cluster", cluster), smem_bytes,
            cooperative=cooperative,
        )  # fmt: skip
        with self.must_write(**{f"argument {index}": args[index] for index in outputs}), _nothing_collected():
            self._run(launch, [*memory, *self.allocations()])
        return self.launches[-1]

    @contextlib.contextmanager
    def must_write(self, **tensors: Any) -> Iterator[None]:
        """The launches inside must together write every element of these arrays or tensors, in every order.

            with gpu.must_write(out=out, lse=lse): ...

        Raises:
            TypeError, ValueError: no tensor, negative strides, or an emulation that does not check races.
            UnwrittenOutput: elements that nobody wrote, if findings are raised.
        """
        if tensors and not self.options.checks.races:
            raise ValueError("must_write needs Checks(races=True), which records the writes")
        outputs = [Output.of(name, tensor) for name, tensor in tensors.items()]
        self._outputs += outputs
        try:
            yield
        finally:
            self._outputs = [output for output in self._outputs if not any(output is mine for mine in outputs)]
        for output in outputs:
            for machine in (self.machine, *self._others):
                self._check_written(output, machine)

    def _check_written(self, output: Output, machine: Machine) -> None:
        kind, options = KINDS["unwritten"], machine.options
        message = output.missing(machine)
        order = (options.seed, options.schedule)
        ended = any(found.kind in FINAL and (found.seed, found.schedule) == order for found in self._found)
        if not message or ended or kind.name in options.checks.off:
            return
        kernel = self.launches[-1].entry if self.launches else ""
        finding = Finding(
            kind.name, kind.severity, message, repair=kind.repair, kernel=kernel, chip=machine.chip, seed=options.seed,
            schedule=options.schedule,
        )  # fmt: skip
        if options.on_finding == "raise":
            raise finding.error
        self._found.append(finding)

    def run(self, launch: Launch) -> None:
        """Run an intercepted launch to its end. Raises EmulationError for an error of the kernel."""
        with _nothing_collected():
            self._run(launch, self.allocations())

    def _run(self, launch: Launch, allocations: list[Allocation]) -> None:
        allocations = merge(allocations)
        run = partial(self._run_on, launch, allocations)
        snapshot = Snapshot([*allocations, *variables_of(launch.ptx, launch.entry)]) if self._others else None
        report = run(self.machine, budget=Budget())
        self._found += report.findings
        self.launches.append(report)
        if snapshot is None:
            return
        ended_early = any(finding.kind in FINAL for finding in report.findings)
        later = Budget() if ended_early else Budget.after(report.warp_instructions, report.seconds)
        differs, differences = [], []
        with run_in(self._others, snapshot, partial(run, budget=later)) as results:
            for machine, (other, where) in zip(self._others, results):
                self._found += other.findings
                if where:
                    differs.append((machine.options.seed, machine.options.schedule))
                    differences.append(where)
        self.launches[-1] = replace(report, differs=tuple(differs), differences=tuple(differences))

    def _run_on(
        self, launch: Launch, allocations: list[Allocation], machine: Machine, placed: Mapping[int, int] | None = None,
        stopped: threading.Event | None = None, *, budget: Budget,
    ) -> LaunchReport:  # fmt: skip
        options = machine.options
        part = None
        if options.sample is not None:
            part = part_of(launch, machine.chip, options.sms, options.sample, allocations)
        return machine.launch(
            launch.ptx,
            launch.entry,
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            smem_bytes=launch.smem_bytes,
            params=launch.params,
            allocations=allocations,
            roles=self.roles(launch.entry) if callable(self.roles) else self.roles,
            programmatic=launch.programmatic,
            cooperative=launch.cooperative,
            budget=budget,
            outputs=self._outputs,
            part=part,
            placed=placed,
            stopped=stopped,
        )


def entry_named(ptx: str, entry: str | None) -> str:
    """Return the full name of an entry of a PTX text. Raises ValueError unless exactly one matches."""
    names = entries(ptx)
    fitting = [entry] if entry in names else [name for name in names if (entry or "") in name]
    if len(fitting) == 1:
        return str(fitting[0])
    raise ValueError(f"entry is {entry!r}, expected one of {', '.join(names) or 'none: the PTX has no entry'}")


def chip_of(ptx: str) -> str:
    """Return the chip for the target of a PTX text. Raises ValueError if the emulator has none."""
    match = re.search(r"^\s*\.target\s+(\w+)", ptx, re.M)
    target = match[1] if match else "nothing"
    for chip in (target, f"{target}a", f"{target[:-1]}a"):  # sm_90 and sm_100f run on sm_90a, sm_100a
        if chip in CHIPS:
            return chip
    raise ValueError(f"the PTX is for {target}, expected one of {', '.join(CHIPS)}")


def merge(allocations: Iterable[Allocation]) -> list[Allocation]:
    """Return the allocations sorted by address, without those inside another allocation."""
    merged: list[Allocation] = []
    for allocation in sorted(allocations, key=lambda a: (a.base, -a.nbytes)):
        if merged and allocation.base + allocation.nbytes <= merged[-1].base + merged[-1].nbytes:
            continue
        merged.append(allocation)
    return merged


def _extent(name: str, extent: Extent) -> tuple[int, int, int]:
    extents = (extent,) if isinstance(extent, int) else tuple(int(x) for x in extent)
    if not 1 <= len(extents) <= 3 or min(extents) < 1:
        raise ValueError(f"{name} is {extent!r}, expected one to three numbers from 1 on")
    return three(extents)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable garbage collection: it could free memory that a running kernel uses."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
