"""fa4's kernels on an emulated chip: `warpcheck`, and what it must know of fa4."""

from warpcheck import emulate

__all__ = ["emulate"]
