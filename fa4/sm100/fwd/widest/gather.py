"""Part of the load role, for pages of one row: loads any rows of K and V by TMA, four with each instruction.

The stages, and what is in them, are those of `load`. One instruction of each thread fills a stage. The numbers of a
part's rows are loaded while the part before it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ....core.cache import page_at
from ....core.constant import Constant
from ....fwd.device.work import Work
from ....pipeline.cursor import Cursor
from ....pipeline.smem import PANEL_ROW_BYTES, Tile
from ....pipeline.tma import descriptor_of, tma_gather
from ...stages import CTA_ROWS, PAIR, PANEL_COLUMNS, STAGE_BYTES, panels_by_rows, panels_of_stages
from ..work import key_block
from .context import WidestContext

_ROWS = 4  # of an instruction


@cute.jit
def gather_blocks(context: WidestContext, work: Work, kv: Cursor):
    """Load all key blocks."""
    k, v = GatheredK.of(context, work), GatheredV.of(context, work)
    k.load_numbers(Int32(0))
    kv = k.load(kv)
    for i in cutlass.range(1, work.count, unroll=1):
        k.load_numbers(i)
        v.load_numbers(i - 1)
        kv = k.load(kv)
        kv = v.load(kv)
    v.load_numbers(work.count - 1)
    v.load(kv)


@dataclass(frozen=True)
class Gathered(Constant):
    """K or V of a work tile. numbers: rows that this thread loads of a block, those of the last `load_numbers`."""

    context: WidestContext
    work: Work
    tile: Tile
    descriptor: Int64
    numbers: cute.Tensor

    def load_rows(self, block: Int32, first: Int32, place: int) -> None:
        """Load the numbers of four keys of a block from the `first` on; of the last key if there are no more."""
        keys, pages = self.work.keys, cute.size(self.context.tma("k").tensor, mode=[0])
        for i in range(_ROWS):
            key = cutlass.min(block * self.context.cfg.tile_n + first + i, keys.count - 1)
            self.numbers[place + i] = page_at(keys.table, keys.rows.first + key, pages)

    def fill(self, kv: Cursor, rows: int, place: int, panel: Int32, panels: int) -> None:
        """Load the stage of the cursor: `panels` panels of `rows` rows. panel: the one in a row of K or V that this
        thread loads a part of; any if the stage has none for this thread."""
        kv.expect_tx(panels * rows * PANEL_ROW_BYTES, self.context.args.order.rank)
        address = self.context.smem.address("KV") + kv.stage * STAGE_BYTES
        address += cute.arch.lane_idx() * (_ROWS * PANEL_ROW_BYTES)  # the panels of a stage lie one after the other
        numbers = [self.numbers[place + i] for i in range(_ROWS)]
        exists = cute.arch.lane_idx() < panels * rows // _ROWS
        _gather(exists, self.descriptor, numbers, panel * PANEL_COLUMNS, address, kv.barrier())


@cute.jit
def _gather(
    exists: Boolean, descriptor: Int64, rows: list[Int32], column: Int32, address: Int32, barrier: cute.Pointer
):
    if exists:
        tma_gather(descriptor, rows, column, address, barrier, PAIR)


@dataclass(frozen=True)
class GatheredK(Gathered):
    """This CTA's keys of a block; a stage has some panels of them."""

    @staticmethod
    def of(context: WidestContext, work: Work) -> GatheredK:
        numbers = cute.make_rmem_tensor(_ROWS, Int32)
        return GatheredK(context, work, context.cfg.k_tile, descriptor_of(context.tma("k")), numbers)

    def load_numbers(self, i: Int32) -> None:
        cfg = self.context.cfg
        first = self.context.args.order.rank * cfg.keys + cute.arch.lane_idx() % (cfg.keys // _ROWS) * _ROWS
        self.load_rows(key_block(self.context, self.work, i), first, 0)

    def load(self, kv: Cursor) -> Cursor:
        in_stage = cute.arch.lane_idx() // (self.tile.rows // _ROWS)
        for panels in panels_of_stages(self.tile):
            kv.wait()
            self.fill(kv, self.tile.rows, 0, panels.start + in_stage, panels.stop - panels.start)
            kv = kv.next()
        return kv


@dataclass(frozen=True)
class GatheredV(Gathered):
    """This CTA's columns of V of a block; a stage has some panels of 64 keys."""

    @staticmethod
    def of(context: WidestContext, work: Work) -> GatheredV:
        numbers = cute.make_rmem_tensor(_ROWS * (context.cfg.tile_n // CTA_ROWS), Int32)
        return GatheredV(context, work, context.cfg.v_tile, descriptor_of(context.tma("v")), numbers)

    def load_numbers(self, i: Int32) -> None:
        block = key_block(self.context, self.work, i)
        for group in range(self.context.cfg.tile_n // CTA_ROWS):
            first = group * CTA_ROWS + cute.arch.lane_idx() % (CTA_ROWS // _ROWS) * _ROWS
            self.load_rows(block, first, group * _ROWS)

    def load(self, kv: Cursor) -> Cursor:
        tile, rank = self.tile, self.context.args.order.rank
        in_stage = cute.arch.lane_idx() // (CTA_ROWS // _ROWS)
        for group in range(self.context.cfg.tile_n // CTA_ROWS):
            for first_panel, panels in panels_by_rows(tile.columns):
                # Past the last panel load that one again, as `load_by_rows` does.
                panel = cutlass.min(first_panel + rank * panels + in_stage, tile.panels - 1)
                kv.wait()
                self.fill(kv, CTA_ROWS, group * _ROWS, panel, panels)
                kv = kv.next()
        return kv
