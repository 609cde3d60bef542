"""cuTensorMapEncodeTiled of the driver: checks the arguments and encodes a tensor map."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from warpcheck.errors import TensorMapRefused
from warpcheck.machine import load_core


@dataclass(frozen=True, slots=True)
class _Type:
    """CUtensorMapDataType.

    code: element type in the map (tensormap.hpp). bits: size of an element in global memory. padded: 16 narrow elements
    are followed by padding up to 16 bytes.
    """

    code: int
    bits: int
    floating: bool = False
    rounds_to_tf32: bool = False
    padded: bool = False


_TYPES = {
    0: _Type(0, 8), 1: _Type(1, 16), 2: _Type(2, 32), 3: _Type(3, 32), 4: _Type(4, 64), 5: _Type(5, 64),
    6: _Type(6, 16, floating=True), 7: _Type(7, 32, floating=True), 8: _Type(9, 64, floating=True),
    9: _Type(10, 16, floating=True), 10: _Type(8, 32, floating=True),
    11: _Type(7, 32, floating=True, rounds_to_tf32=True), 12: _Type(8, 32, floating=True, rounds_to_tf32=True),
    13: _Type(11, 4), 14: _Type(12, 4, padded=True), 15: _Type(13, 6, padded=True),
}  # fmt: skip
# CUtensorMapSwizzle -> swizzle mode, swizzle atomicity, largest row of the box in bytes
_SWIZZLES = {
    0: (0, 0, None), 1: (1, 0, 32), 2: (2, 0, 64), 3: (3, 0, 128), 4: (3, 1, 128), 5: (3, 2, 128), 6: (3, 3, 128),
    7: (4, 0, 96),
}  # fmt: skip
_PACKED_4_BITS = 13
_INTERLEAVE_NONE, _INTERLEAVE_32B, _SWIZZLE_32B = 0, 2, 1
_MAX_RANK, _MAX_BOX, _MAX_STEP, _MAX_EXTENT, _STRIDE_END = 5, 256, 8, 2**32, 2**40
_MAP_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TiledMap:
    """Arguments of cuTensorMapEncodeTiled, by its names. Strides are in bytes, for dimensions 1 and up."""

    tensor_data_type: int
    tensor_rank: int
    global_address: int
    global_dim: tuple[int, ...]
    global_strides: tuple[int, ...]
    box_dim: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    oob_fill: int

    def check(self) -> None:
        """Check the requirements of the driver's documentation. Raises TensorMapRefused, which names the argument."""
        type_ = _TYPES[self.tensor_data_type]
        alignment = 32 if self.interleave == _INTERLEAVE_32B or type_.padded else 16
        if self.global_address % alignment:
            _refuse("globalAddress", hex(self.global_address), f"a multiple of {alignment}")
        self._check_each("globalDim", self.global_dim, 1, _MAX_EXTENT)
        inner_multiple = 128 if type_.padded else 2 if self.tensor_data_type == _PACKED_4_BITS else 1
        if self.global_dim[0] % inner_multiple:
            _refuse("globalDim[0]", self.global_dim[0], f"a multiple of {inner_multiple} for its data type")
        for i, stride in enumerate(self.global_strides):
            if stride % alignment or not 0 <= stride < _STRIDE_END:
                _refuse(f"globalStrides[{i}]", stride, f"a multiple of {alignment} below 2^40")
        self._check_each("boxDim", self.box_dim, 1, _MAX_BOX)
        first = (
            0 if self.interleave != _INTERLEAVE_NONE else 1
        )  # otherwise the driver ignores the element stride of dimension 0
        self._check_each("elementStrides", self.element_strides, 1, _MAX_STEP, first)
        self._check_inner_box(type_)
        if self.interleave == _INTERLEAVE_32B and self.swizzle != _SWIZZLE_32B:
            _refuse("swizzle", self.swizzle, "SWIZZLE_32B with INTERLEAVE_32B")
        if self.oob_fill and not type_.floating:
            _refuse("oobFill", self.oob_fill, "0 (zeros) for a type that is not a floating-point one")

    def _check_inner_box(self, type_: _Type) -> None:
        if type_.padded:
            if self.box_dim[0] != 128:
                _refuse("boxDim[0]", self.box_dim[0], "128 for a padded data type")
        elif self.interleave == _INTERLEAVE_NONE:
            nbits = self.box_dim[0] * type_.bits
            if nbits % 128:
                _refuse("boxDim[0]", f"{self.box_dim[0]} ({nbits / 8:g} bytes)", "a multiple of 16 bytes")
            span = _SWIZZLES[self.swizzle][2]
            if span is not None and nbits > 8 * span:
                _refuse("boxDim[0]", f"{self.box_dim[0]} ({nbits // 8} bytes)", f"at most the swizzle's {span} bytes")

    @staticmethod
    def _check_each(name: str, values: Sequence[int], least: int, most: int, first: int = 0) -> None:
        for i, value in enumerate(values[first:], first):
            if not least <= value <= most:
                _refuse(f"{name}[{i}]", value, f"{least} to {most}")

    def packed(self) -> bytes:
        type_ = _TYPES[self.tensor_data_type]
        mode, atomicity, _ = _SWIZZLES[self.swizzle]
        steps = self.element_strides
        if self.interleave == _INTERLEAVE_NONE:
            steps = (1, *steps[1:])
        return load_core().encode_tensormap({
            "base": self.global_address,
            "type": type_.code,
            "tf32": type_.rounds_to_tf32,
            "swizzle": mode,
            "atomicity": atomicity,
            "interleave": self.interleave,
            "nan_fill": bool(self.oob_fill),
            "extent": list(self.global_dim),
            "stride": [0, *self.global_strides],
            "box": list(self.box_dim),
            "element_stride": list(steps),
        })  # fmt: skip


def _refuse(name: str, came: object, expected: str) -> None:
    raise TensorMapRefused(f"cuTensorMapEncodeTiled: {name} is {came}, expected {expected}")


def encode_tiled(args: Sequence[int]) -> None:
    """Encode a tensor map and store it through the first argument. Pointers are integers.

    Raises:
        TensorMapRefused: the driver would return CUDA_ERROR_INVALID_VALUE.
    """
    target, type_, rank, base, extents, strides, box, steps, interleave, swizzle, _l2_promotion, fill = args[:12]
    if target % _MAP_ALIGNMENT:
        _refuse("tensorMap", hex(target), f"a multiple of {_MAP_ALIGNMENT}")
    if type_ not in _TYPES:
        _refuse("tensorDataType", type_, f"one of 0 to {max(_TYPES)}")
    if swizzle not in _SWIZZLES:
        _refuse("swizzle", swizzle, f"one of 0 to {max(_SWIZZLES)}")
    if interleave not in (0, 1, 2):
        _refuse("interleave", interleave, "0, 1 or 2")
    least = 1 if interleave == _INTERLEAVE_NONE else 3
    if not least <= rank <= _MAX_RANK:
        _refuse("tensorRank", rank, f"{least} to {_MAX_RANK}")
    tiled = TiledMap(
        type_, rank, base,
        global_dim=tuple((ctypes.c_uint64 * rank).from_address(extents)),
        global_strides=tuple((ctypes.c_uint64 * (rank - 1)).from_address(strides)) if rank > 1 else (),
        box_dim=tuple((ctypes.c_uint32 * rank).from_address(box)),
        element_strides=tuple((ctypes.c_uint32 * rank).from_address(steps)),
        interleave=interleave, swizzle=swizzle, oob_fill=fill,
    )  # fmt: skip
    tiled.check()
    packed = tiled.packed()
    ctypes.memmove(target, packed, len(packed))
