"""cuTensorMapEncodeTiled of the emulated driver: what the driver's documentation asks for, refused by name."""

import ctypes

import pytest

pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from warpcheck.errors import TensorMapRefused
from warpcheck.host.buffers import aligned_buffer
from warpcheck.host.tensor_map import encode_tiled

U8, F16, TF32, B4, B4_PADDED, B6_PADDED = 0, 6, 11, 13, 14, 15
NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B = range(4)
INTERLEAVE_16B, INTERLEAVE_32B = 1, 2


def encode(**changes) -> bytes:
    """A map of 3 x 100 x 64 halves, row by row in panels of 64 columns, with `changes`."""
    arguments = dict(
        type=F16, rank=3, base=0x10000, extents=(64, 100, 3), strides=(128, 12800), box=(64, 16, 1), steps=(1, 1, 1),
        interleave=NONE, swizzle=SWIZZLE_128B, fill=0, misplaced=0,
    )  # fmt: skip
    arguments.update(changes)
    target = aligned_buffer(192)
    arrays = [
        (kind * len(arguments[name]))(*arguments[name])
        for name, kind in (
            ("extents", ctypes.c_uint64),
            ("strides", ctypes.c_uint64),
            ("box", ctypes.c_uint32),
            ("steps", ctypes.c_uint32),
        )
    ]
    address = ctypes.addressof(target) + arguments["misplaced"]
    encode_tiled([
        address, arguments["type"], arguments["rank"], arguments["base"], *map(ctypes.addressof, arrays),
        arguments["interleave"], arguments["swizzle"], 0, arguments["fill"],
    ])  # fmt: skip
    return ctypes.string_at(address, 128)


@pytest.mark.parametrize(
    "changes, text",
    [
        (dict(misplaced=16), "tensorMap is 0x.*, expected a multiple of 64"),
        (dict(type=16), "tensorDataType is 16, expected one of 0 to 15"),
        (dict(rank=0), "tensorRank is 0, expected 1 to 5"),
        (dict(rank=6), "tensorRank is 6, expected 1 to 5"),
        (dict(rank=2, interleave=INTERLEAVE_16B), "tensorRank is 2, expected 3 to 5"),
        (dict(base=0x10008), "globalAddress is 0x10008, expected a multiple of 16"),
        (dict(base=0x10010, interleave=INTERLEAVE_32B, swizzle=SWIZZLE_32B), "expected a multiple of 32"),
        (dict(extents=(64, 0, 3)), r"globalDim\[1\] is 0, expected 1 to 4294967296"),
        (dict(extents=(64, 100, 2**32 + 1)), r"globalDim\[2\] is 4294967297"),
        (dict(strides=(136, 12800)), r"globalStrides\[0\] is 136, expected a multiple of 16 below 2\^40"),
        (dict(strides=(128, 2**40)), r"globalStrides\[1\] is 1099511627776"),
        (dict(strides=(2**64 - 128, 12800)), r"globalStrides\[0\] is 18446744073709551488"),  # a negative stride
        (dict(box=(64, 257, 1)), r"boxDim\[1\] is 257, expected 1 to 256"),
        (dict(box=(64, 0, 1)), r"boxDim\[1\] is 0, expected 1 to 256"),
        (dict(box=(36, 16, 1)), r"boxDim\[0\] is 36 \(72 bytes\), expected a multiple of 16 bytes"),
        (dict(box=(72, 16, 1)), r"boxDim\[0\] is 72 \(144 bytes\), expected at most the swizzle's 128 bytes"),
        (dict(swizzle=SWIZZLE_64B), "at most the swizzle's 64 bytes"),
        (dict(swizzle=SWIZZLE_32B), "at most the swizzle's 32 bytes"),
        (dict(swizzle=8), "swizzle is 8, expected one of 0 to 7"),
        (dict(steps=(1, 9, 1)), r"elementStrides\[1\] is 9, expected 1 to 8"),
        (dict(steps=(1, 1, 0)), r"elementStrides\[2\] is 0, expected 1 to 8"),
        (dict(interleave=INTERLEAVE_32B, strides=(128, 12800)), "swizzle is 3, expected SWIZZLE_32B"),
        (dict(interleave=3), "interleave is 3, expected 0, 1 or 2"),
        (dict(type=U8, fill=1, swizzle=NONE), r"oobFill is 1, expected 0 \(zeros\)"),
        (dict(type=B4, extents=(63, 100, 3)), r"globalDim\[0\] is 63, expected a multiple of 2"),
        (dict(type=B4_PADDED, extents=(64, 100, 3)), r"globalDim\[0\] is 64, expected a multiple of 128"),
        (dict(type=B6_PADDED, extents=(128, 100, 3), box=(64, 16, 1)), r"boxDim\[0\] is 64, expected 128"),
    ],
)
def test_what_the_driver_refuses(changes, text):
    with pytest.raises(TensorMapRefused, match=text):
        encode(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(swizzle=NONE, box=(256, 256, 1)),
        dict(strides=(0, 2**40 - 16)),  # a row that repeats; the longest stride
        dict(extents=(2**32, 1, 1)),
        dict(steps=(0, 8, 1)),  # that of dimension 0 is ignored
        dict(type=TF32, box=(32, 16, 1), fill=1),
        dict(type=B4_PADDED, extents=(128, 100, 3), box=(128, 16, 1)),
    ],
)
def test_what_it_accepts(changes):
    assert any(encode(**changes))
