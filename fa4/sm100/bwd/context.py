"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from ...bwd.launch import BackwardContext
from .. import tmem
from .config import Sm100BackwardConfig, Sm100BackwardSteps


@dataclass(frozen=True, slots=True)
class Sm100StepsContext(BackwardContext):
    """Arguments of a role's body in every Blackwell backward: adds the tensor-memory map."""

    cfg: Sm100BackwardSteps
    tmem: tmem.TmemMap | None = None


@dataclass(frozen=True, slots=True)
class Sm100BackwardContext(Sm100StepsContext):
    """Adds named barriers."""

    cfg: Sm100BackwardConfig
    dq_staging: int = 1  # named barriers; 0 is the barrier of the CTA
    gradient_staged: int = 2  # and 3: one per compute warpgroup
