"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from ...bwd.lists import SparseContext
from .config import SparseBackwardConfig


@dataclass(frozen=True, slots=True)
class Sm90SparseContext(SparseContext):
    """Arguments of a role's body."""

    cfg: SparseBackwardConfig
