"""`emulate`: run CuTe DSL kernels, and everything around them, on an emulated chip."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from fa4.device import chip_by_number, emulating
from fa4.emulator.findings import Finding, Findings
from fa4.emulator.host import caches, driver, dsl, torch_cuda
from fa4.emulator.host.launch import Launch, Runtime
from fa4.emulator.host.memory import Arrays, merge, torch_allocations
from fa4.emulator.host.modules import Modules
from fa4.emulator.machine import Allocation, Checks, LaunchReport, Machine, Order, interleavings
from fa4.emulator.machine.chips import chip_facts
from fa4.emulator.report import Report

_MODULES = Modules()  # of the process, like the handles of a driver


class Gpu:
    """An emulated chip in use; what `emulate` yields.

    launches: one LaunchReport per kernel run so far, in order.
    roles: warp index within its CTA -> name, shown in errors, reports and traces, for kernels that bring no names of
        their own (`fa4.pipeline.kernel.describe`); set it before a launch. A function of the kernel's entry name where
        several kernels run.
    """

    def __init__(self, machine: Machine, sms: int, arrays: Arrays) -> None:
        self.machine = machine
        self.launches: list[LaunchReport] = []
        self.roles: Mapping[int, str] | Callable[[str], Mapping[int, str]] = {}
        self.chip_number = machine.facts.number
        self.runtime = Runtime(machine.facts, sms, _MODULES, self.run)
        self._arrays = arrays
        self._others: list[Machine] = []
        self._found: list[Finding] = []

    def repeat(self, orders: Iterable[Order]) -> None:
        """From now on run every launch again, from the same memory, in each of `orders`. The results, and the reports
        in `launches`, are those of the first run; what is found in the others is raised or noted likewise."""
        self._others = [self.machine.in_order(order) for order in orders]

    @property
    def findings(self) -> Findings:
        """What `on_finding="collect"` noted in every launch so far, the same thing once."""
        return Findings.merged(self._found)

    def take_findings(self) -> Findings:
        """`findings`, which are forgotten then, as are the reports of the launches."""
        found, self._found = Findings.merged(self._found), []
        self.launches.clear()
        return found

    def report(self) -> Report:
        """Instructions by opcode and role, bytes by path, MMA FLOPs and waits of every launch so far."""
        return Report(tuple(self.launches))

    def allocations(self) -> list[Allocation]:
        """The host memory that a kernel launched now may touch."""
        return merge([*torch_allocations(), *self._arrays.allocations(), *self.runtime.heap.allocations()])

    def run(self, launch: Launch) -> None:
        """Run a caught launch to its end. Raises EmulationError for what the kernel does wrong."""
        with _nothing_collected():
            self._run(launch, self.allocations())

    def _run(self, launch: Launch, allocations: list[Allocation]) -> None:
        before = _contents(allocations) if self._others else []
        self.launches.append(self._run_on(self.machine, launch, allocations))
        if not self._others:
            return
        after = _contents(allocations)
        differs = []
        try:
            for machine in self._others:
                _restore(allocations, before)
                self._run_on(machine, launch, allocations)
                if _contents(allocations) != after:
                    differs.append((machine.seed, machine.schedule))
        finally:
            _restore(allocations, after)
        self.launches[-1] = replace(self.launches[-1], differs=tuple(differs))

    def _run_on(self, machine: Machine, launch: Launch, allocations: list[Allocation]) -> LaunchReport:
        report = machine.launch(
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
        )
        self._found += report.findings
        return report


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """What is garbage, but was found to be memory of a kernel, stays until the kernel has ended."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _contents(allocations: Iterable[Allocation]) -> list[bytes]:
    return [ctypes.string_at(allocation.base, allocation.nbytes) for allocation in allocations]


def _restore(allocations: Iterable[Allocation], contents: Iterable[bytes]) -> None:
    for allocation, content in zip(allocations, contents):
        ctypes.memmove(allocation.base, content, allocation.nbytes)


@contextlib.contextmanager
def emulate(
    chip: str,
    *,
    sms: int = 4,
    seed: int = 0,
    schedule: str = "round_robin",
    checks: Checks | None = None,
    trace: bool = False,
    timing: bool = False,
    on_finding: str = "raise",
    seeds: int = 1,
    tells_devices_apart: bool = False,
) -> Iterator[Gpu]:
    """CPU tensors live on an emulated chip inside this context.

    `cute.compile` targets the chip, compiled functions run on it, `device="cuda"` means host memory, and fa4's own
    functions dispatch CPU tensors to the chip's backend. Kernels must be compiled inside the context.

    Args:
        chip: "sm_80", "sm_90a", "sm_100a", ...
        sms: multiprocessors; grids larger than the chip run in waves.
        seed: decides every choice that the hardware leaves open; the same seed gives the same trace, bit for bit.
        schedule: "round_robin", "random" or "adversarial" (starves one role, or lets one run far ahead).
        checks: which checks are on; default all.
        on_finding: "raise" the first error, or "collect" all in `gpu.findings` and go on with the values that the
            machine has.
        seeds: in how many orders every launch is run, from the same memory: `seed` and the ones after it, each with
            the next schedule. The results are those of the first.
        tells_devices_apart: for host code that asks tensors where they are: `tensor.device` is "cuda:0", but for what
            was made or moved to the host, as on a machine with a GPU; torch.compile compiles nothing, operators for
            CUDA only run, and packages keep no kernels on disk. Otherwise the device stays "cpu", and every CPU
            tensor counts as the chip's (`is_cuda`).
        trace: record events for `fa4.emulator.trace.write`.
        timing: record what a clock needs, so that `gpu.timing()` says how long the launches would take on the chip.

    Raises:
        ValueError: an unknown chip or schedule.
        EmulationError: from the call that ran a kernel which did something wrong.
    """
    chip_facts(chip)  # an unknown chip raises before anything is installed
    if sms < 1:
        raise ValueError(f"sms is {sms}, expected at least 1")
    machine = Machine(
        chip, sms=sms, seed=seed, schedule=schedule, checks=checks, trace=trace, timing=timing, on_finding=on_finding
    )
    arrays = Arrays()
    gpu = Gpu(machine, sms, arrays)
    gpu.repeat(interleavings(seed + 1, seeds - 1))
    with contextlib.ExitStack() as stack:
        stack.enter_context(emulating(chip_by_number(gpu.chip_number, sms=sms, emulated=True)))
        stack.enter_context(torch_cuda.installed(gpu.runtime, tells_devices_apart))
        stack.enter_context(driver.installed(gpu.runtime))
        stack.enter_context(dsl.installed(gpu.runtime, arrays, chip))
        if tells_devices_apart:
            stack.enter_context(caches.bypassed())
        yield gpu
