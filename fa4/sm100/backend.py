"""The `sm100` row of the dispatch table."""

from __future__ import annotations

from ..device import Chip
from ..spec import AttentionSpec
from .bwd.plan import backward
from .bwd.plan import describe as describe_backward
from .fwd.plan import describe as describe_forward
from .fwd.plan import forward

__all__ = ["backward", "describe", "forward"]


def describe(spec: AttentionSpec, chip: Chip) -> str:
    """The tiles that serve a problem, for `fa4.explain`."""
    tiles = describe_forward(spec, chip)
    return f"{tiles}; {describe_backward(spec, chip)}" if spec.needs_backward else tiles
