"""Reduce role, eight warps: adds columns of dV and dK of a step to the float32 sums of their keys.

Deterministic: stores them to rows of the list's own.

Threads read tensor memory in the form in which four of them have 8 neighbouring columns of a key, 32 bytes.

Waits:   mma_reduce_over_{S,dP}.full
Signals: mma_reduce_over_{S,dP}.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....bwd.device.list_work import SparseWork, work_tile
from ....pipeline.cursor import Cursor, consume
from ....pipeline.roles import WARP
from ... import tmem
from ...stages import PANEL_COLUMNS
from ..sums import KEYS_OF_THREAD, add_columns
from .config import INSTANCES, KEYS, SUM_COLUMNS, Place
from .context import Sm100TransposedContext


@cute.jit
def reduce(context: Sm100TransposedContext):
    ends, work = context.ends("reduce"), work_tile(context)
    instance = _warp() // 4 % INSTANCES
    for own in cutlass.range_constexpr(INSTANCES):
        if instance == own:
            over_s, over_dp = consume(ends.mma_reduce_over_S, own), consume(ends.mma_reduce_over_dP, own)
            for step in cutlass.range(work.blocks(context), unroll=1):
                over_s, over_dp = add_step(context, work, step, own, over_s, over_dp)


def add_step(
    context: Sm100TransposedContext, work: SparseWork, step: Int32, instance: int, over_s: Cursor, over_dp: Cursor
) -> tuple[Cursor, Cursor]:
    """Add this instance's columns of a step. Returns the cursors after it."""
    keys = [step * KEYS + key_of_thread(i) for i in range(KEYS_OF_THREAD)]
    rows = [work.target_row(context, key) for key in keys]
    exists = [key < work.count for key in keys]
    column = instance * SUM_COLUMNS
    for panel in context.cfg.panels:
        is_in_s = panel.place is Place.S
        full, span = (over_s, context.tmem.over_S) if is_in_s else (over_dp, context.tmem.over_dP)
        full.wait()
        values = tmem.load_quads(tmem.lane_address(span + column, _warp()), SUM_COLUMNS)
        tmem.wait_loads()
        full.arrive()
        first = Int32(panel.number * PANEL_COLUMNS + column)
        add_columns(context, work, panel.is_dv, first, values, rows, exists)
        over_s, over_dp = (full.next(), over_dp) if is_in_s else (over_s, full.next())
    return over_s, over_dp


def _warp() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


def key_of_thread(i: int) -> Int32:
    """Return this thread's i-th key of a step."""
    return _warp() % 4 * WARP + i * tmem.QUAD_ROWS + cute.arch.lane_idx() // 4
