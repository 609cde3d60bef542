"""Modules of CuTe DSL, each imported when one of its attributes is first read.

Modules that a launch imports use these: plans, configurations, and the records that describe operands. So a kernel from
disk is launched without CuTe DSL, also where it is not installed. Device code, which only a compilation imports,
imports CuTe DSL itself. Functions with `cute.jit` or `cute.kernel` belong there, since a decorator reads an attribute.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _Module:
    """A module by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def __repr__(self) -> str:
        return f"<module {self._name!r}, imported on use>"


if TYPE_CHECKING:
    import cutlass as cutlass
    import cutlass.cute as cute
    from cutlass._mlir import ir as ir
    from cutlass._mlir.dialects import llvm as llvm
    from cutlass._mlir.dialects import nvvm as nvvm
    from cutlass._mlir.dialects import vector as vector
    from cutlass.cute import nvgpu as nvgpu
    from cutlass.cute.nvgpu import warpgroup as warpgroup
else:
    cutlass, cute = _Module("cutlass"), _Module("cutlass.cute")
    nvgpu, warpgroup = _Module("cutlass.cute.nvgpu"), _Module("cutlass.cute.nvgpu.warpgroup")
    ir = _Module("cutlass._mlir.ir")
    llvm, nvvm, vector = (_Module(f"cutlass._mlir.dialects.{name}") for name in ("llvm", "nvvm", "vector"))
