"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from ....bwd.lists import SparseContext
from ... import tmem
from .config import Sm100TransposedConfig


@dataclass(frozen=True, slots=True)
class Sm100TransposedContext(SparseContext):
    """Arguments of a role's body. statistics_stored: a named barrier; 0 is the barrier of the CTA."""

    cfg: Sm100TransposedConfig
    tmem: tmem.TmemMap | None = None
    statistics_stored: int = 1
