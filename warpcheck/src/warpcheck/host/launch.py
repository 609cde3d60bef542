"""CUDA runtime for compiled host functions: libraries, kernels, launches and memory, without a GPU.

`Runtime.dispatch` serves the symbols of intercept.c. Each method is one symbol and stores its results through the
pointers among its arguments, as the C function does.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from warpcheck.errors import EmulationError
from warpcheck.host.attributes import device_attribute, resident_blocks
from warpcheck.host.memory import Heap
from warpcheck.host.modules import Kernel, Modules, fatbin_size
from warpcheck.host.tensor_map import encode_tiled
from warpcheck.machine import Launch
from warpcheck.machine.chips import ChipFacts

_SUCCESS, _LAUNCH_FAILURE = 0, 719
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 2, 4, 6  # cudaLaunchAttributeID
_KERNEL_ATTRIBUTES = {0: 1024, 1: 0, 2: 0, 3: 0, 4: 32, 5: 90, 6: 90}  # CUfunction_attribute -> value


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("words", ctypes.c_uint32 * 16))


class Runtime:
    """CUDA runtime calls of host code on one emulated chip.

    run: called with every `Launch`, in stream order (all streams are one: each launch ends before the next begins).
    """

    def __init__(self, facts: ChipFacts, sms: int, modules: Modules, run: Callable[[Launch], None]) -> None:
        self.facts = facts
        self.sms = sms
        self.modules = modules
        self.run = run
        self.heap = Heap()
        self.failure: BaseException | None = None
        self._captured: list[Callable[[], object]] | None = None
        self._last_handle = 0

    def dispatch(self, symbol: bytes, args: Sequence[int]) -> int:
        """Execute a call from intercept.c. An exception is stored in `failure` and becomes an error code."""
        name = symbol.decode()
        try:
            getattr(self, name.removeprefix("_"))(args)
        except BaseException as error:  # ctypes callbacks cannot raise; dsl.py raises it in the caller
            self.failure = error
            return _LAUNCH_FAILURE
        return _SUCCESS

    def take_failure(self) -> BaseException | None:
        failure, self.failure = self.failure, None
        return failure

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Callable[[], object]]]:
        """Collect stream work in the yielded list instead of executing it (a CUDA graph)."""
        before, self._captured = self._captured, []
        try:
            yield self._captured
        finally:
            self._captured = before

    def _submit(self, work: Callable[[], object]) -> None:
        if self._captured is None:
            work()
        else:
            self._captured.append(work)

    # devices

    def cuDeviceGet(self, args: Sequence[int]) -> None:
        _store32(args[0], args[1])

    def cudaGetDevice(self, args: Sequence[int]) -> None:
        _store32(args[0], 0)

    def cudaGetDeviceCount(self, args: Sequence[int]) -> None:
        _store32(args[0], 1)

    def cudaSetDevice(self, args: Sequence[int]) -> None:
        if args[0] != 0:
            raise ValueError(f"cudaSetDevice({args[0]}): the emulator has one device, 0")

    def cudaDeviceGetAttribute(self, args: Sequence[int]) -> None:
        _store32(args[0], device_attribute(self.facts, self.sms, args[1]))

    def cudaDeviceSynchronize(self, args: Sequence[int]) -> None:
        pass

    # libraries and kernels

    def cudaLibraryLoadData(self, args: Sequence[int]) -> None:
        size = fatbin_size(ctypes.string_at(args[1], 16))
        _store64(args[0], self.modules.load(ctypes.string_at(args[1], size)))

    def cudaLibraryUnload(self, args: Sequence[int]) -> None:
        self.modules.unload(args[0])

    def cudaLibraryGetKernel(self, args: Sequence[int]) -> None:
        _store64(args[0], self.modules.kernel_handle(args[1], ctypes.string_at(args[2]).decode()))

    def cudaLibraryGetKernelCount(self, args: Sequence[int]) -> None:
        _store32(args[0], len(self.modules.entries(args[1])))

    def cuKernelGetAttribute(self, args: Sequence[int]) -> None:
        _store32(args[0], _KERNEL_ATTRIBUTES.get(args[1], 0))

    def cudaFuncSetAttribute(self, args: Sequence[int]) -> None:
        pass

    def cudaKernelSetAttributeForDevice(self, args: Sequence[int]) -> None:
        pass

    def cudaOccupancyMaxActiveBlocksPerMultiprocessor(self, args: Sequence[int]) -> None:
        _store32(args[0], resident_blocks(self.facts, args[2], args[3]))

    # launches

    def cuTensorMapEncodeTiled(self, args: Sequence[int]) -> None:
        encode_tiled(args)

    def cudaLaunchKernelEx(self, args: Sequence[int]) -> None:
        config = _LaunchConfig.from_address(args[0])
        cluster, programmatic, cooperative = (1, 1, 1), False, False
        for index in range(config.attribute_count):
            attribute = _LaunchAttribute.from_address(config.attributes + index * ctypes.sizeof(_LaunchAttribute))
            if attribute.id == _CLUSTER_DIMENSION:
                cluster = tuple(attribute.words[:3])
            elif attribute.id == _PROGRAMMATIC_SERIALIZATION:
                programmatic = bool(attribute.words[0])
            elif attribute.id == _COOPERATIVE:
                cooperative = bool(attribute.words[0])
        self._launch(
            self.modules.kernel(args[1]), args[2], tuple(config.grid), tuple(config.block), cluster,
            config.smem_bytes, programmatic, cooperative,
        )  # fmt: skip

    def cudaLaunchKernel(self, args: Sequence[int]) -> None:
        self._launch(self.modules.kernel(args[0]), args[7], tuple(args[1:4]), tuple(args[4:7]), (1, 1, 1), args[8])

    def _launch(self, kernel: Kernel, params: int, *shape: Any) -> None:
        self.launch(Launch(kernel.ptx, kernel.entry, _read_parameters(kernel, params), *shape))

    def launch(self, launch: Launch) -> None:
        """Run a kernel, in stream order. Raises EmulationError, also for PTX of another chip."""
        self._check_target(launch.ptx)
        self._submit(lambda: self.run(launch))

    def _check_target(self, ptx: str) -> None:
        match = re.search(r"^\.target\s+sm_(\d+)(\w?)", ptx, re.MULTILINE)
        if match is None:
            raise EmulationError("the PTX has no .target directive")
        number, suffix = int(match.group(1)), match.group(2)
        chip = self.facts.number
        family = suffix == "f" and number // 10 == chip // 10 and number <= chip
        if not (number == chip or family or (not suffix and number <= chip)):
            target = f"sm_{number}{suffix}"
            raise EmulationError(f"a kernel compiled for {target} cannot run on the emulated {self.facts.target}")

    # memory

    def cudaMalloc(self, args: Sequence[int]) -> None:
        _store64(args[0], self.heap.allocate(args[1]))

    cudaMallocAsync = cudaMallocHost = cudaMallocManaged = cudaMalloc

    def cudaFree(self, args: Sequence[int]) -> None:
        self.heap.free(args[0])

    cudaFreeAsync = cudaFreeHost = cudaFree

    def cudaMemcpy(self, args: Sequence[int]) -> None:
        to, source, nbytes = args[:3]
        self._submit(lambda: ctypes.memmove(to, source, nbytes))

    cudaMemcpyAsync = cudaMemcpy

    def cudaMemset(self, args: Sequence[int]) -> None:
        address, value, nbytes = args[:3]
        self._submit(lambda: ctypes.memset(address, value & 0xFF, nbytes))

    cudaMemsetAsync = cudaMemset

    # streams and events

    def cudaStreamCreate(self, args: Sequence[int]) -> None:
        self._last_handle += 0x10
        _store64(args[0], self._last_handle)

    cudaEventCreate = cudaStreamCreate

    def cudaStreamDestroy(self, args: Sequence[int]) -> None:
        pass

    cudaStreamSynchronize = cudaStreamWaitEvent = cudaEventDestroy = cudaEventRecord = cudaStreamDestroy

    def cudaEventElapsedTime(self, args: Sequence[int]) -> None:
        ctypes.c_float.from_address(args[0]).value = 1.0  # emulated kernels have no duration


def _read_parameters(kernel: Kernel, pointers: int) -> tuple[bytes, ...]:
    sizes = kernel.parameter_bytes
    table = (ctypes.c_uint64 * len(sizes)).from_address(pointers) if sizes else ()
    return tuple(ctypes.string_at(pointer, size) for pointer, size in zip(table, sizes))


def _store32(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value


def _store64(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value
