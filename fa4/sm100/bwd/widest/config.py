"""Compile-time configuration of the Blackwell backward of head dims above 256.

Its three kernels have the form of `wide`, with 64 rows in each CTA of a pair (see `sm100.stages`): D of up to 576
columns takes 320 columns of tensor memory. P and dS go through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....pipeline.smem import Tile
from ...stages import CTA_ROWS, STAGE_BYTES, column_parts, d_columns
from ..config import BARRIER_BYTES, ROW_STAGES
from ..wide.config import Gradient, Sm100WideConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100WidestConfig(Sm100WideConfig):
    """Configuration of the generated code; the fields are the compile key."""

    cta_tile_n: ClassVar[int] = CTA_ROWS

    @property
    def lane_columns(self) -> int:
        return self.tile_m // 2

    @property
    def weights_tile(self) -> Tile:
        return self._tile(CTA_ROWS, self.tile_m)

    @property
    def operand_columns(self) -> int:
        """Columns of the right operand of D."""
        return self.head_dim_v if self.gradient is Gradient.DV else self.head_dim

    @property
    def grad_columns(self) -> int:
        """Tensor-memory columns of D."""
        return d_columns(self.operand_columns)

    @property
    def d_parts(self) -> list[int]:
        return [columns // 2 for columns in column_parts(self.operand_columns)]

    @property
    def left_bytes(self) -> int:
        """Bytes of the left operand of S, over which the gradient is staged."""
        (left, _), _, _ = self.gradient.value
        return max(self.tile(left).nbytes, self.grad_tile.nbytes)

    @property
    def left_dp_bytes(self) -> int:
        (_, left_dp), _, _ = self.gradient.value
        return self.tile(left_dp).nbytes if left_dp else 0

    @property
    def ring_stages(self) -> int:
        """Stages of the ring of all right operands."""
        used = self.left_bytes + self.left_dp_bytes + self.stages * self.weights_tile.nbytes
        used += ROW_STAGES * self.rows_bytes + BARRIER_BYTES
        return (self.smem_bytes - used) // STAGE_BYTES
