"""mma.sync of one warp: 16 rows, operand B in panelled tiles of shared memory.

All operands of a step of the reduction have 32 bytes a row: 16 columns of 16 bits, or 32 of e4m3. Accumulators have the
layout of `pipeline.fragment`; so do P, as operand A, and the rows of S that it is made of. A step of O += P V reduces
over 16 or 32 keys. With 8 bits, a thread's four numbers of a register of P are two pairs of columns of S, eight apart;
V's rows are loaded in the same order of keys.

Scales (`.block_scale.scale_vec::1X`): one E8M0 byte for 32 numbers along the reduction. A thread passes a word of four.
Of A, lanes 0 and 1 of each quad hold those of the quad's two rows; of B, one lane of the quad holds those of its
column.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from ..core.constant import Constant
from ..pipeline.smem import PANEL_ROW_BYTES, Tile

STEP_BYTES = 32  # of each row of an operand, for one product
N_OF_LOAD = 16  # rows or columns of B that one load of a warp brings
ROWS_OF_MATRIX = 8
SCALES_OF_WORD = 4
QUAD = 4


@dataclass(frozen=True, slots=True)
class Scale(Constant):
    """Scale operand: a word of four scales, the byte of them to use, and the lanes of a quad that hold it."""

    word: Int32 | int
    byte: int = 0
    lane: int = 0


@dataclass(frozen=True, slots=True)
class WarpMma(Constant):
    """Products of one warp. dtype: of A and B, 16 bits or e4m3. The latter have scales."""

    dtype: type[cutlass.Numeric]

    @property
    def columns_of_step(self) -> int:
        """Columns of the operands that a product reduces over."""
        return STEP_BYTES * 8 // self.dtype.width

    def steps(self, columns: int) -> int:
        return -(-columns // self.columns_of_step)

    def add(
        self, c: list[Float32], a: list[Int32], b: list[Int32], a_scale: Scale | None, b_scale: Scale | None
    ) -> list[Float32]:
        """Return c + A B^T for one step and eight columns. a: four registers, b: two, c: four."""
        arguments, lists = [*a, *b, *c], ["{ {$w0}, {$w1}, {$w2}, {$w3} }"]
        for first, count in ((0, 4), (4, 2), (6, 4)):
            lists.append(f"{{ {', '.join(f'{{$r{i}}}' for i in range(first, first + count))} }}")
        registers = ", ".join(lists)
        if a_scale is None or b_scale is None:
            name = "bf16" if self.dtype is BFloat16 else "f16"
            text = f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {registers};"
        else:
            of_a, of_b = (f"{{ {scale.byte}, {scale.lane} }}" for scale in (a_scale, b_scale))
            kind = "kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
            # A word that is known at compile time would be an immediate, which the instruction has not.
            text = f"""{{
            .reg .b32 a_scale, b_scale;
            mov.b32 a_scale, {{$r10}};
            mov.b32 b_scale, {{$r11}};
            mma.sync.aligned.m16n8k32.row.col.{kind} {registers}, a_scale, {of_a}, b_scale, {of_b};
            }}"""
            arguments += [Int32(a_scale.word), Int32(b_scale.word)]
        return list(cute.arch.inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=arguments))


class RowsOfB(Constant):
    """Addresses of this lane in a tile whose rows are the columns of the product (K), or with `transposed` in one whose
    rows are reduced (V of 16 bits)."""

    def __init__(self, tile: Tile, transposed: bool = False) -> None:
        self.tile, self.transposed = tile, transposed
        lane = cute.arch.lane_idx()
        row, right = lane % 8 + lane // 8 % 2 * 8, lane // 16
        own = row * PANEL_ROW_BYTES + ((right ^ (row & 7)) << 4)
        self.offsets = [own ^ byte for byte in range(0, PANEL_ROW_BYTES, STEP_BYTES)]

    def load(self, address: Int32, step: int, n: int) -> list[list[Int32]]:
        """Return the operands of columns n to n + 15 of a step of the product, two registers for each eight."""
        row, byte = (n, step * STEP_BYTES) if not self.transposed else (step * N_OF_LOAD, 2 * n)
        panel, within = divmod(byte, PANEL_ROW_BYTES)
        constant = panel * self.tile.panel_bytes + row * PANEL_ROW_BYTES
        own = address + self.offsets[within // STEP_BYTES]
        trans = ".trans" if self.transposed else ""
        x = cute.arch.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, "
            f"[{{$r0}} + {constant}];",
            write_only_types=[Int32] * 4,
            read_only_args=[own],
        )
        # The matrices are (upper, lower) rows of the first 16 bytes, then of the second.
        return [[x[0], x[1]], [x[2], x[3]]] if self.transposed else [[x[0], x[2]], [x[1], x[3]]]


class BytesOfV(Constant):
    """Addresses of this lane in a tile of V of 8 bits. A row of 16 bytes of each of 32 keys becomes the columns of B:
    ldmatrix transposes matrices of 16 x 16 bytes. The rows are in the order of P, see the module's head."""

    transposed = True

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        lane = cute.arch.lane_idx()
        in_matrix = lane % 16
        key = lane // 16 * 16 + in_matrix % QUAD // 2 * 8 + in_matrix // QUAD * 2 + in_matrix % 2
        own = key * PANEL_ROW_BYTES + ((key & 7) << 4)
        self.offsets = [own ^ byte for byte in range(0, PANEL_ROW_BYTES, N_OF_LOAD)]

    def load(self, address: Int32, step: int, n: int) -> list[list[Int32]]:
        """Return the operands of columns n to n + 15 of a step of the product, two registers for each eight."""
        panel, within = divmod(n, PANEL_ROW_BYTES)
        constant = panel * self.tile.panel_bytes + step * STEP_BYTES * PANEL_ROW_BYTES
        x = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 { {$w0}, {$w1}, {$w2}, {$w3} }, "
            f"[{{$r0}} + {constant}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address + self.offsets[within // N_OF_LOAD]],
        )
        return [[x[0], x[2]], [x[1], x[3]]]
