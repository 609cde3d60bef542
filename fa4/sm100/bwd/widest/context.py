"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from ..wide.context import Sm100WideContext
from .config import Sm100WidestConfig


@dataclass(frozen=True, slots=True)
class Sm100WidestContext(Sm100WideContext):
    """Arguments of a role's body."""

    cfg: Sm100WidestConfig
