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
from warpcheck.machine import Allocation

_MODULES = Modules()  # of the process, like the handles of a driver


class Gpu(Emulated):
    """An emulated chip behind torch and CuTe DSL; what `emulate` yields."""

    def __init__(self, chip: str, arrays: Arrays, **options: Any) -> None:
        super().__init__(chip, **options)
        self.chip_number = self.machine.facts.number
        self.runtime = Runtime(self.machine.facts, self.options.sms, _MODULES, self.run)
        self._arrays = arrays

    def allocations(self) -> list[Allocation]:
        """The host memory that a kernel launched now may touch."""
        return merge([*torch_allocations(), *self._arrays.allocations(), *self.runtime.heap.allocations()])


def _is_there(package: str, module: str = "") -> bool:
    """Is it installed? Triton's kernels need neither CuTe DSL nor the driver's bindings."""
    return find_spec(package) is not None and (not module or find_spec(f"{package}.{module}") is not None)


@contextlib.contextmanager
def emulate(chip: str, *, tells_devices_apart: bool = False, **options: Any) -> Iterator[Gpu]:
    """CPU tensors live on an emulated chip inside this context.

    `cute.compile` targets the chip, compiled functions run on it, `device="cuda"` means host memory, and
    libraries that take part (`warpcheck.libraries`) dispatch CPU tensors to the chip. Kernels must be compiled inside
    the context.

    Args:
        chip: "sm_80", "sm_90a", "sm_100a", ...
        tells_devices_apart: for host code that asks where a tensor is. `tensor.device` is "cuda:0", except for tensors
            that were made on the host or moved there, as on a machine with a GPU; torch.compile compiles nothing,
            operators for CUDA only run, and packages keep no kernels on disk. Otherwise the device stays "cpu", and
            every CPU tensor counts as the chip's (`is_cuda`).
        options: fields of `warpcheck.EmulationOptions`:

            with emulate("sm_100a", seed=7, schedule="random", on_finding="collect") as gpu: ...

    Raises:
        ValueError: an unknown chip, or options that do not exist.
        EmulationError: from the call that ran a kernel with an error.
    """
    arrays = Arrays()
    gpu = Gpu(chip, arrays, **options)
    with contextlib.ExitStack() as stack:
        sampled = gpu.options.sample is not None
        stack.enter_context(libraries.emulating(gpu.machine.facts, gpu.options.sms, sampled=sampled))
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
