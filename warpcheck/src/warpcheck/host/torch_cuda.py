"""torch.cuda on a machine without CUDA: device="cuda" means host memory; streams and events have no work.

Host code for a GPU runs unchanged under `emulate`. As between two memories, `.cuda()` and `.cpu()` return copies.
placement.py determines which tensors report a CUDA device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from warpcheck.host import exchange
from warpcheck.host.buffers import CUDA_ALIGNMENT, POISON, aligned_buffer
from warpcheck.host.launch import Runtime
from warpcheck.host.placement import Placement, goes_to_host, on_host, real_device
from warpcheck.host.replaced import replaced

_CUDA_VERSION = "13.0"


class Stream:
    """Stream. All streams are one, and a launch has ended when its call returns."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, _stream: Any) -> None: ...
    def wait_event(self, _event: Any) -> None: ...
    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_error: object) -> None: ...
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0)


class Event:
    """Event. It is complete when it is recorded; emulated work has no duration."""

    cuda_event = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def record(self, _stream: Any = None) -> None: ...
    def wait(self, _stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: Event) -> float:
        return 1.0


class _Generator(torch.Generator):
    """Random generator of the host, for every device."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


@contextlib.contextmanager
def _current(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


class _HostMemory(TorchFunctionMode):
    """Mode that replaces CUDA device arguments of torch functions by the CPU, and aligns new memory as CUDA does."""

    def __init__(self, placement: Placement | None) -> None:
        super().__init__()
        self.placement = placement

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that enables the mode in Python code that torch calls.

        torch disables a mode while a function runs that the mode has intercepted. The mode would be missing in backward
        passes and in kernels of operators.
        """
        seen = any(other is self for other in _get_current_function_mode_stack())
        return contextlib.nullcontext() if seen else self

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        result = self._on_the_host(func, args, kwargs)
        if self.placement is not None:
            self.placement.note(result, func, args, kwargs)
        return result

    def _on_the_host(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0].clone()
        crosses = self._crosses(func, args, kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return _aligned(args[0].clone(), args) if crosses else args[0]
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:  # number of a GPU
            args = (args[0], torch.device("cpu"), *args[2:])
        if _is_cuda(kwargs.get("device")) or type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cpu")
        args = tuple(torch.device("cpu") if _is_cuda(argument) else argument for argument in args)
        result = func(*args, **kwargs)
        if crosses and result is args[0]:
            result = result.clone()
        return _aligned(result, args) if type(result) is torch.Tensor else result

    def _crosses(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """Return whether `func` moves a tensor between host and GPU memory."""
        if func not in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            return False
        if self.placement is None:
            return func is not torch.Tensor.to or goes_to_host(func, args, kwargs) is False
        to_host = goes_to_host(func, args, kwargs)
        return to_host is not None and to_host != on_host(args[0])


@contextlib.contextmanager
def _seen_in_called_python(mode: _HostMemory) -> Iterator[None]:
    """Enable `mode` in backward functions, and in kernels of operators that are registered inside this context.

    The latter are the operators of packages that are imported inside.
    """
    run_backward = torch.autograd.graph._engine_run_backward
    impl = torch.library.Library.impl

    def run_seen(*args: Any, **kwargs: Any) -> Any:
        with mode.again():
            return run_backward(*args, **kwargs)

    @functools.wraps(impl)
    def register(self: Any, name: Any, function: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        if callable(function) and dispatch_key != "Meta" and function is not torch.library.fallthrough_kernel:
            function = _with_current_mode(function)
        return impl(self, name, function, dispatch_key, **kwargs)

    _modes.append(mode)
    try:
        with (
            replaced(torch.autograd, _engine_run_backward=run_seen),
            replaced(torch.autograd.graph, _engine_run_backward=run_seen),
            replaced(torch.library.Library, impl=register),
        ):
            yield
    finally:
        _modes.pop()


_modes: list[
    _HostMemory
] = []  # of nested `installed`; the last is current. Operators outlive the context in which they were registered


def _with_current_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _modes[-1].again() if _modes else contextlib.nullcontext():
            return function(*args, **kwargs)

    return call


def _aligned(result: torch.Tensor, args: tuple) -> torch.Tensor:
    """Return `result`, moved to 512-byte aligned storage if its memory is new and not aligned.

    Views and results of in-place functions share memory with an argument, and are not moved.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(result):  # inside vmap: a wrapper of other tensors
        return result
    if result.grad_fn is not None or real_device(result).type != "cpu" or result.layout is not torch.strided:
        return result
    storage = result.untyped_storage()
    base, nbytes = storage.data_ptr(), storage.nbytes()
    if nbytes == 0 or base % CUDA_ALIGNMENT == 0:
        return result
    for argument in args:
        if isinstance(argument, torch.Tensor) and _base(argument) in (None, base):
            return result
    copy = torch.frombuffer(aligned_buffer(nbytes), dtype=torch.uint8)
    copy.copy_(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,)))
    moved = torch.empty(0, dtype=result.dtype)
    moved.set_(copy.untyped_storage(), result.storage_offset(), result.size(), result.stride())
    return (
        moved.requires_grad_() if result.requires_grad else moved
    )  # inside transforms requires_grad_() may not be called


def _poisoned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function that returns uninitialized memory, so that the memory is filled with poison.

    Elements that a kernel fails to write are then NaN, instead of old contents.
    """

    @functools.wraps(function)
    def fresh(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = function(*args, **kwargs)
        # Fake tensors have no memory, and bool has no value for poison.
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.dtype is not torch.bool:
            base = _base(tensor)
            if base and real_device(tensor).type == "cpu":
                ctypes.memset(base, POISON, tensor.untyped_storage().nbytes())
        return tensor

    return fresh


_FRESH = ("empty", "empty_like", "empty_strided")
_FRESH_LIKE_TENSOR = ("new_empty", "new_empty_strided")


def _base(tensor: torch.Tensor) -> int | None:
    """Address of a tensor's storage; None if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a fake or sparse tensor
        return None


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))


class Graph:
    """CUDA graph: recorded work of a stream, which `replay` executes."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.work: list[Callable[[], object]] = []

    def replay(self) -> None:
        for step in self.work:
            step()

    def reset(self) -> None:
        self.work = []


@contextlib.contextmanager
def installed(runtime: Runtime, tells_devices_apart: bool = False) -> Iterator[None]:
    """Let torch.cuda report one device, the emulated chip, with host memory.

    tells_devices_apart: `tensor.device` is "cuda:0" for tensors that would be on a GPU; see placement.py.
    """
    facts, sms = runtime.facts, runtime.sms

    @contextlib.contextmanager
    def graph(cuda_graph: Graph, *_args: Any, **_kwargs: Any) -> Iterator[None]:
        with runtime.capture() as work:
            yield
        cuda_graph.work.extend(work)

    properties = types.SimpleNamespace(
        name=facts.target,
        major=facts.capability[0],
        minor=facts.capability[1],
        multi_processor_count=sms,
        total_memory=facts.memory,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=facts.smem_per_block,
        shared_memory_per_multiprocessor=facts.smem_per_sm,
        max_threads_per_multi_processor=facts.threads_per_sm,
        regs_per_multiprocessor=65536,
        warp_size=32,
        L2_cache_size=facts.l2,
    )
    stream = Stream()
    placement = Placement() if tells_devices_apart else None
    mode = _HostMemory(placement)
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_name": lambda _device=None: facts.target,
        "get_device_capability": lambda _device=None: facts.capability,
        "get_device_properties": lambda _device=None: properties,
        "can_device_access_peer": lambda _device, _peer: False,
        "synchronize": lambda _device=None: None,
        "current_stream": lambda _device=None: stream,
        "default_stream": lambda _device=None: stream,
        "set_stream": lambda _stream: None,
        "stream": _current,
        "device": _current,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": graph,
        "empty_cache": lambda: None,
        "get_rng_state": lambda _device=None: torch.default_generator.get_state(),
        "set_rng_state": lambda state, _device=None: torch.default_generator.set_state(state),
        "initial_seed": torch.default_generator.initial_seed,
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda _device=None: (facts.memory, facts.memory),
        "max_memory_allocated": lambda _device=None: 0,
        "memory_allocated": lambda _device=None: 0,
        "max_memory_reserved": lambda _device=None: 0,
        "memory_reserved": lambda _device=None: 0,
        "reset_peak_memory_stats": lambda _device=None: None,
        "device_of": _current,
        "get_arch_list": lambda: [facts.target],
        "is_bf16_supported": lambda *_args, **_kwargs: True,
        "_lazy_init": lambda: None,
    }
    raw = {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda _device: None,
        "_cuda_exchangeDevice": lambda _device: 0,
        "_cuda_maybeExchangeDevice": lambda _device: 0,
        "_cuda_synchronize": lambda: None,
        "_cuda_init": lambda: None,
        "_cuda_getCurrentRawStream": lambda _device: 0,
        "_cuda_getCurrentStream": lambda _device: (0, 0, 1),  # stream, device, kind of device
        "_cuda_getDefaultStream": lambda _device: (0, 0, 1),
        "_cuda_setStream": lambda *_args, **_kwargs: None,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }

    def empty_strided_cuda(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        with mode.again():
            return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    nvtx = {
        "range_push": lambda _message: 0, "range_pop": lambda: 0, "range_start": lambda _message: 0,
        "range_end": lambda _range: None, "mark": lambda _message: None, "range": _current,
    }  # fmt: skip
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "current_stream": lambda _device=None: stream,
        "synchronize": lambda _device=None: None,
    }
    is_cuda = property(lambda tensor: real_device(tensor).type == "cpu")
    with (
        replaced(torch.cuda, **answers),
        replaced(torch.cuda.nvtx, **nvtx),
        replaced(torch.accelerator, **accelerator),
        replaced(torch._C, **raw),
        replaced(torch._C._dynamo.guards, _empty_strided_cuda=empty_strided_cuda),  # for code generated by Inductor
        replaced(torch.version, cuda=torch.version.cuda or _CUDA_VERSION),
        replaced(torch, Generator=_Generator, **{name: _poisoned(getattr(torch, name)) for name in _FRESH}),
        replaced(
            torch.Tensor,
            is_cuda=is_cuda,
            is_pinned=lambda _tensor, _device=None: False,
            record_stream=lambda _tensor, _stream: None,
            **{name: _poisoned(getattr(torch.Tensor, name)) for name in _FRESH_LIKE_TENSOR},
        ),
        placement.installed() if placement is not None else contextlib.nullcontext(),
        exchange.installed(lambda tensor: tensor.is_cuda) if placement is not None else contextlib.nullcontext(),
        _seen_in_called_python(mode),
        mode,
    ):
        yield
