"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from ..context import Sm100StepsContext
from .config import Sm100WideConfig


@dataclass(frozen=True, slots=True)
class Sm100WideContext(Sm100StepsContext):
    """Arguments of a role's body: adds a named barrier; 0 is the barrier of the CTA."""

    cfg: Sm100WideConfig
    gradient_staged: int = 1
