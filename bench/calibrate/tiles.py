"""Tiles of a tensor of rows and heads: by TMA from a tensor map, and by cp.async; by the bytes of a row of a head."""

from __future__ import annotations

import torch

from .copies import STAGES, STREAM, stream
from .frame import SCRATCH, Bench, Section, TiledTensor, init, looped, timed

WIDTHS = (64, 72, 80, 96, 128)  # columns of 16 bits
_ROWS = 128  # of a tile
_AGAIN, _FAR = 4, 32  # tiles of a CTA: of those that L2 holds, and of those that it does not
_LOADS, _FAR_ROUNDS = 32, 3
_LOAD = (
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{to}], "
    "[map, {{{column}, line, head}}], [barrier];"
)
_WHERE = ("one SM", "all SMs", "all SMs, from DRAM")


def _name(columns: int, row_bytes: int, where: str) -> str:
    boxes = "" if row_bytes == 128 else f" in boxes of {row_bytes} bytes"
    return f"TMA tiles of {_ROWS} rows of {2 * columns} bytes{boxes}, {STAGES} in flight, {where}"


def tma_tiles(columns: int, row_bytes: int, where: str) -> Bench:
    """STAGES tiles in flight, of heads side by side. A tile is as many boxes as its rows need; the part of a box beyond
    them is filled with zeros. where: of `_WHERE`; from DRAM each repetition reads what nobody has read."""
    is_far = where == _WHERE[2]
    tensor = TiledTensor(_ROWS * (_FAR * _FAR_ROUNDS if is_far else _AGAIN), columns, row_bytes)
    tile, of_box = tensor.tile, row_bytes // 2
    issue = "mov.b32 line, load;" if is_far else f"and.b32 line, load, {_AGAIN - 1};"
    issue += f"mad.lo.u32 line, line, {_ROWS}, base;"
    for panel in range(tile.panels):
        issue += f"add.u32 place, to, {panel * tile.panel_bytes};"
        issue += _LOAD.format(to="place", column=of_box * panel)
    body = timed(0, stream(issue, tile.nbytes, _LOADS))
    return Bench(
        _name(columns, row_bytes, where), (Section("stream", _LOADS, "tile"),),
        body + (f"add.u32 base, base, {_ROWS * _FAR};" if is_far else ""),
        lambda: torch.zeros(SCRATCH // 4, dtype=torch.int32), lambda before, rounds: before,
        declared=STREAM + ".reg .b32 line, head, base, place;",
        before=f"mov.b32 again, 0; and.b32 head, cta, {tensor.heads - 1}; shr.u32 base, cta, 4;"
               f"mul.lo.u32 base, base, {tensor.rows};" + init(*[1] * STAGES),
        ctas=1 if where == _WHERE[0] else -1, smem_bytes=STAGES * tile.nbytes, tiles=tensor,
        rounds=_FAR_ROUNDS if is_far else 5, chips=("sm_90a", "sm_100a"),
    )  # fmt: skip


_THREADS, _COLUMNS = 128, (64, 72, 128)


def copied_tiles(columns: int, everywhere: bool) -> Bench:
    """The same tiles by cp.async of 16 bytes a thread: a group each, and two groups in flight."""
    vectors = columns // 8  # of a row
    count = _ROWS * vectors // _THREADS
    nbytes, stride = _ROWS * 2 * columns, 2 * 16 * columns
    places = "".join(
        f"add.u32 vector, thread, {_THREADS * i}; div.u32 line, vector, {vectors};"
        f"mad.lo.u32 column, line, {-vectors}, vector; mul.lo.u32 line, line, {stride};"
        f"mad.lo.u32 line, column, 16, line; cvt.u64.u32 at{i}, line; add.u64 at{i}, at{i}, own;"
        for i in range(count)
    )
    copies = "".join(
        f"add.u64 from, at{i}, step; cp.async.cg.shared.global [to+{16 * _THREADS * i}], [from], 16;\n"
        for i in range(count)
    )
    load = f"""
    and.b32 line, load, {_AGAIN - 1}; mul.wide.u32 step, line, {_ROWS * stride};
    and.b32 line, load, 1; mad.lo.u32 to, line, {nbytes}, place;
    {copies}
    cp.async.commit_group; cp.async.wait_group 1;
    add.u32 load, load, 1;
    """
    body = timed(0, f"mov.b32 load, 0; {looped(load, _LOADS, 'NEXT')} cp.async.wait_group 0;")
    where = _WHERE[1 if everywhere else 0]
    rows = _AGAIN * _ROWS
    return Bench(
        f"cp.async tiles of {_ROWS} rows of {2 * columns} bytes, {where}", (Section("stream", _LOADS, "tile"),), body,
        lambda: torch.zeros(SCRATCH // 4, dtype=torch.int32), lambda before, rounds: before,
        declared=".reg .b32 vector, line, column, load, to, place, head; .reg .b64 own, step, from;"
                 f".reg .b64 {', '.join(f'at{i}' for i in range(count))};",
        before=f"shl.b32 place, thread, 4; add.u32 place, place, room; and.b32 head, cta, 15; shr.u32 line, cta, 4;"
               f"mad.wide.u32 own, line, {rows * stride}, data; mul.lo.u32 head, head, {2 * columns};"
               f"cvt.u64.u32 step, head; add.u64 own, own, step; add.u64 own, own, {SCRATCH}; {places}",
        ctas=-1 if everywhere else 1, threads=_THREADS, smem_bytes=2 * nbytes,
        tiles=TiledTensor(rows, columns), rounds=5,
    )  # fmt: skip


BENCHES = (
    *(tma_tiles(columns, 128, where) for where in _WHERE for columns in WIDTHS),
    *(tma_tiles(columns, 64, where) for where in _WHERE for columns in (64, 72, 96)),
    *(copied_tiles(columns, everywhere) for everywhere in (False, True) for columns in _COLUMNS),
)  # fmt: skip
