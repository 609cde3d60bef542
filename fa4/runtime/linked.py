"""Compiled kernels as shared libraries, which a process loads without CuTe DSL.

CuTe DSL exports an object file. The linker of the machine that compiles makes a shared library of it. This one depends
on two libraries: tvm-ffi's, and CuTe DSL's runtime library, which wraps the CUDA runtime and holds no compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from .toolchain import RUNTIME_LIBRARY

SUFFIX = ".so"
# At the end of a complete file. To load a truncated library may end the process instead of raising an error.
_MARK = b"fa4.kernel.linked"


@functools.cache
def linker() -> str | None:
    """Return the machine's linker, or a C compiler that calls it; None if there is none."""
    return next(filter(None, map(shutil.which, ("ld", "cc", "gcc", "clang"))), None)


def link(exported: Path, library: Path, runtime: Path) -> bool:
    """Link an object file; return whether that was possible. runtime: CuTe DSL's runtime library."""
    import tvm_ffi.libinfo

    command = linker()
    if command is None:
        return False
    driver = [] if os.path.basename(command) == "ld" else ["-nostdlib"]
    libraries = [str(runtime), tvm_ffi.libinfo.find_libtvm_ffi()]
    done = subprocess.run(
        [command, *driver, "-shared", "-o", str(library), str(exported), *libraries], capture_output=True, check=False
    )
    if done.returncode:
        library.unlink(missing_ok=True)
        return False
    with library.open("ab") as file:
        file.write(_MARK)
    return True


@functools.cache
def _dependencies(runtime: Path) -> list[ctypes.CDLL]:
    """Load what kernels depend on; they find it by its name. Kept for the life of the process."""
    import tvm_ffi.libinfo

    return [ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()), ctypes.CDLL(str(runtime))]


def load(library: Path, symbol: str, runtime: Path) -> Callable[..., None]:
    """Return the tvm-ffi function of a linked kernel.

    Raises:
        OSError: the file is truncated, or it or the runtime library cannot be loaded.
    """
    import tvm_ffi

    with library.open("rb") as file:
        file.seek(-min(len(_MARK), library.stat().st_size), os.SEEK_END)
        if file.read() != _MARK:
            raise OSError(f"{library} is truncated")
    _dependencies(runtime)
    loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOW)
    with contextlib.suppress(AttributeError):
        address = ctypes.cast(getattr(loaded, f"__tvm_ffi_{symbol}"), ctypes.c_void_p).value
        return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=loaded)
    raise OSError(f"{library} has no function {symbol}")


def ship(folder: Path, runtime: Path) -> None:
    """Copy the runtime library into a folder of kernels, unless it is there."""
    target = folder / RUNTIME_LIBRARY
    if not target.exists():
        temporary = target.with_name(f"{RUNTIME_LIBRARY}.{os.getpid()}")
        shutil.copyfile(runtime, temporary)
        temporary.replace(target)
