"""Compiled code by handle: the PTX of a binary, loaded libraries, and their kernels.

Handles live as long as the process, like those of a driver: a function that was compiled under one `emulate` runs
under every later one of the same chip.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass

from warpcheck.errors import EmulationError
from warpcheck.host.assembly import Unassembled, assembled
from warpcheck.machine.ptx import entries

_FATBIN_MAGIC = 0xBA55ED50
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)\s+(?:\.ptr\s+(?:\.[a-z]+\s+)*(?:\.align\s+\d+\s+)?)?"
    r"[\w$]+(?:\[(\d+)\])?"
)


_machine_code: dict[str, bytes | Unassembled] = {}  # by digest of the PTX


@dataclass(frozen=True)
class Kernel:
    """Kernel of a PTX text, with the size in bytes of each parameter."""

    ptx: str
    entry: str
    parameter_bytes: tuple[int, ...]


def fatbin_size(header: bytes) -> int:
    """Return the size of a fat binary from its first 16 bytes: magic, version, size of the header, size of the rest."""
    magic, _, header_bytes, rest = struct.unpack_from("<IHHQ", header)
    if magic != _FATBIN_MAGIC:
        raise ValueError(f"not a CUDA fat binary: its magic is {magic:#x}, expected {_FATBIN_MAGIC:#x}")
    return header_bytes + rest


def fatbins_in(data: bytes) -> list[bytes]:
    """Return the fat binaries embedded in `data`."""
    magic = struct.pack("<I", _FATBIN_MAGIC)
    found = []
    start = data.find(magic)
    while start >= 0:
        size = fatbin_size(data[start : start + 16])
        found.append(data[start : start + size])
        start = data.find(magic, start + size)
    return found


def parameter_bytes(ptx: str, entry: str) -> tuple[int, ...]:
    """Return the size in bytes of each parameter of a PTX entry. Raises EmulationError if there is no such entry."""
    match = re.search(rf"\.entry\s+{re.escape(entry)}\s*(?:\((.*?)\))?\s*[.{{]", ptx, re.DOTALL)
    if match is None:
        raise EmulationError(f"the PTX has no entry {entry}, only {', '.join(entries(ptx))}")
    return tuple(int(bits) // 8 * int(count or 1) for bits, count in _PARAMETER.findall(match.group(1) or ""))


class Modules:
    """Compiled binaries, loaded libraries and kernels."""

    def __init__(self) -> None:
        self._ptx: dict[str, str] = {}
        self._binaries: list[bytes] = []
        self._libraries: dict[int, str] = {}
        self._kernels: dict[int, Kernel] = {}
        self._handles: dict[tuple[int, str], int] = {}
        self._last_handle = 0x1000

    def register(self, binary: bytes, ptx: str, code: Unassembled | None = None) -> None:
        """Register the PTX from which a fat binary was compiled.

        code: module that assembles to machine code, if the binary has none.
        """
        digest = _digest(binary)
        if digest not in self._ptx:
            self._binaries.append(binary)
        self._ptx[digest] = ptx
        _machine_code[_digest(ptx.encode())] = code or binary

    def ptx_of(self, binary: bytes) -> str:
        """Return the PTX of a fat binary. Raises EmulationError if its compilation was not emulated."""
        if _digest(binary) not in self._ptx:
            raise EmulationError("a kernel is exported whose PTX the emulator has not seen")
        return self._ptx[_digest(binary)]

    def load(self, code: bytes) -> int:
        """Return the handle of a new library, from a fat binary or a cubin inside one.

        Raises:
            EmulationError: the compilation of the binary was not emulated.
        """
        ptx = self._ptx.get(_digest(code))
        if ptx is None:
            whole = next((binary for binary in self._binaries if code in binary), None)
            if whole is None:
                raise EmulationError(
                    "a kernel was loaded whose PTX the emulator has not seen: compile it inside `with emulate(...)`"
                )
            ptx = self._ptx[_digest(whole)]
        handle = self._new_handle()
        self._libraries[handle] = ptx
        return handle

    def unload(self, library: int) -> None:
        self._libraries.pop(library, None)

    def entries(self, library: int) -> list[str]:
        return entries(self._libraries[library])

    def kernel_handle(self, library: int, entry: str) -> int:
        """Return the handle of an entry of a loaded library; it stays the same."""
        if (library, entry) not in self._handles:
            ptx = self._libraries[library]
            kernel = Kernel(ptx, entry, parameter_bytes(ptx, entry))
            self._handles[library, entry] = self._new_handle()
            self._kernels[self._handles[library, entry]] = kernel
        return self._handles[library, entry]

    def kernel(self, handle: int) -> Kernel:
        return self._kernels[handle]

    def _new_handle(self) -> int:
        self._last_handle += 0x10
        return self._last_handle


def machine_code(ptx: str) -> bytes | None:
    """Return the fat binary of a PTX text; None if the emulator did not see its compilation."""
    code = _machine_code.get(_digest(ptx.encode()))
    return assembled(code) if isinstance(code, Unassembled) else code


def unassembled(ptx: str) -> Unassembled | None:
    """Return the module to assemble for a PTX text; None if it is assembled or the emulator did not see it."""
    code = _machine_code.get(_digest(ptx.encode()))
    return code if isinstance(code, Unassembled) else None


def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()
