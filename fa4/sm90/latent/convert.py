"""Load role of 8-bit rows, one warpgroup: loads rows into registers and stores them, converted to 16 bits, as key
blocks, from last to first, part by part.

Waits:   load_both_left.free, load_both_right.free
Signals: load_both_Q.full, load_both_left.full, load_both_right.full, load_even_tail.full, load_odd_tail.full

Beside the tiles, shared memory has no room for bytes. So a register gets bytes of a following part as soon as its own
are stored, and loads are in flight while this role converts or waits. A block's first loads bring nearly all of its
rows to L2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...core.bytes import scaled, upconverted
from ...core.constant import Constant
from ...core.stored import Stored
from ...core.vec_io import as_float, load_vec, load_vec_through_l2
from ...fwd.device.key_rows import KeyRows, copy_async
from ...fwd.device.load import load_q
from ...fwd.device.work import Work, work_tile
from ...pipeline.cursor import Cursor, produce
from ...pipeline.roles import WARP, WARPS_PER_WARPGROUP
from ...pipeline.smem import Tile
from ...pipeline.upconvert import COLUMNS, Upconversion
from ...runtime import scaled_rows
from .config import HALVES
from .context import LatentContext
from .load import part_cursors

_VEC = 4  # 32-bit registers per load
_THREADS = WARPS_PER_WARPGROUP * WARP
_PANELS_OF_FACTOR = scaled_rows.TILE // COLUMNS


@cute.jit
def convert(context: LatentContext):
    ends = context.ends("load")
    q = produce(ends.load_both_Q)
    even, odd = part_cursors(context.cfg, ends)
    work = work_tile(context, Int32(cute.arch.block_idx()[0]))
    if work.count > 0:
        load_queries(context, work, q)
        blocks = ByteBlocks.of(context, work)
        blocks.start()
        for i in cutlass.range((work.count + 1) // 2, unroll=1):
            even = blocks.convert(2 * i, 0, even)
            if 2 * i + 1 < work.count:
                odd = blocks.convert(2 * i + 1, 1, odd)


@cute.jit
def load_queries(context: LatentContext, work: Work, q: Cursor):
    """Load Q; one warp does."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
        load_q(context, work, work.m_block, q)


@dataclass(frozen=True)
class Part(Constant):
    """Panels of the key blocks. first: the first panel. packed: registers of its bytes, which a part of the same size
    may share."""

    first: cutlass.Constexpr[int]
    upconversion: Upconversion
    packed: cute.Tensor

    def load(self, rows: Sequence[cute.Pointer], i: int) -> None:
        """Start to load this thread's i-th share of the part. rows: its rows of a block."""
        group, panel = self.upconversion.shares[i]
        pointer = rows[group] + (self._column(panel) + self.upconversion.column())
        for j, word in enumerate(load_vec_through_l2(pointer)):
            self.packed[_VEC * i + j] = word

    def start_copy(self, stage: int, rows: Sequence[cute.Pointer]) -> None:
        """Start to copy the part to a stage that is free, if it needs no conversion. rows: as of `load`."""

    def words(self, i: int) -> list[Int32]:
        """The loaded i-th share."""
        return [self.packed[_VEC * i + j] for j in range(_VEC)]

    def wide(self, i: int) -> list[Int32]:
        """The loaded i-th share as eight words of 16-bit values."""
        source, dtype = self.upconversion.stored.source, self.upconversion.stored.dtype
        return [x for word in self.words(i) for x in upconverted(word, source, dtype)]

    def convert(self, stage: int, cursor: Cursor, following: Part, rows: Sequence[cute.Pointer]) -> Cursor:
        """Whole warpgroup: store the loaded part as that of a stage, and start to load its registers with the following
        part. rows: of that part's block."""
        upconversion = self.upconversion
        bases = upconversion.store_bases(upconversion.first + stage * upconversion.step)
        for i, share in enumerate(upconversion.shares):
            upconversion.store_wide(bases, share, self.wide(i))
            following.load(rows, i)
            cute.arch.sync_warp()  # costs nothing; without it the compiler moves loads together, and spills
        cursor.arrive()
        return cursor.next()

    def _column(self, panel: int) -> int:
        """First column of one of the part's panels."""
        return (self.first + panel) * COLUMNS


@dataclass(frozen=True)
class ScaledPart(Part):
    """Part of the latents of `scaled_rows`. factors: registers, one for each row and tile of columns."""

    factors: cute.Tensor

    def load(self, rows: Sequence[cute.Pointer], i: int) -> None:
        super().load(rows, i)
        group, panel = self.upconversion.shares[i]
        if panel % _PANELS_OF_FACTOR == _PANELS_OF_FACTOR - 1:  # the last that is multiplied by it
            tile = self._column(panel) // scaled_rows.TILE
            pointer = rows[group] + (scaled_rows.FACTORS + 4 * tile)
            self.factors[self._factor(i)] = load_vec(pointer, 1)[0]

    def wide(self, i: int) -> list[Int32]:
        factor = as_float(self.factors[self._factor(i)])
        return [x for word in self.words(i) for x in scaled(word, factor)]

    def _factor(self, i: int) -> int:
        group, panel = self.upconversion.shares[i]
        return group * self.upconversion.tile.panels // _PANELS_OF_FACTOR + panel // _PANELS_OF_FACTOR


@dataclass(frozen=True)
class RotatedPart(Part):
    """The rotated columns of `scaled_rows`, which have 16 bits: copied when their place is free, without registers."""

    def load(self, rows: Sequence[cute.Pointer], i: int) -> None:
        pass

    def start_copy(self, stage: int, rows: Sequence[cute.Pointer]) -> None:
        upconversion = self.upconversion
        bases = upconversion.store_bases(upconversion.first + stage * upconversion.step)
        for group, _ in upconversion.shares:
            source = rows[group] + (scaled_rows.ROTATED + 2 * upconversion.column())
            for half, base in enumerate(bases):
                copy_async(source + half * 4 * _VEC, base + upconversion.offset((group, 0)), Int32(4 * _VEC))

    def convert(self, stage: int, cursor: Cursor, following: Part, rows: Sequence[cute.Pointer]) -> Cursor:
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cursor.arrive()
        return cursor.next()


def parts_of(context: LatentContext) -> tuple[Part, ...]:
    """The parts of the key blocks: left, right and, if there is one, the tail. The first two share registers."""
    cfg = context.cfg
    bounds = [range(first, stop) for first, stop in itertools.pairwise(cfg.part_bounds)]
    shares = cfg.tile_n * COLUMNS // (4 * _VEC * _THREADS)  # of a panel and thread
    registers: dict[tuple[type[Part], int], list[cute.Tensor]] = {}
    parts = []
    for i, panels in enumerate(bounds):
        tile = Tile(cfg.tile_n, len(panels) * COLUMNS)
        address = context.smem.address("K and P") + panels.start * tile.panel_bytes
        upconversion = Upconversion(address, cfg.stage_bytes, tile, Stored(cfg.cache.dtype, cfg.v_dtype))
        kind: type[Part] = Part
        if cfg.cache.has_scaled_rows:
            kind = ScaledPart if i < HALVES else RotatedPart
        if (kind, len(panels)) not in registers:
            registers[kind, len(panels)] = [cute.make_rmem_tensor(_VEC * shares * len(panels), Int32)]
            if kind is ScaledPart:
                factors = shares * len(panels) // _PANELS_OF_FACTOR
                registers[kind, len(panels)].append(cute.make_rmem_tensor(factors, Int32))
        parts.append(kind(panels.start, upconversion, *registers[kind, len(panels)]))
    return tuple(parts)


@dataclass(frozen=True)
class ByteBlocks(Constant):
    """Key blocks of a work tile, in registers part by part. rows: of a block, those of this thread; it has the pages of
    the block to load next."""

    context: LatentContext
    work: Work
    rows: KeyRows
    parts: tuple[Part, ...]

    @staticmethod
    def of(context: LatentContext, work: Work) -> ByteBlocks:
        parts = parts_of(context)
        upconversion = parts[0].upconversion
        rows = KeyRows.of(context, work, tuple(upconversion.row(group) for group in range(upconversion.groups)))
        return ByteBlocks(context, work, rows, parts)

    def block(self, n: Int32) -> Int32:
        block_iter = self.work.block_iter
        return block_iter.block(block_iter.ahead(block_iter.start(), n))

    def rows_of(self, n: Int32) -> list[cute.Pointer]:
        """This thread's rows of the n-th block, whose pages are loaded."""
        x, block = self.context.args.k, self.block(n)
        return [self.rows.source(x, block, i)[0] for i in range(len(self.rows.tile_rows))]

    def start(self) -> None:
        """Start to load the first block's left part and tail."""
        left, _, *tail = self.parts
        self.rows.load_pages(self.block(0))
        rows = self.rows_of(0)
        for part in (left, *tail):
            for i in range(len(part.upconversion.shares)):
                part.load(rows, i)

    def convert(self, n: Int32, half: int, cursors: list[Cursor]) -> list[Cursor]:
        """Whole warpgroup: store the n-th block, one of warpgroup `half`, and start to load the next one."""
        left, right, *tail = self.parts
        rows = self.rows_of(n)
        self.rows.load_pages(self.block(n + 1))
        cursors[0].wait()
        done = [left.convert(half, cursors[0], right, rows)]
        cursors[1].wait()
        for part in tail:
            part.start_copy(half, rows)
        rows = self.rows_of(n + 1)
        done.append(right.convert(half, cursors[1], left, rows))
        return done + [part.convert(half, cursors[-1], part, rows) for part in tail]
