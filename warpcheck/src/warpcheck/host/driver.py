"""cuda.bindings for an emulated chip: the calls that host code makes before and after a launch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from cuda.bindings import driver as cu
from cuda.bindings import runtime as cudart

from warpcheck.host.attributes import LARGEST_CLUSTER, device_attribute, resident_blocks, resident_clusters
from warpcheck.host.launch import Runtime
from warpcheck.host.replaced import replaced

_DRIVER_VERSION = 13000


@contextlib.contextmanager
def installed(runtime: Runtime) -> Iterator[None]:
    """Replace cuda.bindings.driver and .runtime: the emulated chip is the only device."""
    with replaced(cu, **_driver(runtime)), replaced(cudart, **_runtime(runtime)):
        yield


def _answers(status: Any, functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Wrap functions so that they return a tuple of the status and the result, as the bindings do."""

    def wrap(function: Callable[..., Any]) -> Callable[..., tuple]:
        def call(*args: Any, **kwargs: Any) -> tuple:
            result = function(*args, **kwargs)
            return (status,) if result is None else (status, result)

        return call

    return {name: wrap(function) for name, function in functions.items()}


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _driver(runtime: Runtime) -> dict[str, Callable[..., Any]]:
    facts, sms, heap, modules = runtime.facts, runtime.sms, runtime.heap, runtime.modules

    def blocks(threads: int, smem_bytes: int) -> int:
        return resident_blocks(facts, int(threads), int(smem_bytes))

    def max_clusters(_kernel: Any, config: Any) -> int:
        size = 1
        for attribute in config.attrs[: config.numAttrs]:
            if attribute.id == cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                dim = attribute.value.clusterDim
                size = dim.x * dim.y * dim.z
        threads = config.blockDimX * config.blockDimY * config.blockDimZ
        return resident_clusters(sms, size, blocks(threads, config.sharedMemBytes))

    functions: dict[str, Callable[..., Any]] = {
        "cuInit": _nothing,
        "cuDriverGetVersion": lambda: _DRIVER_VERSION,
        "cuDeviceGetCount": lambda: 1,
        "cuDeviceGet": lambda ordinal: cu.CUdevice(ordinal),
        "cuDeviceGetName": lambda length, _device: facts.target.encode()[:length],
        "cuDeviceTotalMem": lambda _device: facts.memory,
        "cuDeviceGetAttribute": lambda attribute, _device: device_attribute(facts, sms, int(attribute)),
        "cuDevicePrimaryCtxRetain": lambda _device: cu.CUcontext(1),
        "cuDevicePrimaryCtxRelease": _nothing,
        "cuCtxCreate": lambda *_args: cu.CUcontext(1),
        "cuCtxDestroy": _nothing,
        "cuCtxSetCurrent": _nothing,
        "cuCtxGetCurrent": lambda: cu.CUcontext(1),
        "cuCtxGetDevice": lambda: cu.CUdevice(0),
        "cuCtxSynchronize": _nothing,
        "cuFuncSetAttribute": _nothing,
        "cuKernelSetAttribute": _nothing,
        "cuLibraryLoadData": lambda code, *_rest: cu.CUlibrary(modules.load(bytes(code))),
        "cuLibraryEnumerateKernels": lambda count, library: [
            cu.CUkernel(modules.kernel_handle(int(library), entry)) for entry in modules.entries(int(library))[:count]
        ],
        "cuLibraryGetKernel": lambda library, entry: cu.CUkernel(modules.kernel_handle(int(library), entry.decode())),
        "cuLibraryUnload": _nothing,
        "cuKernelGetFunction": lambda kernel: cu.CUfunction(int(kernel)),
        "cuOccupancyAvailableDynamicSMemPerBlock": lambda *_args: facts.smem_per_block,
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda _kernel, threads, smem: blocks(threads, smem),
        "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": lambda _kernel, threads, smem, _flags: blocks(
            threads, smem
        ),
        "cuOccupancyMaxPotentialClusterSize": lambda _kernel, _config: min(sms, LARGEST_CLUSTER),
        "cuOccupancyMaxActiveClusters": max_clusters,
        "cuMemAlloc": lambda nbytes: cu.CUdeviceptr(heap.allocate(int(nbytes))),
        "cuMemFree": lambda address: heap.free(int(address)),
        "cuMemcpyHtoD": lambda to, host, nbytes: _copy(to, host, nbytes),
        "cuMemcpyDtoH": lambda host, source, nbytes: _copy(host, source, nbytes),
        "cuMemcpyDtoDAsync": lambda to, source, nbytes, _stream: _copy(to, source, nbytes),
        "cuMemsetD32Async": lambda address, value, count, _stream: _fill32(address, value, count),
        "cuStreamCreate": lambda _flags: cu.CUstream(0),
        "cuStreamDestroy": _nothing,
        "cuStreamSynchronize": _nothing,
        "cuStreamWaitEvent": _nothing,
        "cuEventCreate": lambda _flags: cu.CUevent(0),
        "cuEventDestroy": _nothing,
        "cuEventRecord": _nothing,
        "cuEventSynchronize": _nothing,
        "cuEventElapsedTime": lambda _start, _end: 1.0,
        "cuGetErrorName": lambda error: error.name.encode(),
        "cuGetErrorString": lambda error: error.name.encode(),
    }
    return _answers(cu.CUresult.CUDA_SUCCESS, functions)


def _runtime(runtime: Runtime) -> dict[str, Callable[..., Any]]:
    facts, sms, heap = runtime.facts, runtime.sms, runtime.heap

    functions: dict[str, Callable[..., Any]] = {
        "cudaGetDeviceCount": lambda: 1,
        "cudaGetDevice": lambda: 0,
        "cudaSetDevice": _nothing,
        "cudaDeviceGetAttribute": lambda attribute, _device: device_attribute(facts, sms, int(attribute)),
        "cudaDeviceSynchronize": _nothing,
        "cudaLibraryUnload": _nothing,
        "cudaOccupancyAvailableDynamicSMemPerBlock": lambda *_args: facts.smem_per_block,
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor": lambda _kernel, threads, smem: resident_blocks(
            facts, threads, smem
        ),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": lambda _kernel, threads, smem, _flags: (
            resident_blocks(facts, threads, smem)
        ),
        "cudaStreamCreate": lambda: cudart.cudaStream_t(0),
        "cudaStreamDestroy": _nothing,
        "cudaStreamSynchronize": _nothing,
        "cudaEventCreate": lambda: cudart.cudaEvent_t(0),
        "cudaEventDestroy": _nothing,
        "cudaEventRecord": _nothing,
        "cudaEventSynchronize": _nothing,
        "cudaEventElapsedTime": lambda _start, _end: 1.0,
        "cudaMalloc": lambda nbytes: heap.allocate(int(nbytes)),
        "cudaFree": lambda address: heap.free(int(address)),
        "cudaMemcpy": lambda to, source, nbytes, _kind: _copy(to, source, nbytes),
        "cudaMemcpyAsync": lambda to, source, nbytes, _kind, _stream: _copy(to, source, nbytes),
        "cudaMemset": lambda address, value, nbytes: _set(address, value, nbytes),
        "cudaMemsetAsync": lambda address, value, nbytes, _stream: _set(address, value, nbytes),
        "cudaGetErrorName": lambda error: error.name.encode(),
        "cudaGetErrorString": lambda error: error.name.encode(),
        "cudaGetLastError": _nothing,
    }
    return _answers(cudart.cudaError_t.cudaSuccess, functions)


def _copy(to: Any, source: Any, nbytes: int) -> None:
    ctypes.memmove(int(to), int(source), int(nbytes))


def _set(address: Any, value: int, nbytes: int) -> None:
    ctypes.memset(int(address), int(value) & 0xFF, int(nbytes))


def _fill32(address: Any, value: int, count: int) -> None:
    (ctypes.c_uint32 * int(count)).from_address(int(address))[:] = [int(value) & 0xFFFFFFFF] * int(count)
