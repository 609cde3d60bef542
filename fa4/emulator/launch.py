"""The CUDA runtime under a compiled host function: libraries, kernels, launches and memory, without a GPU.

`Runtime.dispatch` answers the symbols of intercept.c. A library is known by its binary: `Runtime.modules` maps
the digest of the binary that the compiler embedded to the PTX it was made from.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fa4.emulator.chips import ChipFacts, device_attribute
from fa4.emulator.errors import EmulationError
from fa4.emulator.memory import Heap

_FATBIN_MAGIC = 0xBA55ED50
FATBIN_PREFIX = struct.pack("<I", _FATBIN_MAGIC)

_UNKNOWN_BINARY = "a kernel was loaded whose PTX the emulator has not seen: compile it inside `with emulate(...)`"
_SUCCESS, _LAUNCH_FAILURE = 0, 719
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 2, 4, 6  # cudaLaunchAttributeID
_KERNEL_ATTRIBUTES = {0: 1024, 1: 0, 2: 0, 3: 0, 4: 32, 5: 90, 6: 90}  # CUfunction_attribute -> value
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)\s+(?:\.ptr\s+(?:\.[a-z]+\s+)*(?:\.align\s+\d+\s+)?)?"
    r"[\w$]+(?:\[(\d+)\])?"
)


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


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the host code asked for it; `params` holds each parameter's bytes."""

    ptx: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: tuple[bytes, ...]
    cooperative: bool = False
    programmatic: bool = False


@dataclass
class _Library:
    ptx: str
    kernels: dict[str, int] = field(default_factory=dict)


def fatbin_digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def fatbin_at(buffer: bytes, start: int = 0) -> bytes:
    """The whole fat binary that starts at `start`: a 16-byte header that ends in the size of the rest."""
    magic, _, header, size = struct.unpack_from("<IHHQ", buffer, start)
    if magic != _FATBIN_MAGIC:
        raise ValueError(f"no CUDA fat binary at offset {start}: magic is {magic:#x}")
    return bytes(buffer[start : start + header + size])


def parameter_sizes(ptx: str, entry: str) -> list[int]:
    """Bytes of each parameter of a PTX entry, in order."""
    match = re.search(rf"\.entry\s+{re.escape(entry)}\s*(?:\((.*?)\))?\s*[.{{]", ptx, re.DOTALL)
    if match is None:
        raise KeyError(f"PTX has no entry {entry}")
    sizes = []
    for bits, count in _PARAMETER.findall(match.group(1) or ""):
        sizes.append(int(bits) // 8 * int(count or 1))
    return sizes


class Runtime:
    """Answers the CUDA runtime calls of host code for one emulated chip.

    run: called with every `Launch`, in stream order (all streams are one: each launch ends before the next begins).
    """

    def __init__(self, facts: ChipFacts, sms: int, run: Callable[[Launch], None]) -> None:
        self.facts = facts
        self.sms = sms
        self.run = run
        self.heap = Heap()
        self.modules: dict[str, str] = {}
        self._binaries: list[tuple[bytes, str]] = []
        self.failure: BaseException | None = None
        self._captured: list[Callable[[], None]] | None = None
        self._libraries: dict[int, _Library] = {}
        self._kernels: dict[int, tuple[_Library, str]] = {}
        self._next_handle = 0x1000

    def register(self, binary: bytes, ptx: str) -> None:
        """Remember which PTX a compiled fat binary came from."""
        self.modules[fatbin_digest(binary)] = ptx
        self._binaries.append((binary, ptx))

    def ptx_containing(self, cubin: bytes) -> str:
        """The PTX of the fat binary that embeds `cubin`."""
        for binary, ptx in self._binaries:
            if cubin in binary:
                return ptx
        raise EmulationError(_UNKNOWN_BINARY)

    def load(self, ptx: str) -> int:
        """A handle of a new library. Raises EmulationError when the chip cannot run this PTX."""
        self._check_target(ptx)
        handle = self._handle()
        self._libraries[handle] = _Library(ptx)
        return handle

    def library_ptx(self, library: int) -> str:
        return self._libraries[library].ptx

    def kernel(self, library: int, name: str) -> int:
        """A handle of the named entry of a loaded library."""
        loaded = self._libraries[library]
        if not re.search(rf"\.entry\s+{re.escape(name)}\b", loaded.ptx):
            raise EmulationError(f"the loaded PTX has no entry {name}")
        if name not in loaded.kernels:
            loaded.kernels[name] = self._handle()
            self._kernels[loaded.kernels[name]] = (loaded, name)
        return loaded.kernels[name]

    def dispatch(self, symbol: bytes, args: Sequence[int]) -> int:
        """One call from intercept.c. An exception is kept in `failure` and becomes an error code."""
        name = symbol.decode()
        try:
            getattr(self, name.removeprefix("_"))(args)
        except BaseException as error:  # ctypes callbacks cannot raise; the host's caller does (see dsl.py)
            self.failure = error
            return _LAUNCH_FAILURE
        return _SUCCESS

    def take_failure(self) -> BaseException | None:
        failure, self.failure = self.failure, None
        return failure

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Callable[[], None]]]:
        """Inside, stream work is collected in the yielded list instead of being done (a CUDA graph)."""
        before, self._captured = self._captured, []
        try:
            yield self._captured
        finally:
            self._captured = before

    def _submit(self, work: Callable[[], None]) -> None:
        if self._captured is None:
            work()
        else:
            self._captured.append(work)

    def _handle(self) -> int:
        self._next_handle += 0x10
        return self._next_handle

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
        header = ctypes.string_at(args[1], 16)
        _, _, header_size, size = struct.unpack("<IHHQ", header)
        ptx = self.modules.get(fatbin_digest(ctypes.string_at(args[1], header_size + size)))
        if ptx is None:
            raise EmulationError(_UNKNOWN_BINARY)
        _store64(args[0], self.load(ptx))

    def _check_target(self, ptx: str) -> None:
        match = re.search(r"^\.target\s+sm_(\d+)(\w?)", ptx, re.MULTILINE)
        if match is None:
            raise EmulationError("PTX has no .target directive")
        number, suffix = int(match.group(1)), match.group(2)
        chip = 10 * self.facts.capability[0] + self.facts.capability[1]
        family = suffix == "f" and number // 10 == chip // 10 and number <= chip
        if not (number == chip or family or (not suffix and number <= chip)):
            target = f"sm_{number}{suffix}"
            raise EmulationError(f"a kernel compiled for {target} cannot run on the emulated {self.facts.name}")

    def cudaLibraryUnload(self, args: Sequence[int]) -> None:
        self._libraries.pop(args[0], None)

    def cudaLibraryGetKernel(self, args: Sequence[int]) -> None:
        _store64(args[0], self.kernel(args[1], ctypes.string_at(args[2]).decode()))

    def cudaLibraryGetKernelCount(self, args: Sequence[int]) -> None:
        _store32(args[0], len(re.findall(r"\.entry\s", self._libraries[args[1]].ptx)))

    def cuKernelGetAttribute(self, args: Sequence[int]) -> None:
        _store32(args[0], _KERNEL_ATTRIBUTES.get(args[1], 0))

    def cudaFuncSetAttribute(self, args: Sequence[int]) -> None:
        pass

    def cudaKernelSetAttributeForDevice(self, args: Sequence[int]) -> None:
        pass

    def cudaOccupancyMaxActiveBlocksPerMultiprocessor(self, args: Sequence[int]) -> None:
        threads, smem_bytes = args[2], args[3]
        by_threads = self.facts.threads_per_sm // max(1, threads)
        by_smem = self.facts.smem_per_sm // (smem_bytes + 1024)
        _store32(args[0], min(self.facts.blocks_per_sm, by_threads, by_smem))

    # launches

    def cudaLaunchKernelEx(self, args: Sequence[int]) -> None:
        config = _LaunchConfig.from_address(args[0])
        cluster, cooperative, programmatic = (1, 1, 1), False, False
        for index in range(config.attribute_count):
            attribute = _LaunchAttribute.from_address(config.attributes + index * ctypes.sizeof(_LaunchAttribute))
            if attribute.id == _CLUSTER_DIMENSION:
                cluster = tuple(attribute.words[:3])
            elif attribute.id == _COOPERATIVE:
                cooperative = bool(attribute.words[0])
            elif attribute.id == _PROGRAMMATIC_SERIALIZATION:
                programmatic = bool(attribute.words[0])
        library, entry = self._kernels[args[1]]
        launch = Launch(
            library.ptx, entry, tuple(config.grid), tuple(config.block), cluster, config.smem_bytes,
            _read_parameters(library.ptx, entry, args[2]), cooperative, programmatic,
        )  # fmt: skip
        self._submit(lambda: self.run(launch))

    def cudaLaunchKernel(self, args: Sequence[int]) -> None:
        library, entry = self._kernels[args[0]]
        params = _read_parameters(library.ptx, entry, args[7])
        launch = Launch(library.ptx, entry, tuple(args[1:4]), tuple(args[4:7]), (1, 1, 1), args[8], params)
        self._submit(lambda: self.run(launch))

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
        _store64(args[0], self._handle())

    cudaEventCreate = cudaStreamCreate

    def cudaStreamDestroy(self, args: Sequence[int]) -> None:
        pass

    cudaStreamSynchronize = cudaStreamWaitEvent = cudaEventDestroy = cudaEventRecord = cudaStreamDestroy

    def cudaEventElapsedTime(self, args: Sequence[int]) -> None:
        ctypes.c_float.from_address(args[0]).value = 1.0  # an emulated kernel has no time of its own


def _read_parameters(ptx: str, entry: str, pointers: int) -> tuple[bytes, ...]:
    sizes = parameter_sizes(ptx, entry)
    table = (ctypes.c_uint64 * len(sizes)).from_address(pointers) if sizes else ()
    return tuple(ctypes.string_at(pointer, size) for pointer, size in zip(table, sizes))


def _store32(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value


def _store64(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value
