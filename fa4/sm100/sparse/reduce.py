"""Reduce role, four warps: adds columns of dV and dK of a step to the float32 sums of their keys. Deterministic: stores
them to rows of the list's own.

Threads read tensor memory in the form in which four of them have 8 neighbouring columns of a key, 32 bytes.

Waits:   mma_reduce_{even,odd}.full
Signals: mma_reduce_{even,odd}.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...bwd.device.list_work import SparseWork, work_tile
from ...pipeline.cursor import Cursor, consume
from ...pipeline.roles import WARP
from .. import tmem
from ..stages import CTA_ROWS, PANEL_COLUMNS
from .config import COLUMNS, Gradient, Product
from .context import Sm100SparseContext
from .load import rank_of
from .sums import KEYS_OF_THREAD, add_columns


@cute.jit
def reduce(context: Sm100SparseContext):
    ends, work, rank = context.ends("reduce"), work_tile(context), rank_of()
    full = [consume(ends.mma_reduce_even), consume(ends.mma_reduce_odd)]
    for step in cutlass.range(work.blocks(context), unroll=1):
        keys = [step * context.cfg.tile_n + rank * CTA_ROWS + key_of_thread(i) for i in range(KEYS_OF_THREAD)]
        rows = [work.target_row(context, key) for key in keys]
        exists = [key < work.count for key in keys]
        for product in context.cfg.products:
            if const_expr(product.drains is not None):
                parity = product.drains % 2
                add_product(context, work, product, full[parity], rows, exists)
                full[parity] = full[parity].next()


def _warp() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4


def key_of_thread(i: int) -> Int32:
    """Return this thread's i-th key of its CTA's in a step: lanes 64 to 127 have the keys of lanes 0 to 63."""
    return _warp() % 2 * WARP + i * tmem.QUAD_ROWS + cute.arch.lane_idx() // 4


@cute.jit
def add_product(
    context: Sm100SparseContext,
    work: SparseWork,
    product: cutlass.Constexpr[Product],
    full: Cursor,
    rows: list,
    exists: list,
):
    """Add this thread's part of a product's columns."""
    cfg = context.cfg
    is_dv = const_expr(product.gradient is Gradient.DV)
    columns = cfg.head_dim_v if is_dv else cfg.head_dim
    span = context.tmem.odd if const_expr(product.drains % 2) else context.tmem.even
    full.wait()
    values = tmem.load_quads(tmem.lane_address(span, _warp()), PANEL_COLUMNS)
    tmem.wait_loads()
    full.arrive()
    first = product.part * COLUMNS + _warp() // 2 * PANEL_COLUMNS
    if first < columns:
        add_columns(context, work, is_dv, first, values, rows, exists)
