"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....bwd.lists import SparseContext
from ... import tmem
from .config import Sm100ListsForwardConfig


@dataclass(frozen=True, slots=True)
class ListsForwardContext(SparseContext):
    """Arguments of a role's body. factors_stored: a named barrier; 0 is the barrier of the CTA."""

    args: Any
    cfg: Sm100ListsForwardConfig
    tmem: tmem.TmemMap | None = None
    factors_stored: int = 1
