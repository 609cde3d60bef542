"""Device of each tensor as on a machine with a GPU: `tensor.device`, `is_cuda` and `is_cpu`.

All memory is host memory. A tensor is marked as a host tensor if it was created without a device or moved to the CPU,
or if all its inputs are host tensors. All other tensors, including gradients that autograd creates, are GPU tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from warpcheck.host.replaced import replaced

_BASE_DEVICE = torch._C.TensorBase.device
_GPU = torch.device("cuda", 0)
_ON_HOST = "_warpcheck_on_host"


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is marked as a host tensor."""
    return getattr(tensor, _ON_HOST, False)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def goes_to_host(func: Any, args: tuple, kwargs: dict) -> bool | None:
    """Return whether a call names the host (True) or the GPU (False) for its result; None if it names neither."""
    if func in (torch.Tensor.cpu, torch.Tensor.pin_memory):
        return True
    if func is torch.Tensor.to:
        other = kwargs.get("other", args[1] if len(args) > 1 else None)
        if isinstance(other, torch.Tensor):
            return on_host(other)
    numbered = args[1:2] if func is torch.Tensor.to else ()
    if func is torch.Tensor.cuda or any(type(device) is int for device in (kwargs.get("device"), *numbered)):
        return False
    for device in (kwargs.get("device"), *args):
        kind = device.type if isinstance(device, torch.device) else device if isinstance(device, str) else ""
        if kind.partition(":")[0] in ("cpu", "cuda"):
            return kind.startswith("cpu")
    return None


class Placement:
    """Marks the results of torch functions with their devices."""

    def note(self, result: Any, func: Any, args: tuple, kwargs: dict) -> None:
        """Mark the result of `func(*args, **kwargs)`."""
        if getattr(func, "__name__", "") == "__set__":  # parameter.data = tensor
            args[0].__dict__[_ON_HOST] = all(on_host(value) for value in _tensors(args[1:]))
            return
        results = [tensor for tensor in _tensors((result,)) if type(tensor) in (torch.Tensor, torch.nn.Parameter)]
        if not results:
            return
        host = self._host(func, args, kwargs)
        for tensor in results:
            tensor.__dict__[_ON_HOST] = host

    def _host(self, func: Any, args: tuple, kwargs: dict) -> bool:
        named = goes_to_host(func, args, kwargs)
        if named is not None:
            return named
        given = list(_tensors((*args, *kwargs.values())))
        if not given:
            stack = _get_current_function_mode_stack()
            return not any(type(mode) is DeviceContext and mode.device.type == "cuda" for mode in stack)
        return all(on_host(tensor) for tensor in given)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace device properties of tensors, disable torch.compile, and run CUDA-only operators on host memory."""
        with (
            replaced(
                torch.Tensor,
                device=property(_device),
                is_cuda=property(lambda tensor: _device(tensor).type == "cuda"),
                is_cpu=property(lambda tensor: _device(tensor).type == "cpu"),
                get_device=lambda tensor: 0 if _device(tensor).type == "cuda" else -1,
            ),
            replaced(DeviceContext, __torch_function__=_default_device),
            replaced(torch, compile=_uncompiled),
            replaced(torch.library, custom_op=_for_the_host(torch.library.custom_op, "device_types")),
            replaced(torch.library.Library, impl=_with_host_key(torch.library.Library.impl)),
        ):
            yield


def real_device(tensor: torch.Tensor) -> torch.device:
    """Return the device in torch's own record."""
    with torch._C.DisableTorchFunction():
        return _BASE_DEVICE.__get__(tensor)


def _device(tensor: torch.Tensor) -> torch.device:
    real = real_device(tensor)
    here = type(tensor) in (torch.Tensor, torch.nn.Parameter) and real.type == "cpu" and not on_host(tensor)
    return _GPU if here else real


_DEFAULT_DEVICE = DeviceContext.__torch_function__


def _default_device(self: DeviceContext, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """Default device in the presence of the mode of torch_cuda.py.

    A default device after the mode (torch.set_default_device) must not reach torch. A default device before the mode
    (`with torch.device("cuda")`) is an argument of the mode.
    """
    below = _get_current_function_mode_stack()
    if self.device.type == "cuda" and not any(hasattr(mode, "placement") for mode in below):
        return func(*args, **(kwargs or {}))
    return _DEFAULT_DEVICE(self, func, types, args, kwargs)


def _uncompiled(model: Any = None, **_options: Any) -> Any:
    """Substitute of torch.compile that compiles nothing."""
    return model if model is not None else lambda function: function


def _for_the_host(function: Callable[..., Any], keyword: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def register(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get(keyword) in ("cuda", ["cuda"], ("cuda",)):
            kwargs[keyword] = None
        return function(*args, **kwargs)

    return register


def _with_host_key(impl: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(impl)
    def register(self: Any, name: Any, function: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        if dispatch_key == "CUDA":
            full = name if isinstance(name, str) else name._qualified_op_name
            full = full if "::" in full else f"{self.ns}::{full}"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):
                dispatch_key = "CPU"
        return impl(self, name, function, dispatch_key, **kwargs)

    return register
