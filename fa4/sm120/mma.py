"""Block-scaled mma.sync of one warp: 16 rows, operand B of e4m3 or e2m1 in panelled tiles of shared memory.

All operands of a step of the reduction have 32 bytes a row. Accumulators have the layout of `pipeline.fragment`; so
have P, as operand A, and the rows of S that it is made of.

e4m3: a thread's four numbers of a register of P are two pairs of columns of S, eight apart; V's rows are loaded in the
same order of keys. Scales (`.scale_vec::1X`): one E8M0 byte for 32 numbers along the reduction, of a word of four. On
GeForce, products of e4m3 with float32 sums are half as fast without scales.

e2m1: the scales (`.scale_vec::4X`) are a word of four E4M3 bytes for 64 numbers, and 16 numbers of a scale are
registers of two threads of a quad. Neighbouring tokens of V have a scale in common, so the keys of S are in an order of
their own, `KEY_ORDER`: K's rows are loaded in it.

A thread passes a word of scales. Of A, lanes 0 and 1 of each quad hold those of the quad's two rows; of B, one lane of
the quad holds those of its column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.constant import Constant
from ..core.vec_io import as_float, bits
from ..pipeline.fragment import LANES_PER_ROW
from ..pipeline.smem import Tile
from ..runtime.spec import E8M0_ONE
from .product import STEP_BYTES, Product

N_OF_LOAD = 16  # rows or columns of B that one load of a warp brings
ROWS_OF_MATRIX = 8


@dataclass(frozen=True, slots=True)
class Scale(Constant):
    """Scale operand: a word of four scales, the byte of them to use, and the lanes of a quad that hold it."""

    word: Int32 | int
    byte: int = 0
    lane: int = 0


ONES = Scale(E8M0_ONE * 0x01010101)


def add_product(
    product: Product, c: list[Float32], a: list[Int32], b: list[Int32], a_scale: Scale, b_scale: Scale
) -> list[Float32]:
    """Return c + A B^T for one step and eight columns. a: four registers, b: two, c: four."""
    of_a, of_b = (f"{{ {scale.byte}, {scale.lane} }}" for scale in (a_scale, b_scale))
    # A word that is known at compile time would be an immediate, which the instruction has not.
    text = f"""{{
        .reg .b32 a_scale, b_scale;
        mov.b32 a_scale, {{$r10}};
        mov.b32 b_scale, {{$r11}};
        mma.sync.aligned.{product.name}
            {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, {{ {{$r0}}, {{$r1}}, {{$r2}}, {{$r3}} }}, {{ {{$r4}}, {{$r5}} }},
            {{ {{$r6}}, {{$r7}}, {{$r8}}, {{$r9}} }}, a_scale, {of_a}, b_scale, {of_b};
        }}"""
    words = [*a, *b, *map(bits, c), Int32(a_scale.word), Int32(b_scale.word)]
    return [as_float(x) for x in cute.arch.inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=words)]


class RowsOfK(Constant):
    """Addresses of this lane in a tile of K, whose rows are the columns of the product."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        # The two operands of a product are neighbours among the registers of a load: halves of a step.
        lane = cute.arch.lane_idx()
        row, right = self.row(lane), lane // 8 % 2
        own = row * tile.row_bytes + ((right ^ tile.swizzled(row)) << 4)
        self.offsets = [own ^ byte for byte in range(0, tile.row_bytes, STEP_BYTES)]

    def row(self, lane: Int32) -> Int32:
        """Row of the tile that a lane names in the load of columns 0 to 15."""
        return lane % 8 + lane // 16 * 8

    def rows_before(self, n: int) -> int:
        """How many rows further on it is in the load of columns n to n + 15, a multiple of eight."""
        return n

    def load(self, address: Int32, step: int, n: int) -> list[list[Int32]]:
        """Return the operands of columns n to n + 15 of a step of the product, two registers for each eight."""
        panel, within = divmod(step * STEP_BYTES, self.tile.row_bytes)
        constant = panel * self.tile.panel_bytes + self.rows_before(n) * self.tile.row_bytes
        x = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, "
            f"[{{$r0}} + {constant}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address + self.offsets[within // STEP_BYTES]],
        )
        return [[x[0], x[1]], [x[2], x[3]]]


class RowsOfV(Constant):
    """Addresses of this lane in a tile of V, whose rows are reduced. 16 bytes of each of 32 rows become 16 columns of
    B: ldmatrix transposes matrices of 16 x 16 bytes. The keys are in the order of P, see the module's head."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        row = self.row(cute.arch.lane_idx())
        own = row * tile.row_bytes + (tile.swizzled(row) << 4)
        self.offsets = [own ^ byte for byte in range(0, tile.row_bytes, N_OF_LOAD)]

    def row(self, lane: Int32) -> Int32:
        """Row of the tile that a lane names: four rows of a matrix become a register of each thread of a quad."""
        in_matrix = lane % 16
        return lane // 16 * 16 + in_matrix % LANES_PER_ROW // 2 * 8 + in_matrix // LANES_PER_ROW * 2 + in_matrix % 2

    def load(self, address: Int32, step: int, n: int) -> list[list[Int32]]:
        """Return the operands of columns n to n + 15 of a step of the product, two registers for each eight."""
        panel, within = divmod(n, self.tile.row_bytes)
        constant = panel * self.tile.panel_bytes + step * STEP_BYTES * self.tile.row_bytes
        x = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 { {$w0}, {$w1}, {$w2}, {$w3} }, "
            f"[{{$r0}} + {constant}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address + self.offsets[within // N_OF_LOAD]],
        )
        return [[x[0], x[2]], [x[1], x[3]]]


KEY_ORDER: dict[str, Any] = dict(run=2, period=4, grouped=(8, 32))
"""Keys of a thread's scores with products of e2m1, as fields of `FragmentCoords`. Eight of them are a register of P."""


def first_key() -> Int32:
    """Key of this thread's first score. Threads 0 and 1 of a quad have 16 neighbouring keys of 32, threads 2 and 3 the
    other 16, since two threads have the numbers of a scale."""
    lane = cute.arch.lane_idx() % LANES_PER_ROW
    return lane // 2 * 16 + lane % 2 * 2


class OrderedRowsOfK(RowsOfK):
    """Rows of K in the order of `KEY_ORDER`: column 8 j + 4 u + 2 w + e of 32 columns is key 16 u + 4 j + 2 w + e."""

    def row(self, lane: Int32) -> Int32:
        return lane % 8 // 4 * 16 + lane // 16 * 4 + lane % 4

    def rows_before(self, n: int) -> int:
        return n // 32 * 32 + n % 32 // 2


class TokenPairsOfV(RowsOfV):
    """Rows of V of two tokens a byte, in the order of `KEY_ORDER`."""

    def row(self, lane: Int32) -> Int32:
        in_matrix = lane % 16
        return lane // 16 * 16 + in_matrix // 8 * 8 + in_matrix % 4 * 2 + in_matrix // 4 % 2
