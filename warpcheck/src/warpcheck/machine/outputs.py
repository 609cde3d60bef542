"""Tensors that kernels must write wholly, and the record of what they wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Output:
    """Tensor whose writes launches record. shape, strides: as NumPy's, in bytes; writes: machine -> a byte per byte."""

    name: str
    base: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writes: dict[Any, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, tensor: Any) -> Output:
        """Return the output for a NumPy array or a torch tensor. Raises TypeError, ValueError."""
        if isinstance(tensor, np.ndarray):
            base, itemsize, strides = tensor.ctypes.data, tensor.itemsize, tensor.strides
            shape, dtype = tensor.shape, f"array {_extents(tensor.shape)} {tensor.dtype}"
        elif hasattr(tensor, "data_ptr") and hasattr(tensor, "element_size"):  # torch's, without importing torch
            base, itemsize, shape = tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape)
            strides = tuple(itemsize * stride for stride in tensor.stride())
            dtype = f"tensor {_extents(shape)} {tensor.dtype}"
        else:
            raise TypeError(f"{name} is a {type(tensor).__name__}, expected a NumPy array or a torch tensor")
        if min(strides, default=0) < 0:
            raise ValueError(f"{name} has the strides {strides}, expected none below 0")
        return cls(f"{name}, {dtype}", base, itemsize, tuple(shape), strides)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last."""
        if 0 in self.shape:
            return 0
        return self.itemsize + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides))

    def recorded(self, machine: Any) -> tuple[int, int, int]:
        """Return address, bytes, and the address of the record of `machine`, which the core fills."""
        record = self.writes.setdefault(machine, np.zeros(self.nbytes, np.uint8))
        return self.base, self.nbytes, record.ctypes.data

    def missing(self, machine: Any) -> str:
        """Return a sentence about the elements that no launch of `machine` wrote; empty if there are none."""
        if machine not in self.writes or not self.nbytes:
            return ""
        elements = np.lib.stride_tricks.as_strided(
            self.writes[machine], (*self.shape, self.itemsize), (*self.strides, 1), writeable=False
        )
        left = ~elements.all(-1)
        if not left.any():
            return ""
        first, last = (tuple(map(int, np.argwhere(left)[at])) for at in (0, -1))
        text = f"{self.name}: nobody wrote {left.sum():,} of {left.size:,} elements"
        if left.ndim > 1:
            text += f", in {left.any(-1).sum():,} of {left.any(-1).size:,} rows"
        return f"{text}; the first is {list(first)}, the last {list(last)}"


def _extents(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
