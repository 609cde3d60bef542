"""Scales of blocks of 32 numbers: a thread loads those of its rows of Q, and of its columns of products, from global
memory, a key block ahead of the products that read them.

A word holds four scales, see `mma`. Of Q and K they are those of a row's blocks of 32 columns. Of V, word i of a key
block belongs to its i-th 32 keys; lane t of a quad holds the scales of columns 32 t + 8 b + g, byte b, where g is the
quad. Rows and columns that do not exist have the scales of existing ones, since a NaN there would reach the sums.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...core.constant import Constant
from ...core.rows import Rows
from ...core.vec_io import load_vec
from ...fwd.device.rows import head_of, query_of
from ...fwd.device.work import Work
from ...pipeline.fragment import LANES_PER_ROW
from ...runtime.spec import MX_BLOCK
from ..mma import ONES, ROWS_OF_MATRIX, Scale
from ..product import SCALES_OF_WORD
from .context import Sm120ForwardContext


class Position(NamedTuple):
    """Where the scales of a work tile's sequence and head are."""

    batch: Int32
    first: Int32  # entry of the tensor
    last: Int32  # last entry of the sequence
    head: Int32


class UnitScales(Constant):
    """Scales of 1, of tensors that have factors for a whole tensor or head."""

    def load_q(self, work: Work, first_row: Int32) -> None: ...

    def load_k(self, work: Work, block: Int32) -> None: ...

    def load_v(self, work: Work, block: Int32) -> None: ...

    def ready_k(self, stage: Int32) -> None: ...

    def ready_v(self, stage: Int32) -> None: ...

    def of_q(self, step: int) -> Scale:
        return ONES

    def of_k(self, step: int, n: int) -> Scale:
        return ONES

    def of_p(self, step: int) -> Scale:
        return ONES

    def of_v(self, step: int, n: int) -> Scale:
        return ONES


class ScaleWords(Constant):
    """Words of four scales in registers, which are loaded as words, or byte by byte. A warp waits for a load where it
    uses what was loaded, so bytes are packed late."""

    def __init__(self, words: int, count: int, is_whole: bool = True) -> None:
        self.words, self.count = words, count
        self.is_whole = is_whole and count == SCALES_OF_WORD
        self.loaded = cute.make_rmem_tensor(words * (1 if self.is_whole else count), Int32)
        self.packed = self.loaded if self.is_whole else cute.make_rmem_tensor(words, Int32)

    def load(self, i: int, ptr: cute.Pointer) -> None:
        """Load the word of neighbouring scales at `ptr`."""
        if self.is_whole:
            self.loaded[i] = load_vec(ptr, 1)[0]
        else:
            self.load_bytes(i, [ptr + b for b in range(self.count)])

    def load_bytes(self, i: int, ptrs: list[cute.Pointer]) -> None:
        for b, ptr in enumerate(ptrs):
            self.loaded[i * self.count + b] = Int32(cute.make_tensor(ptr, 1)[0]) & 0xFF  # else a sign is extended

    def pack(self) -> None:
        """Call before the words are used."""
        if not self.is_whole:
            for i in range(self.words):
                parts = [self.loaded[i * self.count + b] << 8 * b for b in range(self.count)]
                self.packed[i] = functools.reduce(operator.or_, parts)

    def __getitem__(self, i: int) -> Int32:
        return self.packed[i]


class LoadedScales(UnitScales):
    """Scales that a thread loads from global memory."""

    def __init__(self, context: Sm120ForwardContext) -> None:
        self.cfg = context.cfg
        self.tensors: Any = context.args.cache
        lane = cute.arch.lane_idx()
        self.quad, self.lane = lane // LANES_PER_ROW, lane % LANES_PER_ROW

    def row_of_q(self, scales: cute.Tensor, work: Work, first_row: Int32) -> cute.Pointer:
        """Where the scales of the row of Q are that this lane passes. first_row: of this warp, as a row of the
        sequence."""
        cfg = self.cfg
        row = first_row + self.quad + self.lane % 2 * ROWS_OF_MATRIX
        head = cutlass.min(head_of(cfg, row), cfg.packed_heads - 1) if cfg.packed_heads > 1 else 0
        pos = self.position(work, work.q, work.query_rows, work.head * cfg.packed_heads + head)
        return self.of_row(scales, pos, query_of(cfg, row))

    def position(self, work: Work, counted: Rows, stored: Rows, head: Int32) -> Position:
        first = stored.first if self.cfg.varlen else Int32(0)
        return Position(Int32(0) if self.cfg.varlen else work.batch, first, first + counted.count - 1, head)

    def of_row(self, scales: cute.Tensor, pos: Position, row: Int32) -> cute.Pointer:
        """Where the scales of a row of Q or K are; of the nearest row, if that does not exist."""
        entry = cutlass.max(cutlass.min(pos.first + row, pos.last), pos.first)
        return scales.iterator + cute.crd2idx((pos.batch, entry, pos.head, 0), scales.layout)


class BlockScales(LoadedScales):
    """Scales of blocks of a thread: of its row of Q, and of K and V of a key block."""

    def __init__(self, context: Sm120ForwardContext) -> None:
        super().__init__(context)
        of_row = -(-self.cfg.head_dim // MX_BLOCK)
        self.q, self.k = ScaleWords(1, of_row), ScaleWords(self.cfg.scale_words, of_row)
        self.v = ScaleWords(self.cfg.scale_words, SCALES_OF_WORD, is_whole=False)

    def load_q(self, work: Work, first_row: Int32) -> None:
        self.q.load(0, self.row_of_q(self.tensors.q_scales, work, first_row))

    def load_k(self, work: Work, block: Int32) -> None:
        pos = self.position(work, work.k, work.keys.rows, work.head_kv)
        for i in range(self.cfg.scale_words):
            key = block * self.cfg.tile_n + i * MX_BLOCK + self.lane * ROWS_OF_MATRIX + self.quad
            self.k.load(i, self.of_row(self.tensors.k_scales, pos, key))

    def load_v(self, work: Work, block: Int32) -> None:
        cfg, scales, rows = self.cfg, self.tensors.v_scales, work.keys.rows
        # Each packed sequence begins with an entry of its own.
        first = rows.first // MX_BLOCK + work.batch if cfg.varlen else 0
        last = first + (work.k.count - 1) // MX_BLOCK
        for i in range(cfg.scale_words):
            entry = cutlass.min(first + block * cfg.scale_words + i, last)
            ptrs = []
            for b in range(SCALES_OF_WORD):
                column = self.lane * (SCALES_OF_WORD * ROWS_OF_MATRIX) + b * ROWS_OF_MATRIX + self.quad
                column = cutlass.min(column, cfg.head_dim_v - 1)
                coord = Int32(0) if cfg.varlen else work.batch, entry, work.head_kv, column
                ptrs.append(scales.iterator + cute.crd2idx(coord, scales.layout))
            self.v.load_bytes(i, ptrs)

    def ready_k(self, stage: Int32) -> None:
        """Call before the products that read the scales of Q and K. stage: of K."""
        self.q.pack()
        self.k.pack()

    def ready_v(self, stage: Int32) -> None:
        """Call before the products that read the scales of V. stage: of V."""
        self.v.pack()

    def of_q(self, step: int) -> Scale:
        """Operand for a step over columns."""
        return Scale(self.q[0], step)

    def of_k(self, step: int, n: int) -> Scale:
        """Operand for a step over columns, and keys n to n + 7 of the block."""
        return Scale(self.k[n // MX_BLOCK], step, n // ROWS_OF_MATRIX % LANES_PER_ROW)

    def of_v(self, step: int, n: int) -> Scale:
        """Operand for a step over keys, and columns n to n + 7."""
        return Scale(self.v[step], n // ROWS_OF_MATRIX % SCALES_OF_WORD, n // MX_BLOCK)
