"""DLPack's C exchange API for torch tensors: extensions see the device of `tensor.device`.

torch.Tensor has a capsule with a table of functions (DLPackExchangeAPI of dlpack.h). `installed` replaces it by a table
whose functions call torch's and correct the device. Consumers may keep a table for the life of the process, so there is
one table, which forwards all calls while no chip is emulated.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

from warpcheck.host.replaced import replaced

_CPU, _CUDA = 1, 2  # DLDeviceType
_NAME = b"dlpack_exchange_api"
_ATTRIBUTE = "__dlpack_c_exchange_api__"
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class _Tensor(ctypes.Structure):
    """First members of DLTensor."""

    _fields_ = (("data", _POINTER), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _Managed(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2), ("context", _POINTER), ("deleter", _POINTER), ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )  # fmt: skip


_ALLOCATE = ctypes.PYFUNCTYPE(
    _INT, ctypes.POINTER(_Tensor), ctypes.POINTER(ctypes.POINTER(_Managed)), _POINTER, _POINTER
)
_EXPORT = ctypes.PYFUNCTYPE(_INT, _POINTER, ctypes.POINTER(ctypes.POINTER(_Managed)))
_IMPORT = ctypes.PYFUNCTYPE(_INT, ctypes.POINTER(_Managed), _POINTER)
_VIEW = ctypes.PYFUNCTYPE(_INT, _POINTER, ctypes.POINTER(_Tensor))
_STREAM = ctypes.PYFUNCTYPE(_INT, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(_POINTER))


class _Table(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2), ("previous", _POINTER), ("allocate", _ALLOCATE), ("export", _EXPORT),
        ("import_", _IMPORT), ("view", _VIEW), ("stream", _STREAM),
    )  # fmt: skip


_on_gpu: Callable[[torch.Tensor], bool] | None = None  # while a chip is emulated
_kept: list[Any] = []  # torch's capsule, the table and its capsule, once they are made


def _device_of(address: int, tensor: _Tensor) -> None:
    """Correct the device that torch reports for the Python object at `address`."""
    if _on_gpu is not None and tensor.device_type == _CPU and _on_gpu(ctypes.cast(address, ctypes.py_object).value):
        tensor.device_type, tensor.device_id = _CUDA, 0


def _table_over(torchs: _Table) -> _Table:
    def allocate(prototype: Any, out: Any, context: Any, complain: Any) -> int:
        there = prototype[0].device_type
        if _on_gpu is None or there != _CUDA:
            return torchs.allocate(prototype, out, context, complain)
        prototype[0].device_type = _CPU
        status = torchs.allocate(prototype, out, context, complain)
        prototype[0].device_type = there
        if not status:
            out[0][0].tensor.device_type = there
        return status

    def export(address: int, out: Any) -> int:
        status = torchs.export(address, out)
        if not status:
            _device_of(address, out[0][0].tensor)
        return status

    def import_(managed: Any, out: Any) -> int:
        if _on_gpu is not None and managed[0].tensor.device_type == _CUDA:
            managed[0].tensor.device_type = _CPU
        return torchs.import_(managed, out)

    def view(address: int, out: Any) -> int:
        status = torchs.view(address, out)
        if not status:
            _device_of(address, out[0])
        return status

    def stream(device_type: int, device_id: int, out: Any) -> int:
        if _on_gpu is None or device_type != _CUDA:
            return torchs.stream(device_type, device_id, out)
        out[0] = None
        return 0

    functions = _ALLOCATE(allocate), _EXPORT(export), _IMPORT(import_), _VIEW(view), _STREAM(stream)
    return _Table(torchs.version, None, *functions)


def _capsule() -> Any:
    """Return the capsule of the table; None if torch has none."""
    if not _kept and hasattr(torch.Tensor, _ATTRIBUTE):
        pointer, new = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
        pointer.restype, pointer.argtypes = _POINTER, (ctypes.py_object, ctypes.c_char_p)
        new.restype, new.argtypes = ctypes.py_object, (_POINTER, ctypes.c_char_p, _POINTER)
        torchs = getattr(torch.Tensor, _ATTRIBUTE)
        table = _table_over(_Table.from_address(pointer(torchs, _NAME)))
        _kept.extend((torchs, table, new(ctypes.addressof(table), _NAME, None)))
    return _kept[-1] if _kept else None


@contextlib.contextmanager
def installed(on_gpu: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Report device 0 for tensors that fulfil `on_gpu` to all consumers of the exchange API."""
    global _on_gpu
    capsule, before = _capsule(), _on_gpu
    _on_gpu = on_gpu
    try:
        with replaced(torch.Tensor, **({_ATTRIBUTE: capsule} if capsule is not None else {})):
            yield
    finally:
        _on_gpu = before
