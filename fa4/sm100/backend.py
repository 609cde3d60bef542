"""The `sm100` row of the dispatch table."""

from __future__ import annotations

from ..device import Chip
from ..spec import AttentionSpec
from .fwd.plan import describe as describe_forward
from .fwd.plan import forward

__all__ = ["describe", "forward"]


def describe(spec: AttentionSpec, chip: Chip) -> str:
    """The tiles that serve a problem, for `fa4.explain`."""
    return describe_forward(spec, chip)
