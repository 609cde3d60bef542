"""Context of the roles of the Blackwell backward."""

from __future__ import annotations

from dataclasses import dataclass

from ...bwd.context import BackwardContext
from .. import tmem
from .config import Sm100BackwardConfig


@dataclass(frozen=True, slots=True)
class Sm100BackwardContext(BackwardContext):
    """Arguments of a role's body: adds the tensor-memory map and named barriers."""

    cfg: Sm100BackwardConfig
    tmem: tmem.TmemMap | None = None
    dq_staging: int = 1  # named barriers; 0 is the barrier of the CTA
    gradient_staged: int = 2  # and 3: one per compute warpgroup
