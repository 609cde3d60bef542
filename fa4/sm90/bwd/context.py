"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from .common.context import Sm90StepsContext
from .config import Sm90BackwardConfig


@dataclass(frozen=True, slots=True)
class Sm90BackwardContext(Sm90StepsContext):
    """Arguments of a role's body."""

    cfg: Sm90BackwardConfig
