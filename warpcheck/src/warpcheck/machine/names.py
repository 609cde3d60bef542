"""Names of a kernel's warps and barriers.

Barriers in static shared memory have the names of their variables. Other names are comments in the PTX, so that they
are stored together with the text. One line each: `// warpcheck.name ENTRY warp INDEX NAME` or
`// warpcheck.name ENTRY barrier OFFSET NAME`. Offsets are in bytes from the start of dynamic shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LARGEST = 1024  # bytes of a variable that may hold barriers
_LINE = re.compile(r"^// warpcheck\.name (\S+) (warp|barrier) (\d+) (.+)$", re.M)


def with_names(ptx: str, entry: str, warps: Mapping[int, str], barriers: Mapping[int, str]) -> str:
    """Add the names of one entry to the text."""
    lines = [f"// warpcheck.name {entry} warp {warp} {name}" for warp, name in warps.items()]
    lines += [f"// warpcheck.name {entry} barrier {offset} {name}" for offset, name in barriers.items()]
    # The text may end with NUL bytes; the comments are inserted before them.
    text = ptx.rstrip("\0")
    return "\n".join([text.rstrip("\n"), *lines, ""]) + ptx[len(text) :]


def names_in(ptx: str, entry: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of an entry's warps by index, and of its barriers by offset in dynamic shared memory."""
    found: dict[str, dict[int, str]] = {"warp": {}, "barrier": {}}
    for of, kind, number, name in _LINE.findall(ptx):
        if of == entry:
            found[kind][int(number)] = name
    return found["warp"], found["barrier"]


def names_of_variables(offsets: Mapping[str, int], sizes: Mapping[str, int]) -> dict[int, str]:
    """Return the names of places of 8 bytes in small variables of shared memory, by offset in the shared window."""
    found = {}
    for name, nbytes in sizes.items():
        if name in offsets and not offsets[name] % 8 and 8 <= nbytes <= _LARGEST:
            for at in range(0, nbytes - 7, 8):
                found[offsets[name] + at] = plain(name) + (f" + {at}" if at else "")
    return found


def plain(name: str) -> str:
    """Return the name in the source of a variable of a C++ function: "full" for "_ZZ1kE4full"."""
    for m in re.finditer(r"E(\d+)", name if name.startswith("_ZZ") else ""):
        length, rest = int(m[1]), name[m.end() :]
        if re.fullmatch(r"(_\d+)?", rest[length:]) and len(rest) >= length > 0:
            return rest[:length]
    return name
