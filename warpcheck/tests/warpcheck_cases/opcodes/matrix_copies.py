"""ldmatrix and stmatrix of elements of 16, 8, 6 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from warpcheck_cases.opcodes.case import Case, Inputs, element_address, entry

_FORMS = [(count, trans) for count in (1, 2, 4) for trans in ("", ".trans")]


_CHIPS = {
    "sm_80": ("sm_80", "sm_90a", "sm_100a"),
    "sm_90a": ("sm_90a", "sm_100a"),
    "sm_100a": ("sm_100a", "sm_120a", "sm_121a"),
}


def _copy(name: str, target: str, lines: list[str], expected: Callable[..., np.ndarray]) -> Case:
    """A warp whose lane has its row of 16 bytes of a buffer at %r1, and 128 words of input."""
    body = ["  mov.u32 %r0, buffer;", "  mad.lo.u32 %r1, %i, 16, %r0;", *lines]
    ptx = entry(target, "\n".join(body), pointers=1, shared=".shared .align 128 .b8 buffer[512];")
    return Case(name, ptx, _words(128), expected, target=target, chips=_CHIPS[target])


def _load(opcode: str, names: list[str]) -> list[str]:
    """Copy in0 to the buffer, a row of 16 bytes per lane, and store what an ldmatrix leaves in its registers."""
    return [
        element_address("%in0", "%d0", 16),
        "  ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%d0];",
        "  st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};",
        "  bar.warp.sync 0xffffffff;",
        f"  {opcode} {{{', '.join(names)}}}, [%r1];",
        element_address("%out", "%d1", 4 * len(names)),
        *(f"  st.global.b32 [%d1+{4 * j}], {name};" for j, name in enumerate(names)),
    ]


def _ldmatrix(count: int, trans: str) -> Case:
    """Each lane names a row of 16 bytes; lane l receives elements 2(l%4), 2(l%4)+1 of row l/4 of each matrix."""
    names = [f"%r{10 + j}" for j in range(count)]
    lines = _load(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16", names)

    def expected(a: np.ndarray) -> np.ndarray:
        matrices = a.view(np.uint16).reshape(4, 8, 8)[:count]
        if trans:
            matrices = matrices.transpose(0, 2, 1)
        lanes = [matrices[:, lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2] for lane in range(32)]
        return np.ascontiguousarray(np.stack(lanes)).view(np.uint32).reshape(-1)

    return _copy(f"ldmatrix.x{count}{trans}", "sm_80", lines, expected)


def _words(count: int) -> Callable[[np.random.Generator], Inputs]:
    return lambda rng: (rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32),)


def _store(opcode: str, names: list[str]) -> list[str]:
    """Fill the buffer with the numbers of the lanes, and store the rows that a stmatrix of in0 leaves there."""
    return [
        "  st.shared.v4.b32 [%r1], {%i, %i, %i, %i};",
        "  bar.warp.sync 0xffffffff;",
        element_address("%in0", "%d0", 4 * len(names)),
        *(f"  ld.global.b32 {name}, [%d0+{4 * j}];" for j, name in enumerate(names)),
        f"  {opcode} [%r1], {{{', '.join(names)}}};",
        "  bar.warp.sync 0xffffffff;",
        "  ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1];",
        element_address("%out", "%d1", 16),
        "  st.global.v4.b32 [%d1], {%r2, %r3, %r4, %r5};",
    ]


def _stmatrix(count: int, trans: str) -> Case:
    """The inverse of `_ldmatrix`: each lane stores its elements, and reads its row of 16 bytes."""
    names = [f"%r{10 + j}" for j in range(count)]
    lines = _store(f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16", names)

    def expected(a: np.ndarray) -> np.ndarray:
        elements = a[: 32 * count].copy().view(np.uint16).reshape(32, count, 2)
        out = np.repeat(np.arange(32, dtype=np.uint32), 4).view(np.uint16).reshape(4, 8, 8).copy()
        for lane in range(32):
            for j in range(count):
                for half in range(2):
                    row, column = lane // 4, 2 * (lane % 4) + half
                    if trans:
                        row, column = column, row
                    out[j, row, column] = elements[lane, j, half]
        return out.reshape(-1).view(np.uint32)

    return _copy(f"stmatrix.x{count}{trans}", "sm_90a", lines, expected)


def _ldmatrix_narrow(rows: int, count: int, bits: int) -> Case:
    """Matrices of 16 elements a row; 16 x 16 ones are transposed. A register holds 4 neighbours of a row.

    Elements of 4 and 6 bits are stored without gaps in the first bytes of a row, and loaded to bytes: 4 bits to bits 2
    to 5, 6 bits to bits 0 to 5.
    """
    source = {8: "b8", 6: "b8x16.b6x16_p32", 4: "b8x16.b4x16_p64"}[bits]
    opcode = f"ldmatrix.sync.aligned.m{rows}n16.x{count}{'.trans' if rows == 16 else ''}.shared.{source}"
    lines = _load(opcode, [f"%r{10 + j}" for j in range(count * rows // 8)])

    def expected(a: np.ndarray) -> np.ndarray:
        stream = np.unpackbits(a.view(np.uint8).reshape(32, 16), axis=1, bitorder="little")[:, : 16 * bits]
        elements = np.packbits(stream.reshape(32, 16, bits), axis=2, bitorder="little")[..., 0]
        matrices = (elements << 2 if bits == 4 else elements)[: count * rows].reshape(count, rows, 16)
        if rows == 16:
            matrices = matrices.transpose(0, 2, 1)
        lanes = np.ascontiguousarray(matrices).reshape(-1, 32, 4).transpose(1, 0, 2)
        return np.ascontiguousarray(lanes).view(np.uint32).reshape(-1)

    return _copy(opcode, "sm_100a", lines, expected)


def _stmatrix_narrow(count: int) -> Case:
    """Bytes b of lane l go to row 2(l%4) + b%2, column l/4 + 8(b/2) of the 8 rows of a matrix."""
    opcode = f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8"
    lines = _store(opcode, [f"%r{10 + j}" for j in range(count)])

    def expected(a: np.ndarray) -> np.ndarray:
        out = np.repeat(np.arange(32, dtype=np.uint32), 4).view(np.uint8).reshape(4, 8, 16)
        elements = a[: 32 * count].copy().view(np.uint8).reshape(32, count, 4)
        for lane, j, byte in np.ndindex(elements.shape):
            out[j, 2 * (lane % 4) + byte % 2, lane // 4 + 8 * (byte // 2)] = elements[lane, j, byte]
        return out.reshape(-1).view(np.uint32)

    return _copy(opcode, "sm_100a", lines, expected)


CASES = [
    *(_ldmatrix(*form) for form in _FORMS),
    *(_stmatrix(*form) for form in _FORMS),
    *(_ldmatrix_narrow(16, count, bits) for count in (1, 2) for bits in (8, 6, 4)),
    *(_ldmatrix_narrow(8, count, bits) for count in (1, 2, 4) for bits in (6, 4)),
    *(_stmatrix_narrow(count) for count in (1, 2, 4)),
]
