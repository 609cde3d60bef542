"""Compiled kernels: looked up in memory, then on disk, then compiled.

    launcher = compiled(("sm80.forward", spec.dtype, tiles), build, chip)
    launcher(q, k, v, out, ...)            # torch tensors; runs on the caller's current stream

A key is a tuple of plain values and contains everything that may change the generated code; `build` closes over the
same values and calls `compile_kernel`. The disk entry also depends on this package's sources, on the versions and
settings of the compiler and on the chip (see `fingerprint`), so a stale entry is never found. A disk that cannot be
written, read or locked costs time but never fails a call. Threads wait for each other if they need the same kernel, and
while both compile: CuTe DSL compiles one kernel at a time in a process.

CuTe DSL is imported on the first compile, never by importing this module or by a launch of a kernel from disk (see
`linked`). Where it is not installed, kernels come from a folder that fits this package's sources (see `manifest`).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib.util
import os
import platform
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import disk, env, linked, manifest, toolchain
from .device import Chip, dry_run, is_emulating

Launcher = Callable[..., None]

_PACKAGE = Path(__file__).parents[1]
# Sources that affect no compiled code; all others do, including new ones. A test checks that no device code imports one
# of these.
HOST_ONLY = (
    "__init__.py", "__main__.py", "api", "cli", "compat", "distributed", "emulator", "fallback", "integrations",
    "kvcache", "masks.py", "oracle", "runtime/background.py", "runtime/dispatch.py", "runtime/plan.py",
    "runtime/recording.py", "runtime/sequences.py", "runtime/workers.py", "scores.py", "torch_ops",
)  # fmt: skip
_SYMBOL = "fa4_kernel"
_TVM = "apache-tvm-ffi"
_PLAIN = (str, int, float, bool, type(None), torch.dtype, enum.Enum)

_launchers: dict[tuple, Launcher] = {}
_locks: dict[tuple, threading.RLock] = {}  # by full key
_compiling = threading.RLock()
_for_export_only: ContextVar[bool] = ContextVar("fa4_to_be_exported", default=False)


def _after_fork_in_child() -> None:
    global _compiling
    _compiling = threading.RLock()  # a thread that held it does not exist in the child
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class MissingKernel(RuntimeError):
    """A kernel that a call needs is not on disk, and CuTe DSL, which would compile it, is not installed."""


class Request(NamedTuple):
    """A kernel that a plan needs: the arguments of `compiled`. Another process can compile it if it can be pickled."""

    key: tuple
    build: Callable[[], Any]
    chip: Chip
    names: tuple[str, ...] = ()

    @property
    def full_key(self) -> tuple:
        return self.chip.target, self.chip.emulated or is_emulating(), self.key

    def is_at_hand(self) -> bool:
        """Whether a call need not wait for the compiler: the kernel is in memory or on disk."""
        if self.full_key in _launchers:
            return True
        directory = cache_directory()
        return directory is not None and self.is_in(directory)

    def is_in(self, directory: Path) -> bool:
        """Whether the kernel is in a folder of entries."""
        return any(entry.exists() for entry in _entries(directory, self.full_key))

    def put_into(self, directory: Path) -> None:
        """Compile the kernel into a folder of entries, unless it is there."""
        with disk.file_lock(disk.lock_of(_entry(directory, self.full_key))):
            if not self.is_in(directory):
                with _for_export():
                    kernel = self.build()
                _export(kernel, directory, self.full_key, self.names)


class DryRun:
    """Record of what calls inside `compile_only` or `list_only` need, and the seconds that each compilation took, by
    (target, key)."""

    def __init__(self, directory: Path | None = None, compiles: bool = True) -> None:
        self.seconds: dict[tuple, float] = {}
        self.requests: dict[tuple, Request] = {}
        self._directory, self._compiles = directory, compiles

    def compile(self, request: Request) -> Launcher:
        target, _, key = request.full_key
        if (target, key) not in self.requests:
            if self._compiles:
                started = time.perf_counter()
                with _for_export():
                    kernel = request.build()
                if self._directory is not None:
                    _export(kernel, self._directory, request.full_key, request.names)
                self.seconds[target, key] = time.perf_counter() - started
            self.requests[target, key] = request
        return lambda *arguments: None

    def __reduce__(self) -> tuple:
        return type(None), ()  # another process compiles what this one only lists


@contextlib.contextmanager
def compile_only(directory: Path | None = None) -> Iterator[DryRun]:
    """Dry run: inside, this thread compiles kernels, bypassing all caches, and launches none. The chip need not be
    present.

    `directory`, if given, receives the kernels and may then serve as a `cache_directory`. Results of calls inside are
    uninitialised memory. Use with `fa4.runtime.device.emulating(chip)` and CPU tensors. The chip of every tensor
    carries the dry run, so plans made inside, whose launchers do nothing, belong to another chip and are not found by
    calls outside.
    """
    record = DryRun(directory)
    with dry_run(record):
        yield record


@contextlib.contextmanager
def list_only() -> Iterator[DryRun]:
    """Dry run that compiles nothing: calls inside list the kernels that they need. Otherwise as `compile_only`."""
    record = DryRun(compiles=False)
    with dry_run(record):
        yield record


class Wait(NamedTuple):
    """Seconds that a call waited for a kernel: until it was compiled, or only loaded from disk."""

    program: str
    seconds: float
    compiled: bool


waits: list[Wait] = []
"""Each wait of this process, in order; as many as kernels."""


def compiled(key: tuple, build: Callable[[], Any], chip: Chip, names: tuple[str, ...] = ()) -> Launcher:
    """Return the launcher for `key` on `chip`: from memory, from the disk cache, or freshly built.

    Args:
        key: plain values (str, int, float, bool, None, dtype, enum, tuples of these) that determine the code.
        build: returns the result of `compile_kernel`. Called at most once per key and process, and once per key among
            the processes that share a disk cache; twice if that disk cannot be written.
        chip: where it will run. Kernels compiled while a chip is emulated, whatever record of a chip is given, have
            separate entries: these call another runtime.
        names: of the key's values after the first, for `manifest`.

    Raises:
        MissingKernel: see there.
        TypeError: the key holds something else, a tensor for example.
        ValueError: nothing can be compiled for the chip.
    """
    request = Request(key, build, chip, names)
    full_key = request.full_key
    if chip.dry_run is not None:
        _check_plain(key)
        return chip.dry_run.compile(request)
    launcher = _launchers.get(full_key)
    if launcher is not None:
        return launcher
    _check_plain(key)
    if not chip.compiles:
        raise ValueError(f"no kernel can be compiled for {chip}")

    is_built = False

    def build_alone() -> Any:
        nonlocal is_built
        is_built = True
        with _compiling:
            return build()

    started = time.perf_counter()
    with _locks.setdefault(full_key, threading.RLock()):
        if full_key not in _launchers:
            directory = cache_directory()
            if not toolchain.has_compiler():
                _launchers[full_key] = _from_disk(directory, full_key, names)
            else:
                _launchers[full_key] = (
                    build_alone() if directory is None else _through_disk(directory, full_key, build_alone, names)
                )
    waits.append(Wait(str(key[0]), time.perf_counter() - started, is_built))
    return _launchers[full_key]


def compile_kernel(function: Callable, *args: Any, chip: Chip) -> Any:
    """Compile a `cute.jit` host function for `chip` with the tvm-ffi calling convention.

    `args` are fake tensors, scalars of the DSL's types, compile-time values, and last `current_stream()`.

    A kernel compiled for export cannot be called: its host code is generated for the object file only, not also for
    this process, which saves a tenth of the compile time.
    """
    import cutlass.cute as cute

    options = f"--enable-tvm-ffi --gpu-arch {chip.target}"
    if chip.emulated:
        options += " --keep-ptx --generate-line-info"
    return cute.compile(function, *args, options=options, no_jit_engine=_for_export_only.get())


@contextlib.contextmanager
def _for_export() -> Iterator[None]:
    token = _for_export_only.set(True)
    try:
        yield
    finally:
        _for_export_only.reset(token)


def fixed(numbers: tuple) -> Any:
    """Convert a tuple of numbers to a launcher argument once, instead of at every launch."""
    import tvm_ffi

    return tvm_ffi.convert(numbers)


def current_stream() -> Any:
    """Return the stream argument for compilation; at a call it is the caller's current stream."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)


def fake_tensor(dtype: Any, rank: int, *, contiguous: bool = False, align: int = 16) -> Any:
    """Return a compile-time argument for a tensor with `rank` run-time extents and 64-bit strides, the last 1.

    Args:
        dtype: the DSL's element type.
        contiguous: row-major strides derived from the extents, instead of free ones.
        align: alignment of the base address in bytes; checked at every call.
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
    """Return the DSL's type for a torch dtype."""
    import cutlass

    return {
        torch.float16: cutlass.Float16,
        torch.bfloat16: cutlass.BFloat16,
        torch.float32: cutlass.Float32,
        torch.int32: cutlass.Int32,
    }[dtype]


def cache_root() -> Path:
    """Return the directory of the disk cache, which may not exist."""
    home = env.CACHE_DIR.get()
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fa4"


@functools.cache
def cache_directory() -> Path | None:
    """Return the directory of compiled kernels, or None if `FA4_CACHE=0` or no private directory is available.

    `FA4_CACHE_DIR`, else `$XDG_CACHE_HOME/fa4`, else `~/.cache/fa4`; in it one directory per toolchain and source text.
    Without CuTe DSL, the newest of those with this package's sources and tvm-ffi, or None.
    See `fa4.runtime.disk` for permissions and removal.
    """
    if env.CACHE.get() == "0":
        return None
    try:
        root = cache_root()
        if not toolchain.has_compiler():
            return _directory_of_others(root)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk.check_private(root)
        directory = root / fingerprint()
        prepare(directory)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"fa4 keeps no compiled kernels on disk: {error}", stacklevel=2)
        return None
    return directory


def prepare(directory: Path) -> None:
    """Make the directory of this toolchain's kernels."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = toolchain.runtime_library()
    facts = dict(_identity(), versions=dict(toolchain.versions()), cuda=toolchain.toolkit())
    manifest.write_toolchain(directory, facts | dict(runtime_library=None if library is None else str(library)))


def _identity() -> dict[str, str]:
    """What must be the same where kernels are compiled and where they are launched."""
    return dict(sources=sources_digest(), machine=platform.machine(), tvm_ffi=dict(toolchain.versions()).get(_TVM, ""))


def _directory_of_others(root: Path) -> Path | None:
    """Return the newest directory of a root that fits this package, for a process that compiles nothing."""
    folders = disk.folders(root)
    if folders:
        disk.check_private(root)
    wanted = _identity().items()
    fitting = [folder for folder in folders if wanted <= manifest.toolchain(folder).items()]
    return max(fitting, key=lambda folder: folder.stat().st_mtime, default=None)


def current_folder(root: Path) -> str:
    """Return the name of the folder of a root that this process uses; "" for none."""
    if toolchain.has_compiler():
        return fingerprint()
    found = _directory_of_others(root)
    return "" if found is None else found.name


def can_run_kernels(chip: Chip) -> bool:
    """Whether kernels can be compiled for a chip, or a directory has some for this package."""
    return chip.compiles and (toolchain.has_compiler() or cache_directory() is not None)


def _entry(directory: Path, full_key: tuple) -> Path:
    """Return the entry of a key as an object file; linked, it has another suffix."""
    return directory / (hashlib.sha256(repr(full_key).encode()).hexdigest()[:32] + ".o")


def background_lock(directory: Path, request: Request) -> Path:
    """Return the lock file that a process holds while it lets another one compile a kernel."""
    return _entry(directory, request.full_key).with_suffix(".worker.lock")


def _entries(directory: Path, full_key: tuple) -> tuple[Path, Path]:
    """Return the files that an entry may be: linked, and not linked."""
    entry = _entry(directory, full_key)
    return entry.with_suffix(linked.SUFFIX), entry


def _export(kernel: Any, directory: Path, full_key: tuple, names: tuple[str, ...] = ()) -> Path:
    """Write an entry, linked if possible, and return it. Emulated kernels are not linked: they call another runtime.

    The file is written under another name and moved, so that readers never see a part of it.
    """
    entry, unique = _entry(directory, full_key), uuid.uuid4().hex  # among hosts and processes
    exported, library = (entry.with_suffix(f".{unique}{suffix}") for suffix in (".o", linked.SUFFIX))
    try:
        kernel.export_to_c(str(exported), _SYMBOL)
        runtime = None if full_key[1] else _runtime_library(directory)
        if runtime is not None and linked.link(exported, library, runtime):
            exported.unlink()
            exported, entry = library, entry.with_suffix(linked.SUFFIX)
        exported.replace(entry)
        manifest.add(directory, manifest.Kernel.of(entry.stem, full_key, names))
    finally:
        for temporary in (exported, library):
            with contextlib.suppress(OSError):
                temporary.unlink()
    return entry


def _from_disk(directory: Path | None, full_key: tuple, names: tuple[str, ...]) -> Launcher:
    """Return the launcher of a kernel that another process compiled."""
    wanted = manifest.Kernel.of("", full_key, names)
    needed = f"a kernel of {wanted.program} for {wanted.target}, and CuTe DSL, which compiles it, is not installed"
    if directory is None:
        raise MissingKernel(f"this call needs {needed}; no compiled kernels of this version are in {cache_root()}")
    error: Exception | None = None
    entry = _entry(directory, full_key).with_suffix(linked.SUFFIX)
    if entry.exists():
        try:
            launcher = _load(entry)
            disk.used(entry)
            return launcher
        except Exception as failure:
            error = failure
    why = manifest.why_missing(directory, wanted) if error is None else str(error)
    if error is None and entry.with_suffix(".o").exists():
        why = "its kernel is not linked: no linker was where it was compiled"
    raise MissingKernel(f"this call needs {needed}. In {directory}: {why}") from error


def _through_disk(directory: Path, full_key: tuple, build: Callable[[], Any], names: tuple[str, ...] = ()) -> Launcher:
    exported = _entry(directory, full_key)
    # One lock across check, compile and export: of N ranks that start together, one compiles, the rest load.
    with disk.file_lock(disk.lock_of(exported)):
        for entry in _entries(directory, full_key):
            with contextlib.suppress(Exception):  # a missing or unloadable entry is a miss, replaced below
                if entry.exists():
                    launcher = _load(entry)
                    disk.used(entry)
                    return launcher
        _warn_of_miss(directory, full_key, names)
        with _for_export():
            kernel = build()
        try:
            entry = _export(kernel, directory, full_key, names)
            if directory.name == fingerprint():
                disk.prune_daily(directory.parent)
            return _load(entry)  # same path as a warm start; this launcher has less Python overhead
        except Exception as error:  # a full disk must not fail a call
            warnings.warn(f"fa4 could not keep a compiled kernel in {directory}: {error}", stacklevel=2)
        return build()  # again, for this process


def _warn_of_miss(directory: Path, full_key: tuple, names: tuple[str, ...]) -> None:
    """Warn of a kernel that a directory of kernels compiled ahead of time lacks."""
    if disk.is_kept(directory.parent) and not full_key[1]:
        wanted = manifest.Kernel.of("", full_key, names)
        why = manifest.why_missing(directory, wanted)
        warnings.warn(f"fa4 compiles {wanted.program}, which {directory} lacks: {why}", stacklevel=2)


def _runtime_library(directory: Path) -> Path | None:
    return manifest.runtime_library(directory) or toolchain.runtime_library()


def _load(entry: Path) -> Launcher:
    if entry.suffix == linked.SUFFIX:
        runtime = _runtime_library(entry.parent)
        if runtime is None:
            raise OSError(f"{toolchain.RUNTIME_LIBRARY} is neither in {entry.parent} nor installed")
        return linked.load(entry, _SYMBOL, runtime)
    from cutlass.cute.runtime import load_module

    return getattr(load_module(str(entry), enable_tvm_ffi=True), _SYMBOL)


@functools.cache
def fingerprint() -> str:
    """Return a digest of everything outside the key that determines compiled code or its calling convention.

    The text of every source file that is not `HOST_ONLY` and of warpcheck's runtime, versions of CuTe DSL and of
    tvm-ffi, the CUDA toolkit, the machine, and every DSL setting in the environment.
    """
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("CUTE_DSL_"))
    facts = toolchain.versions(), toolchain.toolkit(), platform.machine(), settings, sources_digest()
    runtime = _emulator_runtime()
    emulator = _digest(runtime, _texts(runtime)) if runtime else ""
    return hashlib.sha256(repr((*facts, emulator)).encode()).hexdigest()[:16]


def sources_digest() -> str:
    """Return a digest of this package's part of the fingerprint."""
    return _digest(_PACKAGE, device_sources())


def _digest(root: Path, sources: list[Path]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(os.path.relpath(source, root).encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def device_sources() -> list[Path]:
    """Return the files whose text enters the fingerprint."""
    host_only = {_PACKAGE / name for name in HOST_ONLY}
    return [source for source in _texts(_PACKAGE) if host_only.isdisjoint((source, *source.parents))]


def _texts(folder: Path) -> list[Path]:
    return sorted(source for end in ("*.py", "*.c") for source in folder.rglob(end))


def _emulator_runtime() -> Path | None:
    """Return the folder of the runtime that emulated kernels link to; None without warpcheck."""
    spec = importlib.util.find_spec("warpcheck")
    found = [Path(folder) / "host" for folder in (spec and spec.submodule_search_locations) or ()]
    return next((folder for folder in found if folder.is_dir()), None)


def _check_plain(key: tuple) -> None:
    for value in key:
        if isinstance(value, tuple):
            _check_plain(value)
        elif not isinstance(value, _PLAIN):
            raise TypeError(f"a compile key holds {type(value).__name__} ({value!r}), expected plain values")
