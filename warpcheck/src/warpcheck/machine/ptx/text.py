"""Functions on PTX text: names of kernels, lists with brackets, and literals (ISA 4.5)."""

from __future__ import annotations

import functools
import re
import struct

from warpcheck.machine.ptx.records import Imm

_BRACKET = re.compile(r"[{}()\[\]]")
_BRACKET_OR_COMMA = re.compile(r"[{}()\[\],]")
_INT = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?$")


def entries(ptx: str) -> list[str]:
    """Names of the kernels of a PTX text, in order."""
    return re.findall(r"\.entry\s+([\w$]+)", ptx)


def split_top(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    if _BRACKET.search(text) is None:
        parts = text.split(",")
    else:
        parts, depth, start = [], 0, 0
        for m in _BRACKET_OR_COMMA.finditer(text):
            c = m[0]
            if c in "{[(":
                depth += 1
            elif c in "}])":
                depth -= 1
            elif depth == 0:
                parts.append(text[start : m.start()])
                start = m.end()
        parts.append(text[start:])
    parts = [part.strip() for part in parts]
    return parts if parts != [""] else []


@functools.lru_cache(maxsize=1 << 16)
def parse_literal(text: str) -> Imm | None:
    """Literal of a text, or None if the text is no literal."""
    sign = -1 if text.startswith("-") else 1
    body = text.lstrip("+-")
    if body[:2] in ("0f", "0F") and len(body) == 10:
        bits = int(body[2:], 16)
        return Imm(bits ^ (0x80000000 if sign < 0 else 0), 32)
    if body[:2] in ("0d", "0D") and len(body) == 18:
        bits = int(body[2:], 16)
        return Imm(bits ^ ((1 << 63) if sign < 0 else 0), 64)
    if _INT.match(text):
        body = body.rstrip("U")
        if body[:2] in ("0x", "0X"):
            return Imm(sign * int(body, 16))
        if body[:2] in ("0b", "0B"):
            return Imm(sign * int(body, 2))
        octal = len(body) > 1 and body[0] == "0"
        return Imm(sign * int(body, 8 if octal else 10))
    if _FLOAT.match(text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return None


def float_bytes(literal: Imm, element: int) -> bytes:
    """Bytes of a floating-point literal as an element of a variable; `element` is its size in bytes."""
    raw = literal.value.to_bytes(literal.float_bits // 8, "little")
    if len(raw) == element:
        return raw
    value = struct.unpack("<d" if literal.float_bits == 64 else "<f", raw)[0]
    return struct.pack("<d" if element == 8 else "<f", value)
