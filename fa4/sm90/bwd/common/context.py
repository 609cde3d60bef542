"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from ....bwd.launch import BackwardContext
from .config import Sm90BackwardSteps


@dataclass(frozen=True, slots=True)
class Sm90StepsContext(BackwardContext):
    """Arguments of a role's body."""

    cfg: Sm90BackwardSteps
    last_dq: int = 1  # named barriers; 0 is the CTA barrier
    gradients_staged: int = 2  # and 3: one per consumer
