"""The driver's cuTensorMapEncodeTiled: packs a tensor map from the caller's arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from fa4.emulator.machine import load_core

# CUtensorMapDataType -> element type of the map (tensormap.hpp), whether loads round to tf32
_TYPES = {
    0: (0, False), 1: (1, False), 2: (2, False), 3: (3, False), 4: (4, False), 5: (5, False), 6: (6, False),
    7: (7, False), 8: (9, False), 9: (10, False), 10: (8, False), 11: (7, True), 12: (8, True), 13: (11, False),
    14: (12, False), 15: (13, False),
}  # fmt: skip
# CUtensorMapSwizzle -> swizzle mode, swizzle atomicity
_SWIZZLES = {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (3, 0), 4: (3, 1), 5: (3, 2), 6: (3, 3), 7: (4, 0)}


def encode_tiled(args: Sequence[int]) -> None:
    """args: those of cuTensorMapEncodeTiled, pointers as integers. The map is written through the first one."""
    target, type_, rank, base, extents, strides, box, steps, interleave, swizzle, _l2_promotion, fill = args[:12]
    if not 1 <= rank <= 5:
        raise ValueError(f"cuTensorMapEncodeTiled: rank is {rank}, expected 1 to 5")
    if type_ not in _TYPES or swizzle not in _SWIZZLES:
        raise ValueError(f"cuTensorMapEncodeTiled: unknown data type {type_} or swizzle mode {swizzle}")
    element, tf32 = _TYPES[type_]
    mode, atomicity = _SWIZZLES[swizzle]
    packed = load_core().units.encode_tensormap({
        "base": base,
        "type": element,
        "tf32": tf32,
        "swizzle": mode,
        "atomicity": atomicity,
        "interleave": interleave,
        "nan_fill": bool(fill),
        "extent": list((ctypes.c_uint64 * rank).from_address(extents)),
        "stride": [0, *((ctypes.c_uint64 * (rank - 1)).from_address(strides) if rank > 1 else ())],
        "box": list((ctypes.c_uint32 * rank).from_address(box)),
        "element_stride": list((ctypes.c_uint32 * rank).from_address(steps)),
    })  # fmt: skip
    ctypes.memmove(target, packed, len(packed))
