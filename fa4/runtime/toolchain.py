"""What compiles kernels and what runs them: CuTe DSL, its CUDA toolkit and tvm-ffi, found without importing them.

A launch of a kernel from disk needs tvm-ffi and CuTe DSL's runtime library alone; importing CuTe DSL takes longer than
all else of a first call.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from pathlib import Path

from . import torch_internals

# Each of these distributions affects the code or its calling convention.
_DISTRIBUTIONS = re.compile(r"(nvidia_cutlass_dsl\w*|apache_tvm_ffi\w*)-([^-]+)(-.*)?\.(dist-info|egg-info)")
_FLAVOR = re.compile(r"_cutlass_ir\.cu(\d+)\..*")
COMPILER = "cutlass.cute"
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"


@functools.cache
def is_installed(module: str) -> bool:
    """Return whether a module can be imported. Imports nothing, neither the module nor its package."""
    top, *parts = module.split(".")
    folders = _folders(top)
    if folders is None:
        return False
    for part in parts:
        inner = [folder / part for folder in folders]
        if not any(x.is_dir() or any(x.parent.glob(f"{part}.*")) for x in inner):
            return False
        folders = inner
    return True


def _folders(package: str) -> list[Path] | None:
    """Return the folders of a package; None if no module has that name."""
    spec = importlib.util.find_spec(package)
    return None if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def has_compiler() -> bool:
    return is_installed(COMPILER)


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Return name and version of each installed distribution of CuTe DSL and of tvm-ffi."""
    found: dict[str, str] = {}
    for folder in reversed(sys.path):  # the first one counts
        names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else ()
        found |= {m[1].replace("_", "-"): m[2] for m in map(_DISTRIBUTIONS.fullmatch, names) if m}
    return tuple(sorted(found.items()))


def _flavors() -> dict[int, Path]:
    """Return the installed builds of CuTe DSL by major version of CUDA, each with the folder of its libraries."""
    found: dict[int, Path] = {}
    for folder in _folders("cutlass") or ():
        libraries = folder / "_mlir" / "_mlir_libs"
        for name in map(_FLAVOR.fullmatch, os.listdir(libraries) if libraries.is_dir() else ()):
            if name:
                found[int(name[1])] = folder.parents[1] / f"cu{name[1]}" / "lib"
    return found


@functools.cache
def toolkit() -> int:
    """Return the major CUDA version of the build of CuTe DSL that a process uses; 0 without CuTe DSL.

    Of several builds, CuTe DSL takes the newest that the driver knows. Without a driver it is asked, that is, imported.
    """
    flavors = sorted(_flavors())
    if len(flavors) == 1 or not has_compiler():
        return flavors[0] if flavors else 0
    driver = torch_internals.cuda_of_driver()
    known = [flavor for flavor in flavors if flavor <= driver]
    if known:
        return known[-1]
    from cutlass.base_dsl.version_info import CUDA_VERSION

    return CUDA_VERSION.major


def runtime_library() -> Path | None:
    """Return the runtime library of the installed CuTe DSL, to which the host code of its kernels links."""
    folder = _flavors().get(toolkit())
    candidates = [] if folder is None else [folder / RUNTIME_LIBRARY, folder.parents[1] / "lib" / RUNTIME_LIBRARY]
    return next((path for path in candidates if path.is_file()), None)
