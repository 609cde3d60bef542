"""Sums of dV and dK over the CTAs that share a key block: each has computed those of some of the queries.

A main kernel of which several CTAs (parts) share each block of KEYS keys writes what every part has to float32 sums. A
warpgroup of it has 64 keys: first all dV of these, then all dK. Four elements of each thread are contiguous, then the
next four. This kernel adds the parts in their order, so results repeat, and applies the scale of dK. A CTA of it is a
warpgroup, whose threads have the elements of the same threads of the main kernel, in some columns.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.vec_io import load_floats, pack_half, store_vec
from ...pipeline.fragment import ROWS_PER_THREAD, first_column, row_in_warp
from ...pipeline.roles import ROWS_PER_WARP, WARPS_PER_WARPGROUP
from ..blocks import KEYS, RowBlocks

_ROWS = WARPS_PER_WARPGROUP * ROWS_PER_WARP  # keys of a warpgroup
_THREADS = 32 * WARPS_PER_WARPGROUP
_COLUMNS = 8  # columns in which a thread has four elements, in two of its keys
_EIGHTS = 4  # of columns, for a CTA


def launch_key_sums(
    dv: cute.Tensor, dk: cute.Tensor, sums: cute.Tensor, scale: Float32, cfg: RowBlocks, stream
) -> None:
    """Launch from inside a `cute.jit` host function. dv, dk: matrices (keys, columns, heads, batch). sums: (elements,
    key blocks, heads, batch, parts)."""
    blocks, heads, batch = (cute.size(sums, mode=[mode]) for mode in (1, 2, 3))
    pieces = sum(_pieces(columns) for columns in cfg.key_columns)
    grid = pieces * (KEYS // _ROWS) * blocks, heads, batch
    kernel(dv, dk, sums, scale, cfg).launch(grid=grid, block=(_THREADS, 1, 1), stream=stream)


def _pieces(columns: int) -> int:
    """CTAs that have the columns of a warpgroup's gradient."""
    return -(-columns // (_COLUMNS * _EIGHTS))


@cute.kernel
def kernel(dv: cute.Tensor, dk: cute.Tensor, sums: cute.Tensor, scale: Float32, cfg: cutlass.Constexpr[RowBlocks]):
    columns_v, columns = cfg.key_columns
    pieces_v, pieces = _pieces(columns_v), _pieces(columns)
    index, head, batch = cute.arch.block_idx()
    keys, piece = index // (pieces_v + pieces), index % (pieces_v + pieces)
    source = sums[None, keys // (KEYS // _ROWS), head, batch, None]
    start = keys % (KEYS // _ROWS) * (_ROWS * (columns_v + columns))
    if piece < pieces_v:
        add_parts(dv[None, None, head, batch], source, start, keys, piece, Float32(1.0), cfg, columns_v)
    else:
        start += _ROWS * columns_v
        add_parts(dk[None, None, head, batch], source, start, keys, piece - pieces_v, scale, cfg, columns)


@cute.jit
def add_parts(
    gradient: cute.Tensor,
    sums: cute.Tensor,
    start: Int32,
    keys: Int32,
    piece: Int32,
    scale: Float32,
    cfg: cutlass.Constexpr[RowBlocks],
    columns: cutlass.Constexpr[int],
):
    """Add a warpgroup's parts of some columns of a gradient. gradient: matrix of all keys. sums: (elements, parts).
    start: first element of the gradient of these keys. keys: index of the warpgroup's keys. columns: of the sums."""
    thread, warp = cute.arch.thread_idx()[0], cute.arch.thread_idx()[0] // 32
    total = cute.make_rmem_tensor((4, _EIGHTS), Float32)
    total.fill(0.0)
    for part in cutlass.range(cute.size(sums, mode=[1]), unroll=1):
        source = sums.iterator + cute.crd2idx((start + 4 * thread, part), sums.layout)
        for i in cutlass.range_constexpr(_EIGHTS):
            eight = piece * _EIGHTS + i
            if eight < columns // _COLUMNS:
                for j, x in enumerate(load_floats(source + eight * (4 * _THREADS), 4)):
                    total[j, i] = total[j, i] + x
    for i in cutlass.range_constexpr(_EIGHTS):
        column = (piece * _EIGHTS + i) * _COLUMNS + first_column()
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            key = keys * _ROWS + warp * ROWS_PER_WARP + row_in_warp(r)
            if key < cute.size(gradient, mode=[0]) and column < cute.size(gradient, mode=[1]):
                target = gradient.iterator + cute.crd2idx((key, column), gradient.layout)
                store_vec(target, [pack_half(total[2 * r, i] * scale, total[2 * r + 1, i] * scale, cfg.dtype)])
