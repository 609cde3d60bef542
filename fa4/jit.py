"""The one road to a compiled kernel: memory, then disk, then the compiler.

    launcher = compiled(("sm80.forward", spec.dtype, tiles), build, chip)
    launcher(q, k, v, out, ...)            # torch tensors; runs on the caller's current stream

A key is a tuple of plain values and names everything that may change the generated code; `build` closes over
the same values and calls `compile_kernel`. The disk entry also depends on this package's device code, the
CuTe DSL version, its CUDA toolkit and the chip, so a stale entry is simply never found.

CuTe DSL is imported on the first compile, never by importing this module.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import os
import platform
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import env
from .device import Chip

Launcher = Callable[..., None]

_PACKAGE = Path(__file__).parent
# The parts of the package whose text decides what is compiled.
_DEVICE_CODE = ("jit.py", "core", "fwd", "bwd", "pipeline", "sm80", "sm90", "sm100")
_SYMBOL = "fa4_kernel"
_PLAIN = (str, int, float, bool, type(None), torch.dtype, enum.Enum)

_launchers: dict[tuple, Launcher] = {}
_lock = threading.RLock()


class DryRun:
    """What `compile_only` compiled: seconds by (target, key)."""

    def __init__(self) -> None:
        self.seconds: dict[tuple, float] = {}

    def compile(self, full_key: tuple, build: Callable[[], Any]) -> Launcher:
        if full_key not in self.seconds:
            started = time.perf_counter()
            build()
            self.seconds[full_key] = time.perf_counter() - started
        return lambda *arguments: None


_compile_only: DryRun | None = None


@contextlib.contextmanager
def compile_only() -> Iterator[DryRun]:
    """Inside, kernels are compiled, past all caches, and never launched: a dry run for a chip that is not here.

    Results of calls made inside are uninitialised memory. Use with `fa4.device.emulating(chip)` and CPU tensors.
    """
    global _compile_only
    before, _compile_only = _compile_only, DryRun()
    try:
        yield _compile_only
    finally:
        _compile_only = before


def compiled(key: tuple, build: Callable[[], Any], chip: Chip) -> Launcher:
    """The launcher for `key` on `chip`: from memory, from the disk cache, or freshly built.

    Args:
        key: plain values (str, int, float, bool, None, dtype, enum, tuples of these) that determine the code.
        build: returns what `compile_kernel` returned; called at most once per key and process, and once
            per key among the processes that share a disk cache.
        chip: where it will run. Emulated chips stay out of the disk cache.

    Raises:
        TypeError: the key holds something else, a tensor for example.
    """
    if _compile_only is not None:
        _check_plain(key)
        return _compile_only.compile((chip.target, key), build)
    full_key = (chip.target, chip.emulated, key)
    launcher = _launchers.get(full_key)
    if launcher is not None:
        return launcher
    _check_plain(key)
    with _lock:
        if full_key not in _launchers:
            directory = None if chip.emulated else cache_directory()
            _launchers[full_key] = build() if directory is None else _through_disk(directory, full_key, build)
        return _launchers[full_key]


def compile_kernel(function: Callable, *args: Any, chip: Chip) -> Any:
    """Compile a `cute.jit` host function for `chip` with tvm-ffi calling convention.

    `args` are fake tensors, scalars of the DSL's types, compile-time values, and last `current_stream()`.
    """
    import cutlass.cute as cute

    options = f"--enable-tvm-ffi --gpu-arch {chip.target}"
    if chip.emulated:
        options += " --keep-ptx --generate-line-info"
    return cute.compile(function, *args, options=options)


def current_stream() -> Any:
    """Stands for the stream argument at compile time; at a call it is the caller's current stream."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)


def fake_tensor(dtype: Any, rank: int, *, contiguous: bool = False, align: int = 16) -> Any:
    """A compile-time stand-in for a tensor with `rank` run-time extents and 64-bit strides, the last 1.

    Args:
        dtype: the DSL's element type.
        contiguous: row-major strides that follow from the extents, instead of free ones.
        align: bytes that the base address is a multiple of; checked at every call.
    """
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

    shape = tuple(cute.sym_int() for _ in range(rank))
    if contiguous:
        order = tuple(reversed(range(rank)))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)
    stride = (*(cute.sym_int64() for _ in range(rank - 1)), 1)
    return make_fake_tensor(dtype, shape, stride, assumed_align=align)


@functools.cache
def dsl_dtype(dtype: torch.dtype) -> Any:
    """The DSL's name for a torch dtype."""
    import cutlass

    return {
        torch.float16: cutlass.Float16,
        torch.bfloat16: cutlass.BFloat16,
        torch.float32: cutlass.Float32,
        torch.int32: cutlass.Int32,
    }[dtype]


@functools.cache
def cache_directory() -> Path | None:
    """Where compiled kernels are kept, or None if `FA4_CACHE=0` or no private directory can be had.

    `FA4_CACHE_DIR`, else `$XDG_CACHE_HOME/fa4`, else `~/.cache/fa4`; below it one directory per toolchain and
    source text. Loading an entry runs its code, so the directory must be the user's own and closed to others'
    writes.
    """
    if env.CACHE.get() == "0":
        return None
    home = env.CACHE_DIR.get()
    root = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fa4"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = root.stat()
        if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{root} is not yours alone to write")
        directory = root / _fingerprint()
        directory.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"fa4 keeps no compiled kernels on disk: {error}", stacklevel=2)
        return None
    return directory


def _through_disk(directory: Path, full_key: tuple, build: Callable[[], Any]) -> Launcher:
    entry = directory / (hashlib.sha256(repr(full_key).encode()).hexdigest()[:32] + ".o")
    # One lock across check, compile and export: of N ranks that start together, one compiles, the rest load.
    with _file_lock(entry.with_suffix(".lock")):
        if entry.exists():
            with contextlib.suppress(Exception):  # an entry that does not load is a miss, replaced below
                return _load(entry)
        kernel = build()
        unfinished = entry.with_suffix(f".{os.getpid()}.o")
        try:
            kernel.export_to_c(str(unfinished), _SYMBOL)
            unfinished.replace(entry)  # so that a reader never sees half a file
            return _load(entry)  # the same road as a warm start, and a launcher with less Python around it
        except Exception as error:  # a full disk must not stop a kernel that is already compiled
            unfinished.unlink(missing_ok=True)
            warnings.warn(f"fa4 could not keep a compiled kernel in {directory}: {error}", stacklevel=2)
        return kernel


def _load(entry: Path) -> Launcher:
    from cutlass.cute.runtime import load_module

    return getattr(load_module(str(entry), enable_tvm_ffi=True), _SYMBOL)


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases it, also when the process dies
        yield


@functools.cache
def _fingerprint() -> str:
    import cutlass
    from cutlass.base_dsl.version_info import CUDA_VERSION

    digest = hashlib.sha256(repr((cutlass.__version__, str(CUDA_VERSION), platform.machine())).encode())
    for part in _DEVICE_CODE:
        path = _PACKAGE / part
        for source in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(str(source.relative_to(_PACKAGE)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _check_plain(key: tuple) -> None:
    for value in key:
        if isinstance(value, tuple):
            _check_plain(value)
        elif not isinstance(value, _PLAIN):
            raise TypeError(f"a compile key holds {type(value).__name__} ({value!r}), expected plain values")
