"""What a folder of compiled kernels holds: what it was compiled with, and the key of each kernel.

`toolchain.json` has the digest of the sources, the versions of the compiler and of tvm-ffi, and the place of CuTe DSL's
runtime library. A line of `kernels.jsonl` has an entry's name, target, program and the fields of its configuration. A
process without CuTe DSL finds its folder by the former; if a kernel is missing, the latter says in what the nearest one
differs. A folder without these files, or with lines of removed entries, is valid.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .toolchain import RUNTIME_LIBRARY

TOOLCHAIN, KERNELS = "toolchain.json", "kernels.jsonl"


class Kernel(NamedTuple):
    """A kernel. entry: name of its file, without the suffix. fields: of the configuration, as text, by name."""

    entry: str
    target: str
    program: str
    fields: dict[str, str]
    emulated: bool = False

    @classmethod
    def of(cls, entry: str, full_key: tuple, names: tuple[str, ...]) -> Kernel:
        """Return the record of a key of `jit.compiled`. names: of the key's values after the first, if known."""
        target, emulated, (program, *values) = full_key
        names = names or tuple(f"value {i}" for i in range(1, len(values) + 1))
        return cls(entry, target, str(program), dict(zip(names, map(str, values))), emulated)

    def differences(self, other: Kernel) -> list[str]:
        """Return the fields in which the other kernel differs from this one, as text."""
        names = dict.fromkeys((*self.fields, *other.fields))
        return [
            f"{name} {other.fields.get(name)} instead of {self.fields.get(name)}"
            for name in names
            if self.fields.get(name) != other.fields.get(name)
        ]


def write_toolchain(folder: Path, facts: dict[str, Any]) -> None:
    """Write what the kernels of a folder are compiled with, unless it is there. A folder that cannot be written has
    none."""
    file = folder / TOOLCHAIN
    with contextlib.suppress(OSError):
        if not file.exists():
            temporary = folder / f"{TOOLCHAIN}.{uuid.uuid4().hex}"
            temporary.write_text(json.dumps(facts, indent=1) + "\n")
            temporary.replace(file)


def toolchain(folder: Path) -> dict[str, Any]:
    """Return what `write_toolchain` wrote; empty if it wrote nothing."""
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads((folder / TOOLCHAIN).read_text())
        return facts if isinstance(facts, dict) else {}
    return {}


def runtime_library(folder: Path) -> Path | None:
    """Return CuTe DSL's runtime library for the kernels of a folder: the copy in it, else where it was installed."""
    shipped, installed = folder / RUNTIME_LIBRARY, toolchain(folder).get("runtime_library")
    if shipped.is_file():
        return shipped
    return Path(installed) if installed and Path(installed).is_file() else None


def add(folder: Path, kernel: Kernel) -> None:
    """Add a kernel's line, with concurrent writers; a folder that cannot be written gets none."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / KERNELS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, (json.dumps(kernel._asdict()) + "\n").encode())
        finally:
            os.close(fd)


def kernels(folder: Path) -> Iterator[Kernel]:
    """Yield the kernels of a folder that are there, each once."""
    with contextlib.suppress(OSError):
        for line in dict.fromkeys((folder / KERNELS).read_text().splitlines()):
            with contextlib.suppress(ValueError, TypeError):  # a line that was cut short
                kernel = Kernel(**json.loads(line))
                if any((folder / f"{kernel.entry}{suffix}").exists() for suffix in (".so", ".o")):
                    yield kernel


def why_missing(folder: Path, wanted: Kernel) -> str:
    """Return why a folder has no entry for a kernel, with the nearest one that it has."""
    of_target = [kernel for kernel in kernels(folder) if (kernel.target, kernel.emulated) == wanted[1::3]]
    if not of_target:
        return f"no kernel there is for {wanted.target}"
    alike = [kernel for kernel in of_target if kernel.program == wanted.program]
    if not alike:
        programs = ", ".join(sorted({kernel.program for kernel in of_target}))
        return f"no kernel there is of {wanted.program}; for {wanted.target} it has {programs}"
    nearest = min((wanted.differences(kernel) for kernel in alike), key=len)
    if not nearest:
        return "the file of this kernel cannot be loaded"
    return f"of {len(alike)} of {wanted.program} the nearest has {', '.join(nearest)}"
