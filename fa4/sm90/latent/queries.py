"""Q of the products with 8-bit rows, which become float16: bfloat16 rows of Q are scaled, and rounded to float16.

A row is divided by the power of two that brings its largest element to between 2^14 and 2^15; scores are multiplied by
it later, as float32. Elements down to 2^-29 of the largest stay exact, the others have an error of at most 2^-40 of it:
far below the float32 rounding of the sums. e4m3 and int8 are exact in float16, and their conversion takes a quarter
of the instructions of that to bfloat16.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.fragment_coords import reduce_row
from ...core.vec_io import as_float, bits, load_vec, pack_half, store_vec
from ...pipeline.smem import PANEL_ROW_BYTES
from ..fragment import LANES_PER_ROW, ROWS_PER_THREAD, ROWS_PER_WARP, row_in_warp
from .config import LatentContext
from .rows import RowPairs, both_sync, store_pairs

_CHUNK = 16  # bytes per access
_ONE = 1 << 23  # step of a float's exponent field
_LARGEST = 14  # power of two of a row's largest scaled element


def scale_q(context: LatentContext, shared: RowPairs, half: int, warp: Int32) -> list[Float32]:
    """Both warpgroups: divide Q by a scale for each row and round it to float16. Returns the scales of this thread's
    rows. shared: to exchange maxima. half: of the columns, done by this warpgroup."""
    rows, panels = range(ROWS_PER_THREAD), range(context.cfg.q_tile.panels)
    chunks = {(r, panel): _chunk(context, warp, r, panel, half) for r in rows for panel in panels}
    loaded = {place: load_vec(pointer, 4) for place, pointer in chunks.items()}
    maxima, scales = [], []
    for r in rows:
        pair = functools.reduce(_max_pair, (word & 0x7FFF7FFF for panel in panels for word in loaded[r, panel]))
        maxima.append(reduce_row(cute.arch.fmax(*_floats(pair)), cute.arch.fmax))
    store_pairs(shared, half, warp, [(x, x) for x in maxima])
    both_sync()
    for r, (other, _) in enumerate(shared.load(1 - half, warp)):
        exponent = bits(cute.arch.fmax(maxima[r], other)) & (0xFF * _ONE)
        exponent = cutlass.max(cutlass.min(exponent, 254 * _ONE), 20 * _ONE)  # of infinity; its inverse is a float
        scales.append(as_float(exponent - _LARGEST * _ONE))
        inverse = as_float(254 * _ONE - bits(scales[r]))
        for panel in panels:
            pairs = [_floats(word) for word in loaded[r, panel]]
            halves = [pack_half(low * inverse, high * inverse, context.cfg.v_dtype) for low, high in pairs]
            store_vec(chunks[r, panel], halves)
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


def _floats(word: Int32) -> tuple[Float32, Float32]:
    """The two bfloat16 of a word."""
    return as_float(word << 16), as_float(word & -0x10000)


def _max_pair(a: Int32, b: Int32) -> Int32:
    return cute.arch.inline_ptx("max.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])
