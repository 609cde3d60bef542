"""Load role, one warp: Q and dO once, and in every step the left operands of scores and of dQ, in the order of `mma`.

A stage of the ring has 64 columns of all 128 keys of a step, or 128 columns of half of them. Each thread gathers four
rows of a panel.

Waits:   load_mma_left.free
Signals: load_mma_{Q,dO,left}.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ....bwd.device.list_work import SparseWork, work_tile
from ....pipeline.cursor import Cursor, produce
from ....pipeline.smem import PANEL_ROW_BYTES
from ....pipeline.tma import descriptor_of, tma_gather, tma_load
from ...stages import PANEL_COLUMNS
from ..rows import ROWS, RowNumbers
from .config import BY_COLUMNS, BY_KEYS, HEADS, KEYS
from .context import Sm100TransposedContext

_HALF_LANES = BY_KEYS.rows // ROWS  # that load a panel of half of the keys


@cute.jit
def load(context: Sm100TransposedContext):
    ends, work = context.ends("load"), work_tile(context)
    if work.count > 0:
        load_heads(context, work, "q", "Q", produce(ends.load_mma_Q))
        operands = produce(ends.load_mma_left)
        own, after, later = (RowNumbers.of(1) for _ in range(3))
        own.load(context, work, first_keys(Int32(0)))
        after.load(context, work, first_keys(Int32(1)))
        operands = load_keys(context, operands, "k", own)
        load_heads(context, work, "do", "dO", produce(ends.load_mma_dO))
        operands = load_keys(context, operands, "v", own)
        steps = work.blocks(context)
        for i in cutlass.range(steps, unroll=1):
            later.load(context, work, first_keys(i + 2))  # a step before they are used
            if i + 1 < steps:
                operands = load_keys(context, operands, "k", after)
                operands = load_keys(context, operands, "v", after)
            operands = load_for_dq(context, operands, own)
            own.copy(after)
            after.copy(later)


def first_keys(step: Int32) -> list[Int32]:
    """Return the first of this thread's keys in a step."""
    return [step * KEYS + cute.arch.lane_idx() * ROWS]


def load_heads(context: Sm100TransposedContext, work: SparseWork, name: str, region: str, cursor: Cursor) -> None:
    """Load the heads of Q or dO."""
    tma = context.tma(name)
    cursor.expect_tx(tma.tile.nbytes)
    pointer = context.smem.pointer(region, context.cfg.dtype)
    tma_load(tma, work.matrix(tma.tensor), work.first // HEADS, pointer, cursor.barrier())


def load_keys(context: Sm100TransposedContext, operands: Cursor, name: str, own: RowNumbers) -> Cursor:
    """Load all columns of K or V of a step, panel by panel. Returns the cursor after them."""
    tma = context.tma(name)
    for panel in range(tma.tile.panels):
        operands = gather(context, operands, descriptor_of(tma), own.of_group(0), Int32(panel * PANEL_COLUMNS))
    return operands


def load_for_dq(context: Sm100TransposedContext, operands: Cursor, own: RowNumbers) -> Cursor:
    """Load K of a step for dQ: 128 columns of either half of the keys, finally an odd panel of all keys. Returns the
    cursor after it."""
    descriptor, lane = descriptor_of(context.tma("k")), cute.arch.lane_idx() % _HALF_LANES
    halves = [[cute.arch.shuffle_sync(x, lane + half * _HALF_LANES) for x in own.of_group(0)] for half in range(2)]
    for tile in range(context.cfg.dq_tiles):
        for numbers in halves:
            panel = 2 * tile + cute.arch.lane_idx() // _HALF_LANES
            operands = gather(context, operands, descriptor, numbers, panel * PANEL_COLUMNS)
    if context.cfg.q_tile.panels % 2:
        column = Int32(2 * context.cfg.dq_tiles * PANEL_COLUMNS)
        operands = gather(context, operands, descriptor, own.of_group(0), column)
    return operands


def gather(
    context: Sm100TransposedContext, operands: Cursor, descriptor: Int64, numbers: list[Int32], column: Int32
) -> Cursor:
    """Load a stage: 64 columns, from `column` on, of this thread's rows. Threads have the rows of a panel, or of two,
    in order."""
    operands.wait()
    operands.expect_tx(BY_COLUMNS.nbytes)
    address = context.smem.address("left") + operands.stage * BY_COLUMNS.nbytes
    address += cute.arch.lane_idx() * (ROWS * PANEL_ROW_BYTES)
    tma_gather(descriptor, numbers, column, address, operands.barrier(), 1)
    return operands.next()
