"""fa4's own kernels on an emulated chip of `warpcheck`: the context `emulate`, predictions, recordings, mutants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warpcheck import libraries

from .library import FA4

if TYPE_CHECKING:
    from warpcheck import emulate

__all__ = ["emulate"]

libraries.register("fa4", FA4)


def __getattr__(name: str) -> Any:
    # torch's and CuTe DSL's stand-ins are imported when an emulation starts.
    if name == "emulate":
        from warpcheck import emulate

        return emulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
