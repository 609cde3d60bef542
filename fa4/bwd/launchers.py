"""Small kernels of a backward: configurations and launchers. Their device code is in `kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.program import ProgramRef

_BYTES = 16  # of a row per lane and load


@dataclass(frozen=True, slots=True)
class OrderedSumsConfig:
    """Compile-time configuration. dtype: of the rows. columns: of a row, a multiple of 8."""

    dtype: torch.dtype
    columns: int

    @property
    def width(self) -> int:
        """Columns per lane and load."""
        return _BYTES // self.dtype.itemsize


ORDERED_SUMS = ProgramRef[OrderedSumsConfig]("add_in_order", "fa4.bwd.kernels.ordered_sums")
"""Its launcher takes a `kernels.ordered_sums.OrderedSums`."""
