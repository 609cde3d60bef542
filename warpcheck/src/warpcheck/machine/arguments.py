"""Arguments of a raw launch: conversion of arrays, numbers and bytes to the parameters of a PTX entry."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from warpcheck.machine.machine import Allocation
from warpcheck.machine.ptx import Param

_FLOATS = {"f16": "<e", "f32": "<f", "f64": "<d"}


def packed(params: Sequence[Param], args: Sequence[Any]) -> tuple[tuple[bytes, ...], list[Allocation]]:
    """Return the bytes of each parameter, and the memory to which pointers refer."""
    if len(args) != len(params):
        names = ", ".join(f"{param.name} (.{param.type})" for param in params)
        raise TypeError(f"{len(args)} arguments, expected {len(params)}: {names}")
    raw, memory = [], []
    for index, (param, arg) in enumerate(zip(params, args)):
        where = _memory(arg, f"argument {index}")
        if where is not None:
            if param.nbytes != 8:
                raise TypeError(f"argument {index} is an array, but {param.name} is a .{param.type} and no pointer")
            address, allocation = where
            raw.append(struct.pack("<Q", address))
            if allocation.nbytes:
                memory.append(allocation)
        else:
            raw.append(_value(param, arg, index))
    return tuple(raw), memory


def _memory(arg: Any, name: str) -> tuple[int, Allocation] | None:
    """Return address and allocation of an array; None if the argument is no array."""
    if isinstance(arg, np.ndarray):
        base: Any = arg
        while isinstance(base.base, np.ndarray):
            base = base.base
        low, high = np.lib.array_utils.byte_bounds(base)
        shape = "x".join(map(str, base.shape)) or "scalar"
        return arg.ctypes.data, Allocation(low, high - low, f"{name}, array {shape} {base.dtype}")
    if hasattr(arg, "data_ptr") and hasattr(arg, "untyped_storage"):  # a torch tensor, without importing torch
        storage = arg.untyped_storage()
        shape = "x".join(map(str, arg.shape)) or "scalar"
        return arg.data_ptr(), Allocation(storage.data_ptr(), storage.nbytes(), f"{name}, tensor {shape} {arg.dtype}")
    return None


def _value(param: Param, arg: Any, index: int) -> bytes:
    if isinstance(arg, (bytes, bytearray)):
        if len(arg) != param.nbytes:
            raise TypeError(f"argument {index} has {len(arg)} bytes, expected the {param.nbytes} of {param.name}")
        return bytes(arg)
    if arg is None and param.nbytes == 8:
        return bytes(8)  # a null pointer
    if not isinstance(arg, (bool, int, float, np.generic)):
        raise TypeError(f"argument {index} is a {type(arg).__name__}, expected an array, a number or bytes")
    if param.type in _FLOATS:
        return struct.pack(_FLOATS[param.type], float(arg))
    if isinstance(arg, np.floating) and arg.dtype.itemsize == param.nbytes:
        return arg.tobytes()  # untyped parameters that hold a float
    if float(arg) != int(arg):
        raise TypeError(
            f"argument {index} is {arg!r}, but {param.name} is a .{param.type}: pass the bits, or np.float32"
        )
    value, bits = int(arg), 8 * param.nbytes
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise TypeError(f"argument {index} is {value}, which does not fit the {bits} bits of {param.name}")
    return (value & ((1 << bits) - 1)).to_bytes(param.nbytes, "little")


_DTYPES: dict[str, Any] = {
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
}  # fmt: skip
_FILLS = ("random", "zeros", "ones", "arange")
_ARRAY = re.compile(rf"({'|'.join(_DTYPES)})\[(\d+(?:x\d+)*)\](?:=(\w+))?")
_NUMBER = re.compile(r"(?:(\w+)=)?([-+\w.]+)")


def written(text: str, rng: np.random.Generator) -> np.ndarray | np.generic | int | float:
    """Parse an argument of the command line: "f32[64x64]" (random), "i32[256]=zeros", "x.npy", "7", "f32=0.5".

    Raises ValueError, which names the expected forms.
    """
    if text.endswith(".npy"):
        return np.load(text)
    if match := _ARRAY.fullmatch(text):
        return _filled(match[1], tuple(map(int, match[2].split("x"))), match[3] or "random", rng)
    if (match := _NUMBER.fullmatch(text)) and (match[1] is None or match[1] in _DTYPES):
        with contextlib.suppress(ValueError):
            value = _number(match[2])
            return value if match[1] is None else _DTYPES[match[1]](value)
    raise ValueError(f"{text!r}: expected a file.npy, a number, or TYPE[SHAPE]=FILL such as f32[64x64]=zeros")


def _number(text: str) -> int | float:
    try:
        return int(text, 0)
    except ValueError:
        return float(text)


def _filled(type_: str, shape: tuple[int, ...], fill: str, rng: np.random.Generator) -> np.ndarray:
    if fill not in _FILLS:
        raise ValueError(f"{fill!r}: expected a fill of {', '.join(_FILLS)}")
    dtype = np.dtype(_DTYPES[type_])
    if type_ == "bf16":  # NumPy has no bf16: take the upper half of a float32
        wide = _filled("f32", shape, fill, rng).view(np.uint32)
        return (wide >> 16).astype(np.uint16)
    if fill == "arange":
        return np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    if fill == "random":
        return (rng.normal(size=shape) if dtype.kind == "f" else rng.integers(0, 100, shape)).astype(dtype)
    return np.full(shape, fill == "ones", dtype)
