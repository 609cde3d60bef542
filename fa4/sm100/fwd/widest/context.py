"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from ....fwd.launch import ForwardContext
from ... import tmem
from .config import WidestConfig


@dataclass(frozen=True, slots=True)
class WidestContext(ForwardContext):
    """Arguments of a role's body: adds the tensor-memory map, and a named barrier; 0 is the barrier of the CTA."""

    cfg: WidestConfig
    resources: tmem.TensorMemory
    tmem: tmem.TmemMap | None = None
    halves_exchanged: int = 1
