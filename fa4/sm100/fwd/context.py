"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...fwd.launch import ForwardContext
from .. import tmem
from .config import Sm100ForwardConfig


@dataclass(frozen=True, slots=True)
class Sm100ForwardContext(ForwardContext):
    """Arguments of a role's body: adds the tensor-memory map."""

    cfg: Sm100ForwardConfig
    resources: tmem.TensorMemory
    tmem: tmem.TmemMap | tmem.OffsetTmemMap | None = None

    def with_tmem_addresses(self) -> Sm100ForwardContext:
        """Copy whose TMEM ranges have their addresses in this CTA."""
        assert isinstance(self.tmem, tmem.TmemMap)
        return replace(self, tmem=self.resources.place(self.tmem, self.smem))
