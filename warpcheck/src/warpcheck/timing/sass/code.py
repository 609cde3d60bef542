"""Machine code of a cubin as records: instructions with their control bits, labels, and the PTX line of each.

nvdisasm from PyPI's nvidia-cuda-nvdisasm disassembles the code. The cubin names the PTX line of each instruction if
ptxas was called with -lineinfo (CuTe DSL: --generate-line-info). That option does not change the code.
"""

from __future__ import annotations

import functools
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from warpcheck.timing.sass.control import Control
from warpcheck.toolkit import program

_ELF = b"\x7fELF"
_INSTRUCTION = re.compile(
    r"\s*/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P[0-9T]+)\s+)?(?P<opcode>\S+?)(?:\s+(?P<operands>.*?))?\s*;"
    r"\s*/\* 0x[0-9a-f]+ \*/"
)
_UPPER_HALF = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_LINE = re.compile(r'\s*//## File "\.nv_debug_ptx_txt[^"]*", line (\d+)')
_LABEL = re.compile(r"\s*(\.L_\w+|\$\w+):")
_TARGET = re.compile(r"`\(([^)]+)\)")


@dataclass(frozen=True, slots=True)
class MachineInstruction:
    """One instruction of 128 bits.

    offset: bytes from the start of the function. opcode: with its modifiers, such as `MUFU.EX2`. guard: predicate such
    as `!P0`; "" without one. operands: as nvdisasm writes them. line: of the PTX text in the cubin, from 1; None if
    the cubin names none. target: index of the instruction that a branch goes to.
    """

    offset: int
    opcode: str
    guard: str
    operands: str
    control: Control
    line: int | None
    target: int | None = None

    @property
    def root(self) -> str:
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Function:
    """Machine code of a kernel. labels: indices of possible targets of branches."""

    name: str
    instructions: tuple[MachineInstruction, ...]
    labels: frozenset[int]


@functools.cache
def nvdisasm() -> str:
    """Path of the disassembler from the PyPI package nvidia-cuda-nvdisasm.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    path = program("nvdisasm")
    if path is None:
        raise FileNotFoundError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    return path


def disassemble(cubin: Path, *options: str) -> str:
    """Return the output of nvdisasm for a cubin."""
    return subprocess.run([nvdisasm(), *options, str(cubin)], check=True, capture_output=True, text=True).stdout


def cubin_in(binary: bytes) -> bytes:
    """Return a cubin, or the first cubin inside a fat binary.

    Raises:
        ValueError: there is none, or it is compressed.
    """
    start = binary.find(_ELF)
    if start < 0:
        raise ValueError(f"no cubin is in these {len(binary)} bytes: they hold no ELF header")
    return binary[start:]


def embedded_ptx(cubin: bytes) -> str | None:
    """Return the PTX text in a cubin with line information, in which comments and `.loc` are blank lines; else None."""
    for name, offset, size in _sections(cubin):
        if name == ".nv_debug_ptx_txt":
            return cubin[offset : offset + size].decode(errors="replace").replace("\0", "\n")
    return None


_REGISTER_COUNT = bytes(
    (4, 0x2F, 8, 0)
)  # header in .nv.info of EIATTR_REGCOUNT: format, attribute, and size of 8 bytes

_SYMBOL_BYTES = 24


def registers(cubin: bytes, entry: str) -> int:
    """Return the registers of a thread of a kernel. Raises ValueError if the cubin does not say."""
    found = {name: (offset, size) for name, offset, size in _sections(cubin)}
    if not {".nv.info", ".symtab", ".strtab"} - set(found):
        offset, size = found[".nv.info"]
        info, symbols, names = cubin[offset : offset + size], found[".symtab"][0], found[".strtab"][0]
        for i in range(0, size, 4):
            if info[i : i + 4] == _REGISTER_COUNT:  # followed by the index of a symbol, and the registers
                symbol, count = struct.unpack_from("<II", info, i + 4)
                first = names + struct.unpack_from("<I", cubin, symbols + _SYMBOL_BYTES * symbol)[0]
                if cubin[first : cubin.index(b"\0", first)].decode() == entry:
                    return int(count)
    raise ValueError(f"the cubin does not say how many registers {entry} has")


def _sections(cubin: bytes) -> Iterator[tuple[str, int, int]]:
    """Return name, offset and bytes of the sections of an ELF file."""
    at, entry_bytes, count, names_index = (
        struct.unpack_from("<Q", cubin, 0x28)[0],
        *struct.unpack_from("<HHH", cubin, 0x3A),
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, at + i * entry_bytes) for i in range(count)]
    names = sections[names_index][4]
    for name, _, _, _, offset, size, *_ in sections:
        first = names + name
        yield cubin[first : cubin.index(b"\0", first)].decode(), offset, size


@functools.lru_cache(maxsize=16)
def functions(cubin: bytes) -> dict[str, Function]:
    """Return the kernels of a cubin by name.

    Raises:
        FileNotFoundError: nvdisasm is not installed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = disassemble(Path(file.name), "-ndf", "-c", "-hex", "-gp")
    found = {}
    for section in re.split(r"^//-+ \.text\.", text, flags=re.M)[1:]:
        name = re.match(r"\S+", section)
        if name:
            found[name[0]] = _function(name[0], section)
    return found


def _function(name: str, section: str) -> Function:
    read: list[tuple] = []
    labels: dict[str, int] = {}
    line: int | None = None
    for text in section.splitlines():
        if m := _INSTRUCTION.match(text):
            read.append((int(m["offset"], 16), m["opcode"], m["guard"] or "", m["operands"] or "", line))
        elif m := _UPPER_HALF.match(text):
            read[-1] += (Control.decode(int(m[1], 16)),)
        elif m := _LINE.match(text):
            line = int(m[1])
        elif text.lstrip().startswith("//## File"):
            line = None
        elif m := _LABEL.match(text):
            labels[m[1]] = len(read)
            if m[1].startswith("$"):  # a subroutine of the compiler, to which earlier lines do not apply
                line = None
    _drop_padding(read, labels)
    instructions = []
    for offset, opcode, guard, operands, at, control in read:
        target = _TARGET.search(operands)
        to = labels.get(target[1]) if target else None
        instructions.append(MachineInstruction(offset, opcode, guard, operands, control, at, to))
    ends = {index for index in labels.values() if index < len(read)}
    return Function(name, tuple(instructions), frozenset(ends))


def _drop_padding(read: list[tuple], labels: dict[str, int]) -> None:
    """Remove the padding after the last instruction: a branch to itself, and NOPs up to a multiple of 128 bytes."""
    while read and read[-1][1] == "NOP":
        read.pop()
    if read and read[-1][1] == "BRA":
        target = _TARGET.search(read[-1][3])
        if target and labels.get(target[1]) == len(read) - 1:
            read.pop()
