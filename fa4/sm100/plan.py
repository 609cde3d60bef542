"""Plan of the Blackwell kernels."""

from __future__ import annotations

from .. import plan
from .bwd.plan import Backward
from .fwd.plan import Forward


class Plan(plan.Directions):
    """Plan of a problem on sm_100 or sm_103."""

    directions = Forward, Backward
