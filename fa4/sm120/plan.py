"""Plan of the consumer Blackwell kernels."""

from __future__ import annotations

from ..runtime import plan
from .fwd.plan import Sm120Forward


class Plan(plan.ForwardBackwardPlan):
    """Plan of a problem of e4m3 on sm_120 and sm_121."""

    directions = Sm120Forward, None
