"""Global memory of kernels: the host allocations that are alive when a kernel starts."""

from __future__ import annotations

import ctypes
import gc
import weakref

import torch

from warpcheck.host.buffers import POISON, aligned_buffer
from warpcheck.host.placement import real_device
from warpcheck.machine import Allocation


class Heap:
    """Memory that host code allocates from the driver; alive until it is freed."""

    def __init__(self) -> None:
        self._blocks: dict[int, ctypes.Array] = {}

    def allocate(self, nbytes: int) -> int:
        """Return the address of a fresh block filled with poison."""
        buffer = aligned_buffer(nbytes)
        ctypes.memset(buffer, POISON, nbytes)
        self._blocks[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def free(self, address: int) -> None:
        """Release a block. Raises ValueError for an address that `allocate` did not return."""
        if address and self._blocks.pop(address, None) is None:
            raise ValueError(f"free of {address:#x}, which is not the start of an emulated device allocation")

    def allocations(self) -> list[Allocation]:
        return [Allocation(address, len(block), "cudaMalloc") for address, block in self._blocks.items()]


class Arrays:
    """Arrays that reached the emulator through DLPack and are no torch tensors (NumPy, JAX)."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, int], weakref.ref | object] = {}

    def add(self, array: object, address: int, nbytes: int) -> None:
        try:
            owner: weakref.ref | object = weakref.ref(array)
        except TypeError:  # not weakly referenceable: keep it alive rather than lose it
            owner = array
        self._owners[address, nbytes] = owner

    def allocations(self) -> list[Allocation]:
        alive = {}
        for key, owner in self._owners.items():
            if not (isinstance(owner, weakref.ref) and owner() is None):
                alive[key] = owner
        self._owners = alive
        return [Allocation(address, nbytes, "array") for address, nbytes in alive]


_frozen: list[weakref.ref] = []


def freeze() -> None:
    """Call `gc.freeze` and keep references to the frozen tensors.

    Each launch searches all objects that are not frozen: programs with many modules and launches become faster.
    """
    gc.collect()
    _frozen[:] = [reference for reference in _frozen if reference() is not None]
    _frozen.extend(map(weakref.ref, _living_tensors()))
    gc.freeze()


def _living_tensors() -> list[torch.Tensor]:
    kinds = _kinds_of(torch.Tensor)  # membership in a set is many times cheaper than issubclass
    return [x for x in gc.get_objects() if type(x) in kinds]


def torch_allocations() -> list[Allocation]:
    """Return one allocation with the exact bytes of each live CPU storage that a Python tensor refers to."""
    storages: dict[int, Allocation] = {}
    frozen = (reference() for reference in _frozen)
    for candidate in (*_living_tensors(), *(x for x in frozen if x is not None)):
        storage = _storage_of(candidate)
        if storage is None:
            continue
        base, nbytes = storage
        largest = storages.get(base)
        if largest is None or largest.nbytes < nbytes:
            # A nested tensor that is not jagged has no shape.
            is_nested = candidate.is_nested and candidate.layout is torch.strided
            shape = "nested" if is_nested else "x".join(str(extent) for extent in torch.Tensor.size(candidate))
            storages[base] = Allocation(base, nbytes, f"tensor {shape or 'scalar'} {candidate.dtype}")
    return list(storages.values())


def _kinds_of(kind: type) -> set[type]:
    """Return a class and all its subclasses."""
    return {kind}.union(*map(_kinds_of, type.__subclasses__(kind)))


def _storage_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    try:
        if tensor.layout is not torch.strided or real_device(tensor).type != "cpu":
            return None
        storage = tensor.untyped_storage()
        base, nbytes = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # fake, functional and subclass tensors without memory
        return None
    return (base, nbytes) if base and nbytes else None
