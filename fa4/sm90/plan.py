"""Plan of the Hopper kernels."""

from __future__ import annotations

from ..runtime import plan
from .bwd.plan import Sm90Backward
from .fwd.plan import Sm90Forward


class Plan(plan.ForwardBackwardPlan):
    """Plan of a problem on sm_90."""

    directions = Sm90Forward, Sm90Backward
