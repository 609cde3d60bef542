"""The little of the CUDA driver that running one PTX entry needs, through ctypes: no toolkit, no package."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6  # CUjit_option
_FLOAT32 = 7  # CUtensorMapDataType

_NEWEST = re.compile(r"Unsupported \.version [\d.]+; current version is '([\d.]+)'")  # of an assembler's log


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class CudaError(RuntimeError):
    """A driver call failed; the message names the call and the driver's error."""


class Device:
    """The first CUDA device, with a context on it.

    chip: the target its own kernels are compiled for, for example "sm_90a".
    Raises OSError when there is no driver, CudaError when there is no device.
    """

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        major, minor = (self._attribute(device, a) for a in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR))
        self.chip = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, 128, device)
        self.name = name.value.decode()

    def allocate(self, content: bytes) -> int:
        """Device memory with this content; returns its address."""
        address = self.reserve(len(content))
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))
        return address

    def reserve(self, nbytes: int) -> int:
        """Device memory that nobody has written; returns its address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, nbytes)))
        return address.value

    def tensor_map(self, address: int, lines: int, columns: int, box: Sequence[int]) -> bytes:
        """Return the map of a float32 matrix at this address. box: columns and lines."""
        raw = _aligned(bytes(128))
        self._call(
            "cuTensorMapEncodeTiled", raw, _FLOAT32, 2, ctypes.c_void_p(address), (ctypes.c_uint64 * 2)(columns, lines),
            (ctypes.c_uint64 * 1)(4 * columns), (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1), 0, 0, 0, 0,
        )  # fmt: skip
        return bytes(raw)

    def read(self, address: int, nbytes: int) -> bytes:
        host = ctypes.create_string_buffer(nbytes)
        self._call("cuMemcpyDtoH_v2", host, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return host.raw

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def launch(
        self,
        ptx: str,
        entry: str,
        *,
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int],
        smem_bytes: int,
        params: Sequence[bytes],
    ) -> None:
        """Compile the PTX, run one entry and wait for it. Raises CudaError with the assembler's log."""
        module, function = self._loaded(ptx), ctypes.c_void_p()
        try:
            self._call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, smem_bytes)
            attribute = _Attribute(id=_CLUSTER_DIMENSION)
            attribute.value[:3] = list(cluster)
            config = _Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), smem_bytes)
            if tuple(cluster) != (1, 1, 1):
                self._call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER, 1)
                config.attributes, config.attribute_count = ctypes.pointer(attribute), 1
            # A tensor map among the parameters must lie at a multiple of 64 bytes here too.
            buffers = [_aligned(raw) for raw in params]
            table = (ctypes.c_void_p * max(1, len(buffers)))(*(ctypes.addressof(buffer) for buffer in buffers))
            self._call("cuLaunchKernelEx", ctypes.byref(config), function, table, None)
            self._call("cuCtxSynchronize")
        finally:
            self._cuda.cuModuleUnload(module)

    def _loaded(self, ptx: str) -> ctypes.c_void_p:
        """The module. A driver older than the compiler gets the text as one of its own version: an instruction that is
        too new for it, it refuses by name."""
        try:
            return self._load(ptx)
        except CudaError as error:
            newest = _NEWEST.search(str(error))
            if newest is None:
                raise
        return self._load(of_version(ptx, newest[1]))

    def _load(self, ptx: str) -> ctypes.c_void_p:
        log, module = ctypes.create_string_buffer(8192), ctypes.c_void_p()
        options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        try:
            self._call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode() + b"\0", 2, options, values)
        except CudaError as error:
            raise CudaError(f"{error}: {log.value.decode(errors='replace').strip()}") from None
        return module

    def _attribute(self, device: ctypes.c_int, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{name} failed with {code}: {(text.value or b'unknown error').decode()}")


def of_version(ptx: str, version: str) -> str:
    """The same text, said to be of another version of PTX."""
    return re.sub(r"^\.version\s+[\d.]+", f".version {version}", ptx, count=1, flags=re.MULTILINE)


def _aligned(raw: bytes, alignment: int = 64) -> ctypes.Array:
    whole = ctypes.create_string_buffer(len(raw) + alignment)
    start = -(-ctypes.addressof(whole) // alignment) * alignment
    buffer = (ctypes.c_char * len(raw)).from_address(start)
    buffer.raw = raw
    setattr(buffer, "owner", whole)  # noqa: B010  (keeps the memory; the type does not declare it)
    return buffer
