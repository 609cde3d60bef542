"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from ....fwd.launch import ForwardContext
from .config import Fp8Config


@dataclass(frozen=True, slots=True)
class Fp8Context(ForwardContext):
    """Arguments of a role's body."""

    cfg: Fp8Config
