"""Plan of the Blackwell kernels."""

from __future__ import annotations

from ..runtime import plan
from .bwd.plan import Sm100Backward
from .fwd.plan import Sm100Forward


class Plan(plan.ForwardBackwardPlan):
    """Plan of a problem on sm_100 or sm_103."""

    directions = Sm100Forward, Sm100Backward
