"""The plan of the Hopper kernels."""

from __future__ import annotations

from .. import plan
from .bwd.plan import Backward
from .fwd.plan import Forward


class Plan(plan.Directions):
    """A problem on sm_90."""

    directions = Forward, Backward
