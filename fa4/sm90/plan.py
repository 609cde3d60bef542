"""The plan of the Hopper kernels."""

from __future__ import annotations

from torch import Tensor

from .. import plan
from ..device import Chip
from ..spec import AttentionInputs, AttentionSpec, Extent
from .fwd.plan import Forward
from .fwd.tiles import ForwardTiles


class Plan(plan.Plan):
    """A problem on sm_90, without gradients. Tiles given here replace the rows of the table, for tuning."""

    def __init__(
        self, spec: AttentionSpec, extent: Extent, chip: Chip, forward_tiles: ForwardTiles | None = None
    ) -> None:
        super().__init__(spec, extent, chip)
        self._forward = Forward(spec, extent, chip, forward_tiles)

    def describe(self) -> str:
        return f"sm90 {self._forward}"

    def forward(self, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        self._forward.launch(inputs, out, lse)
