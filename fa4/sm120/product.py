"""Products that kernels of sm_120 use, see `mma`."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.constant import Constant

STEP_BYTES = 32  # of each row of an operand, for one product
SCALES_OF_WORD = 4


@dataclass(frozen=True, slots=True)
class Product(Constant):
    """Instruction. numbers: of a step of the reduction. name: what follows "mma.sync.aligned"."""

    numbers: int
    name: str

    def steps(self, columns: int) -> int:
        """Products for a reduction over `columns` numbers."""
        return -(-columns // self.numbers)

    @property
    def per_byte(self) -> int:
        return self.numbers // STEP_BYTES


OF_E4M3 = Product(32, "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0")
OF_E2M1 = Product(64, "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3")
