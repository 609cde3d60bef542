"""`emulate`: run CuTe DSL kernels, and everything around them, on an emulated chip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from fa4.device import chip_by_number, emulating
from fa4.emulator.findings import Findings
from fa4.emulator.host import driver, dsl, torch_cuda
from fa4.emulator.host.launch import Launch, Runtime
from fa4.emulator.host.memory import Arrays, merge, torch_allocations
from fa4.emulator.host.modules import Modules
from fa4.emulator.machine import Allocation, Checks, LaunchReport, Machine
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

    @property
    def findings(self) -> Findings:
        """What `on_finding="collect"` noted in every launch so far, the same thing once."""
        return Findings.merged(finding for launch in self.launches for finding in launch.findings)

    def report(self) -> Report:
        """Instructions by opcode and role, bytes by path, MMA FLOPs and waits of every launch so far."""
        return Report(tuple(self.launches))

    def allocations(self) -> list[Allocation]:
        """The host memory that a kernel launched now may touch."""
        return merge([*torch_allocations(), *self._arrays.allocations(), *self.runtime.heap.allocations()])

    def run(self, launch: Launch) -> None:
        """Run a caught launch to its end. Raises EmulationError for what the kernel does wrong."""
        self.launches.append(
            self.machine.launch(
                launch.ptx,
                launch.entry,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.cluster,
                smem_bytes=launch.smem_bytes,
                params=launch.params,
                allocations=self.allocations(),
                roles=self.roles(launch.entry) if callable(self.roles) else self.roles,
                programmatic=launch.programmatic,
            )
        )


@contextlib.contextmanager
def emulate(
    chip: str,
    *,
    sms: int = 4,
    seed: int = 0,
    schedule: str = "round_robin",
    checks: Checks | None = None,
    trace: bool = False,
    on_finding: str = "raise",
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
        trace: record events for `fa4.emulator.trace.write`.

    Raises:
        ValueError: an unknown chip or schedule.
        EmulationError: from the call that ran a kernel which did something wrong.
    """
    chip_facts(chip)  # an unknown chip raises before anything is installed
    if sms < 1:
        raise ValueError(f"sms is {sms}, expected at least 1")
    machine = Machine(chip, sms=sms, seed=seed, schedule=schedule, checks=checks, trace=trace, on_finding=on_finding)
    arrays = Arrays()
    gpu = Gpu(machine, sms, arrays)
    with contextlib.ExitStack() as stack:
        stack.enter_context(emulating(chip_by_number(gpu.chip_number, sms=sms, emulated=True)))
        stack.enter_context(torch_cuda.installed(gpu.runtime))
        stack.enter_context(driver.installed(gpu.runtime))
        stack.enter_context(dsl.installed(gpu.runtime, arrays, chip))
        yield gpu
