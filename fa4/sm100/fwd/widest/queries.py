"""Q of the products with 8-bit rows: bfloat16 rows of Q are scaled and become float16, see `fwd.device.q_scales`."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ....core.vec_io import load_vec, store_vec
from ....fwd.device.q_scales import largest, scale_of, scaled
from ....pipeline.cursor import consume, produce
from ....pipeline.ends import Ends
from ....pipeline.smem import PANEL_ROW_BYTES
from ...stages import CTA_ROWS
from ...tensor_memory import LANES
from .config import S_STAGES
from .context import WidestContext

_CHUNK = 16  # bytes per access
_CHUNKS = PANEL_ROW_BYTES // _CHUNK


def row_of_thread() -> Int32:
    """Row of this thread among those of the CTA."""
    return Int32(cute.arch.thread_idx()[0]) % CTA_ROWS


def half_of_warp() -> Int32:
    """Which half of the columns of Q, of S and of each part of O a warp has."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 2


def of_other_half(context: WidestContext, stage: Int32, x: Float32) -> Float32:
    """The value of the thread with the other half of this row. stage: another one at the next call."""
    values = cute.make_tensor(context.smem.pointer("halves", Float32), cute.make_layout((LANES, S_STAGES + 1)))
    thread = cute.arch.thread_idx()[0]
    values[thread, stage] = x
    cute.arch.barrier(barrier_id=context.halves_exchanged, number_of_threads=LANES)
    return values[thread ^ CTA_ROWS, stage]


def scale_q(context: WidestContext, ends: Ends) -> Float32:
    """Softmax warpgroup: wait for Q, divide each row by a scale and round it to float16. Returns the scale of this
    thread's row."""
    consume(ends.load_softmax_Q).wait()
    pointers = [_chunk(context, panel, i) for panel in range(context.cfg.q_tile.panels) for i in range(_CHUNKS // 2)]
    loaded = [load_vec(pointer, 4) for pointer in pointers]
    row_max = largest(word for words in loaded for word in words)
    scale, inverse = scale_of(cute.arch.fmax(row_max, of_other_half(context, Int32(S_STAGES), row_max)))
    for pointer, words in zip(pointers, loaded):
        store_vec(pointer, scaled(words, inverse, context.cfg.v_dtype))
    produce(ends.softmax_mma_Q).arrive()
    return scale


def _chunk(context: WidestContext, panel: int, i: int) -> cute.Pointer:
    """Address of one of this thread's 16-byte chunks of a panel's row. Eight neighbouring rows are read without bank
    conflicts."""
    row = row_of_thread()
    chunk = (half_of_warp() * (_CHUNKS // 2) + i) ^ (row % _CHUNKS)
    address = context.smem.address("Q") + panel * context.cfg.q_tile.panel_bytes
    address += row * PANEL_ROW_BYTES + chunk * _CHUNK
    return cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=_CHUNK)
