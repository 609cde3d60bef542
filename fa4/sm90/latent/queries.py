"""Q of the products with 8-bit rows: bfloat16 rows of Q are scaled and become float16, see `fwd.device.q_scales`."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.fragment_coords import reduce_row
from ...core.vec_io import load_vec, store_vec
from ...fwd.device.q_scales import largest, scale_of, scaled
from ...pipeline.fragment import LANES_PER_ROW, ROWS_PER_THREAD, row_in_warp
from ...pipeline.roles import ROWS_PER_WARP
from ...pipeline.smem import PANEL_ROW_BYTES
from .context import LatentContext
from .rows import RowPairs, both_sync, store_pairs

_CHUNK = 16  # bytes per access


def scale_q(context: LatentContext, shared: RowPairs, half: int, warp: Int32) -> list[Float32]:
    """Both warpgroups: divide Q by a scale for each row and round it to float16. Returns the scales of this thread's
    rows. shared: to exchange maxima. half: of the columns, done by this warpgroup."""
    rows, panels = range(ROWS_PER_THREAD), range(context.cfg.q_tile.panels)
    chunks = {(r, panel): _chunk(context, warp, r, panel, half) for r in rows for panel in panels}
    loaded = {place: load_vec(pointer, 4) for place, pointer in chunks.items()}
    maxima, scales = [], []
    for r in rows:
        row_max = largest(word for panel in panels for word in loaded[r, panel])
        maxima.append(reduce_row(row_max, cute.arch.fmax))
    store_pairs(shared, half, warp, [(x, x) for x in maxima])
    both_sync()
    for r, (other, _) in enumerate(shared.load(1 - half, warp)):
        scale, inverse = scale_of(cute.arch.fmax(maxima[r], other))
        scales.append(scale)
        for panel in panels:
            store_vec(chunks[r, panel], scaled(loaded[r, panel], inverse, context.cfg.v_dtype))
    cute.arch.fence_proxy("async.shared", space="cta")
    both_sync()
    return scales


def _chunk(context: LatentContext, warp: Int32, r: int, panel: int, half: int) -> cute.Pointer:
    """Address of one of the 16-byte chunks of a panel's row that four threads share. Rows of odd numbers have their
    halves the other way round, to avoid bank conflicts; the swizzle does not matter."""
    row = warp * ROWS_PER_WARP + row_in_warp(r)
    chunk = cute.arch.lane_idx() % LANES_PER_ROW + (half ^ row % 2) * LANES_PER_ROW
    address = context.smem.address("Q") + panel * context.cfg.q_tile.panel_bytes
    address += row * PANEL_ROW_BYTES + chunk * _CHUNK
    return cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=_CHUNK)
