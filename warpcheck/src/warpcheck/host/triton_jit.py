"""Triton's driver for an emulated chip: `@triton.jit` functions compile to PTX for it, and run on it.

Triton's active driver describes the chip, loads code and launches it. Here compilation ends with the PTX instead of
machine code. Triton caches such kernels under separate keys, in memory and on disk, so that no GPU loads one.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from warpcheck.host.launch import Runtime
from warpcheck.host.replaced import replaced
from warpcheck.host.tensor_map import TiledMap
from warpcheck.machine import Launch, kernel_of, three
from warpcheck.machine.arguments import packed

_DRIVER = "triton.runtime.driver"
_KEY = "warpcheck: ends with the PTX"
_WARP = 32
_TF32 = 11  # CUtensorMapDataType
_TO_HOST = {8: 10, 9: 8, 10: 9}  # element types whose numbers differ between device code and CUtensorMapDataType
_THREADS = 1024  # maximum of a block


@contextlib.contextmanager
def installed(runtime: Runtime) -> Iterator[None]:
    """Make the emulated chip Triton's active driver, once another module imports Triton."""
    with contextlib.ExitStack() as stack:

        def enter() -> None:
            stack.enter_context(_active(runtime))

        if _DRIVER in sys.modules:
            enter()
        elif importlib.util.find_spec("triton") is not None:
            finder = _AfterImport(_DRIVER, enter)
            sys.meta_path.insert(0, finder)
            stack.callback(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)
        yield


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `action` once, after the module `name` was imported."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def and_act(module: Any) -> None:
                execute(module)
                sys.modules.setdefault(name, module)
                self.action()

            loader.exec_module = and_act
        return spec


@contextlib.contextmanager
def _active(runtime: Runtime) -> Iterator[None]:
    from triton import knobs

    config = sys.modules[_DRIVER].driver
    with (
        replaced(config, _active=EmulatedDriver(runtime)),
        replaced(knobs.runtime, add_stages_inspection_hook=_end_with_ptx),
    ):
        yield


def _end_with_ptx(*args: Any) -> tuple[str, str] | None:
    """Hook for the stages of Triton's compiler; without arguments it returns the key of the hook."""
    if not args:
        return _KEY, _KEY
    stages = args[1]
    if "cubin" in stages:
        stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return None


class EmulatedDriver:
    """Triton's driver interface. The device number is the chip's number, so that Triton's caches by device are separate
    for each chip."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.utils = _Utils(runtime)

    @staticmethod
    def is_active() -> bool:
        return True

    def launcher_cls(self, src: Any, metadata: Any) -> _Launcher:
        return _Launcher(self.runtime, src, metadata)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.runtime.facts.number, _WARP)

    def get_current_device(self) -> int:
        return self.runtime.facts.number

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return self.runtime.facts.capability

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a benchmarker that reports equal times, so that autotuners take the first configuration."""
        return lambda call, *, quantiles=None, **_: [1.0] * len(quantiles or (1,))

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1, dtype=torch.int)

    def clear_cache(self, cache: Any) -> None:
        pass

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream: int) -> Any:
        import torch

        return torch.empty(size, dtype=torch.int8)

    def map_python_to_cpp_type(self, type_: str) -> str:
        raise NotImplementedError("the emulator compiles no launcher in C++")


class _Utils:
    """Loads code and reports the properties of the chip."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def get_device_properties(self, device: int) -> dict[str, int]:
        facts = self.runtime.facts
        return {
            "max_shared_mem": facts.smem_per_block,
            "multiprocessor_count": self.runtime.sms,
            "max_num_regs": facts.registers_per_sm,
            "warpSize": _WARP,
            "sm_clock_rate": 1_000_000,
            "mem_clock_rate": 1_000_000,
            "mem_bus_width": 4096,
        }

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        """Return module, function, registers, spills and threads."""
        function = (code.decode(), name)
        return function, function, 0, 0, _THREADS

    def unload_module(self, module: Any) -> None:
        pass

    def cuOccupancyMaxActiveClusters(self, *_args: Any) -> int:
        return self.runtime.sms


class _Launcher:
    """Launches one compiled function; Triton calls it with the grid, its own records, and the function's arguments."""

    def __init__(self, runtime: Runtime, src: Any, metadata: Any) -> None:
        self.runtime = runtime
        self.metadata = metadata
        self.signature = tuple(src.signature.values())
        self.tensordesc_meta = getattr(metadata, "tensordesc_meta", None) or ()

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: tuple[str, str], kernel_metadata: Any,
        launch_metadata: Any, enter: Callable[[Any], None] | None, leave: Callable[[Any], None] | None, *args: Any,
    ) -> None:  # fmt: skip
        if enter is not None:
            enter(launch_metadata)
        ptx, entry = function
        if x and y and z:
            self._launch(ptx, entry, (x, y, z), args)
        if leave is not None:
            leave(launch_metadata)

    def _launch(self, ptx: str, entry: str, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        kernel = kernel_of(ptx, entry)
        maps = iter(self.tensordesc_meta)
        values = [value for type_, arg in zip(self.signature, args) for value in _flattened(type_, arg, maps)]
        scratch = self._scratch(grid)
        values += scratch[: len(kernel.params) - len(values)]
        params, _ = packed(kernel.params, values)
        threads = kernel.directives.get("reqntid", (_WARP * self.metadata.num_warps,))
        cluster = kernel.directives.get("reqnctapercluster", (getattr(self.metadata, "num_ctas", 1),))
        x, y, z = grid
        launch = Launch(
            ptx, entry, params, (x * cluster[0], y, z), three(threads), three(cluster), self.metadata.shared,
            bool(getattr(self.metadata, "launch_pdl", False)),
            bool(getattr(self.metadata, "launch_cooperative_grid", False)),
        )  # fmt: skip
        self.runtime.launch(launch)

    def _scratch(self, grid: tuple[int, int, int]) -> list[Any]:
        """Return the scratch memory of all CTAs, the last two parameters of a compiled function."""
        import torch

        ctas = grid[0] * grid[1] * grid[2] * getattr(self.metadata, "num_ctas", 1)
        sizes = (self.metadata.global_scratch_size, self.metadata.profile_scratch_size)
        return [torch.empty(ctas * size + 128, dtype=torch.int8) if size else None for size in sizes]


def _flattened(type_: Any, arg: Any, maps: Iterator[Any]) -> list[Any]:
    """Return the parameters of an argument: none for a constant, the members of a tuple, the parts of a descriptor."""
    if type_ == "constexpr":
        return []
    if isinstance(type_, tuple):
        return [value for inner, member in zip(type_, arg) for value in _flattened(inner, member, maps)]
    if isinstance(type_, str) and type_.startswith("tensordesc"):
        metadata = next(maps, None)
        if metadata is None:
            tail = [*arg.shape, *arg.strides]
            return [arg.base, *tail, arg.padding == "nan", arg.round_f32_to_tf32, *tail]
        return [_tensor_map(arg, metadata), *arg.shape, *arg.strides]
    if type_ in _HALVES:
        return [_HALVES[type_](arg)]
    return [arg]


def _half(value: float) -> bytes:
    import numpy as np

    return np.float16(value).tobytes()


def _bfloat(value: float) -> bytes:
    import torch

    return torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()


_HALVES = {"fp16": _half, "bf16": _bfloat}


def _tensor_map(arg: Any, metadata: dict[str, Any]) -> bytes:
    """Return the tensor map of a host descriptor, whose dimensions have the reverse order."""
    extents = [*arg.shape[:-1], arg.shape[-1] * (2 if metadata["fp4_padded"] else 1)]
    kind = _TO_HOST.get(metadata["elem_type"], metadata["elem_type"])
    rank = len(extents)
    tiled = TiledMap(
        _TF32 if arg.round_f32_to_tf32 else kind,
        rank,
        arg.base.data_ptr(),
        global_dim=tuple(reversed(extents)),
        global_strides=tuple(stride * metadata["elem_size"] for stride in reversed(arg.strides[:-1])),
        box_dim=tuple(reversed(metadata["block_size"])),
        element_strides=(1,) * rank,
        interleave=0,
        swizzle=metadata["swizzle"],
        oob_fill=int(arg.padding == "nan"),
    )
    tiled.check()
    return tiled.packed()
