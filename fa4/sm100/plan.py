"""Plan of the Blackwell kernels."""

from __future__ import annotations

from typing import Any

from ..runtime import plan
from ..runtime.device import Chip
from ..runtime.spec import AttentionSpec, ProblemSize
from .bwd.plan import Sm100Backward
from .fwd.plan import Sm100Forward
from .fwd.widest.plan import WidestForward
from .stages import is_widest


def forward(spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: Any = None) -> Any:
    """Return the forward of a problem."""
    return (WidestForward if is_widest(spec) else Sm100Forward)(spec, extent, chip, tiles)


class Plan(plan.ForwardBackwardPlan):
    """Plan of a problem on sm_100 or sm_103."""

    directions = forward, Sm100Backward
