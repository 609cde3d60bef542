"""The plan of the Hopper kernels."""

from __future__ import annotations

from torch import Tensor

from .. import plan
from ..device import Chip
from ..spec import AttentionInputs, AttentionSpec, Extent, Gradients, Saved
from .bwd.plan import Backward
from .bwd.tiles import BackwardTiles
from .fwd.plan import Forward
from .fwd.tiles import ForwardTiles


class Plan(plan.Plan):
    """A problem on sm_90. Tiles given here replace the rows of the tables, for tuning."""

    def __init__(
        self,
        spec: AttentionSpec,
        extent: Extent,
        chip: Chip,
        forward_tiles: ForwardTiles | None = None,
        backward_tiles: BackwardTiles | None = None,
    ) -> None:
        super().__init__(spec, extent, chip)
        self._forward = Forward(spec, extent, chip, forward_tiles)
        self._backward = Backward(spec, extent, chip, backward_tiles)

    def describe(self) -> str:
        forward = f"sm90 {self._forward}"
        return f"{forward}; {self._backward}" if self.spec.needs_backward else forward

    def forward(self, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        self._forward.launch(inputs, out, lse)

    def backward(self, inputs: AttentionInputs, saved: Saved, grads: Gradients) -> Tensor | None:
        return self._backward.launch(inputs, saved, grads)
