"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from ...fwd.launch import ForwardContext
from .config import LatentConfig


@dataclass(frozen=True, slots=True)
class LatentContext(ForwardContext):
    """Arguments of a role's body."""

    cfg: LatentConfig
