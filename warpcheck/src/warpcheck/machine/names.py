"""Names of a kernel's warps and barriers, as comments in its PTX: they go wherever the text goes, to disk too.

One line each: `// warpcheck.name ENTRY warp INDEX NAME`, `// warpcheck.name ENTRY barrier OFFSET NAME`, the offset in
bytes from the start of dynamic shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LINE = re.compile(r"^// warpcheck\.name (\S+) (warp|barrier) (\d+) (.+)$", re.M)


def with_names(ptx: str, entry: str, warps: Mapping[int, str], barriers: Mapping[int, str]) -> str:
    """The text with the names of one of its entries added."""
    lines = [f"// warpcheck.name {entry} warp {warp} {name}" for warp, name in warps.items()]
    lines += [f"// warpcheck.name {entry} barrier {offset} {name}" for offset, name in barriers.items()]
    # A tail of NULs may end the text; the comments come before it.
    text = ptx.rstrip("\0")
    return "\n".join([text.rstrip("\n"), *lines, ""]) + ptx[len(text) :]


def names_in(ptx: str, entry: str) -> tuple[dict[int, str], dict[int, str]]:
    """Names of the entry's warps by index, and of its barriers by offset in dynamic shared memory."""
    found: dict[str, dict[int, str]] = {"warp": {}, "barrier": {}}
    for of, kind, number, name in _LINE.findall(ptx):
        if of == entry:
            found[kind][int(number)] = name
    return found["warp"], found["barrier"]
