"""Load role, one warp: the panels of Q that are not in tensor memory once, and K block by block.

A stage of the ring has 128 columns of 64 keys; the last one of a block may have 64.

Waits:   load_mma_K.free
Signals: load_mma_{Q,K}.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ....bwd.device.list_work import SparseWork, work_tile
from ....pipeline.cursor import Cursor, produce
from ....pipeline.smem import PANEL_ROW_BYTES
from ....pipeline.tma import descriptor_of, tma_load_panel
from ...stages import PANEL_COLUMNS, STAGE_BYTES
from ..rows import ROWS, RowNumbers, gather_if
from .config import HEADS, KEYS, KEYS_PANEL
from .context import ListsForwardContext

_LANES = KEYS // ROWS  # that load a panel


@cute.jit
def load(context: ListsForwardContext):
    ends, work = context.ends("load"), work_tile(context)
    if work.count > 0:
        if const_expr(context.cfg.q_panels_in_smem > 0):
            load_q(context, work, produce(ends.load_mma_Q))
        keys = produce(ends.load_mma_K)
        own, after = RowNumbers.of(1), RowNumbers.of(1)
        own.load(context, work, first_keys(Int32(0)))
        for i in cutlass.range(work.blocks(context), unroll=1):
            after.load(context, work, first_keys(i + 1))  # a block before they are used
            keys = load_block(context, keys, own)
            own.copy(after)


def first_keys(block: Int32) -> list[Int32]:
    """Return the first of this thread's keys in a block."""
    return [block * KEYS + cute.arch.lane_idx() % _LANES * ROWS]


def load_q(context: ListsForwardContext, work: SparseWork, cursor: Cursor) -> None:
    cfg, tma = context.cfg, context.tma("q")
    cursor.expect_tx(cfg.q_panels_in_smem * KEYS_PANEL.nbytes)
    for i in range(cfg.q_panels_in_smem):
        pointer = context.smem.pointer("Q", cfg.dtype) + i * (KEYS_PANEL.nbytes * 8 // cfg.dtype.width)
        panel = Int32(cfg.q_panels_in_tmem + i)
        tma_load_panel(tma, work.matrix(tma.tensor), work.first // HEADS, panel, pointer, cursor.barrier())


def load_block(context: ListsForwardContext, keys: Cursor, own: RowNumbers) -> Cursor:
    """Load a block of K. Returns the cursor after its stages."""
    descriptor, panels = descriptor_of(context.tma("k")), context.cfg.q_tile.panels
    for stage in range(context.cfg.stages_of_block):
        count = min(panels - 2 * stage, 2)
        keys.wait()
        keys.expect_tx(count * KEYS_PANEL.nbytes)
        address = context.smem.address("K") + keys.stage * STAGE_BYTES
        address += cute.arch.lane_idx() * (ROWS * PANEL_ROW_BYTES)  # the panels of a stage lie one after the other
        column = (2 * stage + cute.arch.lane_idx() // _LANES) * PANEL_COLUMNS
        exists = Boolean(cute.arch.lane_idx() < count * _LANES)
        gather_if(exists, descriptor, own.of_group(0), column, address, keys.barrier(), 1)
        keys = keys.next()
    return keys
