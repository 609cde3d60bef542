"""A GPU in software: CuTe DSL kernels for sm_80 to sm_103 run on CPU tensors, with every check a chip cannot make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa4.emulator.context import Gpu, emulate

__all__ = ["Gpu", "emulate"]


def __getattr__(name: str) -> Any:
    # CuTe DSL and torch are imported when an emulation starts, not when the machine alone is used.
    if name in __all__:
        from fa4.emulator import context

        return getattr(context, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
