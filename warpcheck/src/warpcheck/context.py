"""`emulate`: run CuTe DSL kernels, and everything around them, on an emulated chip."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from warpcheck import libraries
from warpcheck.emulated import Emulated, merge
from warpcheck.host import caches, torch_cuda, triton_jit
from warpcheck.host.launch import Runtime
from warpcheck.host.memory import Arrays, torch_allocations
from warpcheck.host.modules import Modules
from warpcheck.machine import Allocation, Checks

_MODULES = Modules()  # of the process, like the handles of a driver


class Gpu(Emulated):
    """An emulated chip behind torch and CuTe DSL; what `emulate` yields."""

    def __init__(self, chip: str, arrays: Arrays, **options: Any) -> None:
        super().__init__(chip, **options)
        self.chip_number = self.machine.facts.number
        self.runtime = Runtime(self.machine.facts, self.machine.sms, _MODULES, self.run)
        self._arrays = arrays

    def allocations(self) -> list[Allocation]:
        """The host memory that a kernel launched now may touch."""
        return merge([*torch_allocations(), *self._arrays.allocations(), *self.runtime.heap.allocations()])


def _is_there(package: str, module: str = "") -> bool:
    """Is it installed? Triton's kernels need neither CuTe DSL nor the driver's bindings."""
    return find_spec(package) is not None and (not module or find_spec(f"{package}.{module}") is not None)


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
    resident: int | None = None,
    tells_devices_apart: bool = False,
) -> Iterator[Gpu]:
    """CPU tensors live on an emulated chip inside this context.

    `cute.compile` targets the chip, compiled functions run on it, `device="cuda"` means host memory, and
    libraries that take part (`warpcheck.libraries`) dispatch CPU tensors to the chip. Kernels must be compiled inside
    the context.

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
        resident: how many clusters (CTAs, where there are none) run at a time, lowest index first; 0: as many as fit.
            Cooperative launches are resident as a whole. [default: 1, which is all that a launch guarantees, in orders
            with an odd seed, as many as fit in the others]
        tells_devices_apart: for host code that asks tensors where they are: `tensor.device` is "cuda:0", but for what
            was made or moved to the host, as on a machine with a GPU; torch.compile compiles nothing, operators for
            CUDA only run, and packages keep no kernels on disk. Otherwise the device stays "cpu", and every CPU
            tensor counts as the chip's (`is_cuda`).
        trace: record events for `warpcheck.trace.write`.
        timing: record what a clock needs, so that `gpu.timing()` says how long the launches would take on the chip.

    Raises:
        ValueError: an unknown chip or schedule.
        EmulationError: from the call that ran a kernel which did something wrong.
    """
    arrays = Arrays()
    gpu = Gpu(
        chip, arrays, sms=sms, seed=seed, schedule=schedule, checks=checks, trace=trace, timing=timing,
        on_finding=on_finding, seeds=seeds, resident=resident,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(libraries.emulating(gpu.machine.facts, sms))
        stack.enter_context(torch_cuda.installed(gpu.runtime, tells_devices_apart))
        if _is_there("cuda", "bindings"):
            from warpcheck.host import driver

            stack.enter_context(driver.installed(gpu.runtime))
        if _is_there("cutlass"):
            from warpcheck.host import dsl

            stack.enter_context(dsl.installed(gpu.runtime, arrays, chip))
        stack.enter_context(triton_jit.installed(gpu.runtime))
        if tells_devices_apart:
            stack.enter_context(caches.bypassed(libraries.own_caches()))
        yield gpu
