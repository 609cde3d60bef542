"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from ....fwd.launch import ForwardContext
from .config import Sm90WidestConfig


@dataclass(frozen=True, slots=True)
class WidestContext(ForwardContext):
    """Arguments of a role's body."""

    cfg: Sm90WidestConfig
