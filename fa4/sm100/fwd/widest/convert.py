"""Convert role of 8-bit rows, one warpgroup: loads rows of K and V into registers and stores them, converted to
16 bits, as stages of the ring. Each CTA of the pair has half of K's rows and half of V's columns.

Waits:   convert_mma_KV.free
Signals: convert_mma_KV.full, in the order in which the products read the stages: K of a block, then V of the previous
         one

Beside the tiles, shared memory has no room for bytes. So a register gets bytes of a following stage as soon as its own
are stored, and loads are in flight while this role converts or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....core.bytes import scaled
from ....core.constant import Constant
from ....core.stored import Stored
from ....core.vec_io import as_float, load_vec, load_vec_through_l2
from ....fwd.device.key_rows import KeyRows
from ....fwd.device.work import Work
from ....pipeline.cursor import Cursor, produce
from ....pipeline.roles import WARPS_PER_WARPGROUP
from ....pipeline.smem import Tile
from ....pipeline.upconvert import COLUMNS, Upconversion
from ....runtime import scaled_rows
from ...stages import CTA_ROWS, PAIR, STAGE_BYTES, column_parts, panels_of_stages
from ..work import key_block
from .context import WidestContext
from .work import work_of_pair

_VEC = 4  # 32-bit registers of a share
_ROWS = 8 * WARPS_PER_WARPGROUP  # of a group
_MOST_SLOTS = 22  # shares in the registers of a thread
_MOST_SCALED_SLOTS = 9  # with factors, whose products take more registers


@cute.jit
def convert(context: WidestContext):
    kv = produce(context.ends("convert").convert_mma_KV)
    work = work_of_pair(context)
    if work.count > 0:
        blocks = ByteBlocks.of(context, work)
        kv = blocks.first_k(kv)
        for i in cutlass.range(1, work.count, unroll=1):
            kv = blocks.k_and_previous_v(i, kv)
        blocks.last_v(work.count, kv)


@dataclass(frozen=True)
class Share(Constant):
    """16 bytes of a stage that a thread converts.

    stage: conversion of the stage. place: see `Upconversion.shares`. group: of this thread's rows in a block, the
    number of the share's. column: first column of the thread in the row. ends: whether the share is the first and the
    last one of its stage. has_factor: of `scaled_rows`.
    """

    has_factor: ClassVar[bool] = False

    stage: Upconversion
    place: tuple[int, int]
    group: int
    column: Int32
    ends: tuple[bool, bool]

    @staticmethod
    def of_stage(stage: Upconversion, group: int, panel: Int32 | int, columns: int, is_padded: bool) -> list[Share]:
        """Return the shares of a stage. group: of its first rows in a block. panel: its first one in a row of `columns`
        columns. is_padded: there may be panels or parts of one outside the row; valid columns replace them."""
        shares: list[Share] = []
        for place in stage.shares:
            column = (panel + place[1]) * COLUMNS + stage.column()
            column = cutlass.min(column, columns - 4 * _VEC) if is_padded else column
            is_first, is_last = place == stage.shares[0], place == stage.shares[-1]
            share = stage, place, group + place[0], column
            if stage.stored.source is not scaled_rows.DTYPE:
                shares.append(Share(*share, (is_first, is_last)))
            elif isinstance(panel, int) and (panel + place[1]) * COLUMNS >= scaled_rows.LATENT:
                shares += [RotatedShare(*share, (is_first and i == 0, is_last and i == 1), i) for i in range(2)]
            else:
                shares.append(ScaledShare(*share, (is_first, is_last)))
        return shares

    def source(self, row: cute.Pointer) -> cute.Pointer:
        return row + self.column

    def store(self, bases: list[Int32], words: list[Int32], factor: Float32 | None) -> None:
        self.stage.store(bases, self.place, words)


@dataclass(frozen=True)
class ScaledShare(Share):
    """The same with a factor in the row."""

    has_factor: ClassVar[bool] = True

    def store(self, bases: list[Int32], words: list[Int32], factor: Float32 | None) -> None:
        self.stage.store_wide(bases, self.place, [x for word in words for x in scaled(word, factor)])


@dataclass(frozen=True)
class RotatedShare(Share):
    """Rotated columns of `scaled_rows`, which have 16 bits: a half of the thread's columns."""

    half: int

    def source(self, row: cute.Pointer) -> cute.Pointer:
        return row + (scaled_rows.ROTATED + 2 * (self.column - scaled_rows.LATENT) + self.half * 4 * _VEC)

    def store(self, bases: list[Int32], words: list[Int32], factor: Float32 | None) -> None:
        self.stage.store_wide([bases[self.half]], self.place, words)


@dataclass(frozen=True)
class ByteOperand(Constant):
    """K or V in global memory, as this CTA loads it. rows: of a block, those of this thread; it has the pages of the
    block whose shares are loaded next."""

    x: cute.Tensor
    rows: KeyRows
    shares: tuple[Share, ...]

    @staticmethod
    def of_k(context: WidestContext, work: Work) -> ByteOperand:
        """This CTA's keys of a block."""
        cfg, shares = context.cfg, []
        for panels in panels_of_stages(cfg.k_tile):
            tile = Tile(cfg.keys, (panels.stop - panels.start) * COLUMNS)
            stage = _stage(context, tile)
            shares += Share.of_stage(stage, 0, panels.start, cfg.head_dim, cfg.head_dim % COLUMNS > 0)
        rows = _rows(context, work, context.args.order.rank * cfg.keys, cfg.keys)
        return ByteOperand(context.args.k, rows, tuple(shares))

    @staticmethod
    def of_v(context: WidestContext, work: Work) -> ByteOperand:
        """This CTA's columns of all keys of a block."""
        cfg, rank, shares = context.cfg, context.args.order.rank, []
        parts = column_parts(cfg.head_dim_v)
        for first_row in range(0, cfg.tile_n, CTA_ROWS):
            first_panel = 0
            for columns in parts:
                stage = _stage(context, Tile(CTA_ROWS, columns // PAIR))
                group, panel = first_row // _ROWS, first_panel + rank * stage.tile.panels
                shares += Share.of_stage(stage, group, panel, cfg.head_dim_v, sum(parts) > cfg.head_dim_v)
                first_panel += PAIR * stage.tile.panels
        x = context.args.k if cfg.cache.has_scaled_rows else context.args.v
        return ByteOperand(x, _rows(context, work, 0, cfg.tile_n), tuple(shares))


def _stage(context: WidestContext, tile: Tile) -> Upconversion:
    cfg = context.cfg
    return Upconversion(context.smem.address("KV"), STAGE_BYTES, tile, Stored(cfg.cache.dtype, cfg.v_dtype))


def _rows(context: WidestContext, work: Work, first: Int32 | int, count: int) -> KeyRows:
    """This thread's rows of `count` rows of a block."""
    of_all = _stage(context, Tile(count, COLUMNS))
    return KeyRows.of(context, work, tuple(first + of_all.row(group) for group in range(of_all.groups)))


@dataclass(frozen=True)
class ByteBlocks(Constant):
    """Key blocks of a work tile. An iteration stores K of a block, then V of the one before it.

    packed: registers of `slots` shares. The n-th share of an iteration has the slot n modulo `slots`, a divisor of the
    number of shares, so a share has the same registers in each iteration. factors: one for each slot.
    """

    context: WidestContext
    work: Work
    k: ByteOperand
    v: ByteOperand
    slots: int
    packed: cute.Tensor
    factors: cute.Tensor

    @staticmethod
    def of(context: WidestContext, work: Work) -> ByteBlocks:
        k, v = ByteOperand.of_k(context, work), ByteOperand.of_v(context, work)
        count = len(k.shares) + len(v.shares)
        most = min(_MOST_SCALED_SLOTS if context.cfg.cache.has_scaled_rows else _MOST_SLOTS, count - 1)
        slots = max(n for n in range(1, most + 1) if count % n == 0)
        packed, factors = (cute.make_rmem_tensor(words * slots, Int32) for words in (_VEC, 1))
        return ByteBlocks(context, work, k, v, slots, packed, factors)

    @property
    def count(self) -> int:
        """Shares of an iteration."""
        return len(self.k.shares) + len(self.v.shares)

    def first_k(self, kv: Cursor) -> Cursor:
        """Iteration 0, which has no V: load and store K of the first block. The slots then have the first shares of
        iteration 1."""
        k_count, iteration = len(self.k.shares), Iteration(self, Int32(0))
        for operand in (self.k, self.v):
            operand.rows.load_pages(iteration.block(0))
        for n in range(self.slots):
            iteration.load(n if n < k_count else self.count + n)
        return iteration.store(
            kv, range(k_count), lambda n: n + self.slots if n + self.slots < k_count else self.count + n % self.slots
        )

    def k_and_previous_v(self, i: Int32, kv: Cursor) -> Cursor:
        """Iteration i, whose first shares are in the slots. They then have those of the next one."""
        return Iteration(self, i).store(kv, range(self.count), lambda n: n + self.slots)

    def last_v(self, i: Int32, kv: Cursor) -> None:
        """The iteration after the last block, which has no K: load and store V of the last block."""
        numbers, iteration = range(len(self.k.shares), self.count), Iteration(self, i)
        for n in numbers[: self.slots]:
            iteration.load(n)
        iteration.store(kv, numbers, lambda n: n + self.slots if n + self.slots < self.count else None)


class Iteration:
    """Loads and stores of the i-th iteration. Shares are numbered from its first one on, into the next iteration."""

    def __init__(self, blocks: ByteBlocks, i: Int32) -> None:
        self.blocks, self.i = blocks, i
        self.row_pointers: dict[tuple[str, int, int], cute.Pointer] = {}

    def block(self, n: Int32 | int) -> Int32:
        """The n-th block, or the last one."""
        work = self.blocks.work
        return key_block(self.blocks.context, work, cutlass.min(Int32(n), work.count - 1))

    def place(self, n: int) -> tuple[str, int, int]:
        """("k" or "v", iterations ahead, number in the operand) of a share."""
        ahead, number = divmod(n, self.blocks.count)
        k_count = len(self.blocks.k.shares)
        return ("k", ahead, number) if number < k_count else ("v", ahead, number - k_count)

    def load(self, n: int) -> None:
        """Start to load a share into its slot; of each operand, shares are loaded in order."""
        name, ahead, number = self.place(n)
        operand: ByteOperand = getattr(self.blocks, name)
        share, block = operand.shares[number], self.i + (ahead if name == "k" else ahead - 1)
        key = name, ahead, share.group
        if key not in self.row_pointers:
            self.row_pointers[key] = operand.rows.source(operand.x, self.block(block), share.group)[0]
        row = self.row_pointers[key]
        for register, word in zip(self._registers(n), load_vec_through_l2(share.source(row))):
            self.blocks.packed[register] = word
        if share.has_factor:
            pointer = row + (scaled_rows.FACTORS + 4 * (share.column // scaled_rows.TILE))
            self.blocks.factors[n % self.blocks.slots] = load_vec(pointer, 1)[0]
        if number == len(operand.shares) - 1:
            operand.rows.load_pages(self.block(block + 1))

    def store(self, kv: Cursor, numbers: Iterable[int], following: Callable[[int], int | None]) -> Cursor:
        """Whole warpgroup: store shares of whole stages, and load the following share into the slot of each."""
        bases: list[Int32] = []
        for n in numbers:
            name, _, number = self.place(n)
            share: Share = getattr(self.blocks, name).shares[number]
            if share.ends[0]:
                kv.wait()
                bases = share.stage.store_bases(share.stage.first + kv.stage * share.stage.step)
            factor = as_float(self.blocks.factors[n % self.blocks.slots]) if share.has_factor else None
            share.store(bases, [self.blocks.packed[register] for register in self._registers(n)], factor)
            after = following(n)
            if after is not None:
                self.load(after)
            cute.arch.sync_warp()  # without it the compiler moves loads together, and spills
            if share.ends[1]:
                kv.arrive()
                kv = kv.next()
        return kv

    def _registers(self, n: int) -> range:
        first = n % self.blocks.slots * _VEC
        return range(first, first + _VEC)
