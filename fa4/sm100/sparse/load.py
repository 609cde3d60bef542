"""Load role, one warp: Q and dO once, and in every step the right operands of all products, in the order of `mma`.

A stage of the ring has 64 rows and 64 columns. Rows of K and V are gathered, four with each instruction.

Waits:   load_mma_right.free
Signals: load_mma_{Q,dO,right}.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ...bwd.device.list_work import SparseWork, work_tile
from ...pipeline.cursor import Cursor, produce
from ...pipeline.smem import PANEL_ROW_BYTES
from ...pipeline.tma import TmaTile, descriptor_of, tma_load, tma_load_panel
from ..stages import CTA_ROWS, PAIR, PANEL_COLUMNS
from .config import TILE_N, UNIT, Gradient, Product, Sm100SparseConfig
from .context import Sm100SparseContext
from .rows import ROWS, RowNumbers, gather_if

_LANES = CTA_ROWS // ROWS  # that load a stage


@cute.jit
def load(context: Sm100SparseContext):
    ends, work = context.ends("load"), work_tile(context)
    if work.count > 0:
        rank = rank_of()
        load_heads(context, work, rank, "q", "Q", produce(ends.load_mma_Q))
        if const_expr(context.cfg.keeps_do):
            load_heads(context, work, rank, "do", "dO", produce(ends.load_mma_dO))
        operands = produce(ends.load_mma_right)
        own, after = RowNumbers.of(1), RowNumbers.of(1)
        both = RowNumbers.of(PAIR)
        own.load(context, work, first_keys(Int32(0), [rank]))
        operands = load_keys(context, operands, "k", own, rank)
        steps = work.blocks(context)
        own_do = None if const_expr(context.cfg.keeps_do) else work
        for i in cutlass.range(steps, unroll=1):
            after.load(context, work, first_keys(i + 1, [rank]))
            both.load(context, work, first_keys(i, range(PAIR)))
            operands = load_keys(context, operands, "v", own, rank, own_do)
            if i + 1 < steps:
                operands = load_keys(context, operands, "k", after, rank)
            for product in context.cfg.products:
                operands = load_product(context, work, operands, product, both, rank)
            own.copy(after)


def rank_of() -> Int32:
    """Return the CTA's rank in its pair."""
    return cute.arch.make_warp_uniform(Int32(cute.arch.block_idx()[0]) % PAIR)


def first_keys(step: Int32, groups: range | list[Int32]) -> list[Int32]:
    """Return the first key of this thread in these groups of 64 keys of a step."""
    lane = cute.arch.lane_idx() % _LANES * ROWS
    return [step * TILE_N + group * CTA_ROWS + lane for group in groups]


def load_heads(
    context: Sm100SparseContext, work: SparseWork, rank: Int32, name: str, region: str, cursor: Cursor
) -> None:
    """Load this CTA's heads of Q or dO."""
    tma = context.tma(name)
    cursor.expect_tx(tma.tile.nbytes, rank)
    pointer = context.smem.pointer(region, context.cfg.dtype)
    tma_load(tma, work.matrix(tma.tensor), head_tile(context.cfg, work, rank), pointer, cursor.barrier())


def head_tile(cfg: Sm100SparseConfig, work: SparseWork, index: Int32 | int) -> Int32:
    """Return a tile of 64 heads of this work; the last one that there is, if there are fewer heads: P and dS of the
    others are 0."""
    return cutlass.min(work.first // CTA_ROWS + index, (cfg.group - 1) // CTA_ROWS)


def load_keys(
    context: Sm100SparseContext,
    operands: Cursor,
    name: str,
    own: RowNumbers,
    rank: Int32,
    work: SparseWork | None = None,
) -> Cursor:
    """Load all columns of this CTA's keys of a step; with `work`, those of dO of its heads before them, panel by panel.
    Returns the cursor after them."""
    tma = context.tma(name)
    descriptor = descriptor_of(tma)
    for panel in range(tma.tile.panels):
        if work is not None:
            operands = load_unit(context, work, operands, context.tma("do"), rank, Int32(panel), rank)
        operands = gather(context, operands, descriptor, own.of_group(0), Int32(panel), rank)
    return operands


def load_product(
    context: Sm100SparseContext, work: SparseWork, operands: Cursor, product: Product, both: RowNumbers, rank: Int32
) -> Cursor:
    """Load this CTA's columns of all heads, or of all keys of dQ. Returns the cursor after them."""
    tma = context.tma({Gradient.DV: "do", Gradient.DK: "q", Gradient.DQ: "k"}[product.gradient])
    # Past the last panel load that one again: a box must not lie wholly outside its tensor.
    panel = cutlass.min(PAIR * product.part + rank, tma.tile.panels - 1)
    for group in range(PAIR):
        if product.gradient is Gradient.DQ:
            operands = gather(context, operands, descriptor_of(tma), both.of_group(group), panel, rank)
        else:
            operands = load_unit(context, work, operands, tma, group, panel, rank)
    return operands


def load_unit(
    context: Sm100SparseContext,
    work: SparseWork,
    operands: Cursor,
    tma: TmaTile,
    group: Int32 | int,
    panel: Int32,
    rank: Int32,
) -> Cursor:
    """Load 64 columns of 64 heads."""
    operands.wait()
    operands.expect_tx(UNIT.nbytes, rank)
    pointer = context.smem.pointer("right", context.cfg.dtype) + operands.stage * (UNIT.rows * UNIT.columns)
    tile = head_tile(context.cfg, work, group)
    tma_load_panel(tma, work.matrix(tma.tensor), tile, panel, pointer, operands.barrier())
    return operands.next()


def gather(
    context: Sm100SparseContext, operands: Cursor, descriptor: Int64, numbers: list[Int32], panel: Int32, rank: Int32
) -> Cursor:
    """Load 64 columns of 64 listed rows."""
    operands.wait()
    operands.expect_tx(UNIT.nbytes, rank)
    address = context.smem.address("right") + operands.stage * UNIT.nbytes
    address += cute.arch.lane_idx() * (ROWS * PANEL_ROW_BYTES)
    exists = Boolean(cute.arch.lane_idx() < _LANES)
    gather_if(exists, descriptor, numbers, panel * PANEL_COLUMNS, address, operands.barrier(), PAIR)
    return operands.next()
