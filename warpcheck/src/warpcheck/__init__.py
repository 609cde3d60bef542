"""A GPU in software: PTX for sm_80 to sm_103, from CuTe DSL or any other compiler, runs on CPU memory, with every check
that a chip cannot make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warpcheck.emulated import Emulated
from warpcheck.machine import Checks, EmulationOptions

if TYPE_CHECKING:
    from warpcheck.context import Gpu, emulate

__all__ = ["Checks", "Emulated", "EmulationOptions", "Gpu", "emulate"]


def __getattr__(name: str) -> Any:
    # CuTe DSL and torch are imported when an emulation of theirs starts, not when PTX alone is run.
    if name in __all__:
        from warpcheck import context

        return getattr(context, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
