"""Tiles of a tensor of rows and heads, by the bytes of a head's row: TMA loads and stores, and cp.async."""

from __future__ import annotations

import torch

from .copies import STAGES, STREAM, stream
from .frame import SCRATCH, Bench, Section, TiledTensor, init, looped, timed

WIDTHS = (64, 72, 80, 96, 128)  # columns of 16 bits
_ROWS = 128  # of a tile
_AGAIN, _FAR = 4, 64  # tiles of a CTA: of those that L2 holds, and of those that it does not
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
    loads = _FAR if is_far else _LOADS
    body = timed(0, stream(issue, tile.nbytes, loads))
    return Bench(
        _name(columns, row_bytes, where), (Section("stream", loads, "tile"),),
        body + (f"add.u32 base, base, {_ROWS * _FAR};" if is_far else ""),
        lambda: torch.zeros(SCRATCH // 4, dtype=torch.int32), lambda before, rounds: before,
        declared=STREAM + ".reg .b32 line, head, base, place;",
        before=f"mov.b32 again, 0; and.b32 head, cta, {tensor.heads - 1}; shr.u32 base, cta, 4;"
               f"mul.lo.u32 base, base, {tensor.rows};" + init(*[1] * STAGES),
        ctas=1 if where == _WHERE[0] else -1, smem_bytes=STAGES * tile.nbytes, tiles=tensor,
        rounds=_FAR_ROUNDS if is_far else 5, launches=1 + is_far, chips=("sm_90a", "sm_100a"),
        notes={} if where == _WHERE[0] else {"sharers": 1, "cold": is_far},
    )  # fmt: skip


def stored_tiles(columns: int, everywhere: bool) -> Bench:
    """Tiles of zeros, stored in boxes of 128 bytes; STAGES groups may be unread."""
    tensor = TiledTensor(_ROWS * _LOADS * 2, columns)  # each repetition stores to one half or the other
    tile = tensor.tile
    store = f"mad.lo.u32 line, load, {_ROWS}, base;"
    for panel in range(tile.panels):
        store += f"add.u32 place, room, {panel * tile.panel_bytes};"
        store += "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group "
        store += f"[map, {{{tile.panel_columns * panel}, line, head}}], [place];"
    store += f"cp.async.bulk.commit_group; cp.async.bulk.wait_group.read {STAGES - 1}; add.u32 load, load, 1;"
    body = timed(0, f"""
    @!first bra OTHERS;
    mov.b32 load, 0; {looped(store, _LOADS, "NEXT")}
    cp.async.bulk.wait_group 0;
    OTHERS:
    """) + f"xor.b32 base, base, {_ROWS * _LOADS};"  # fmt: skip
    return Bench(
        f"TMA stores of tiles of {_ROWS} rows of {2 * columns} bytes, {_WHERE[everywhere]}",
        (Section("stream", _LOADS, "tile"),), body, lambda: torch.zeros(SCRATCH // 4, dtype=torch.int32),
        lambda before, rounds: before, declared=".reg .b32 load, line, head, base, place, nil;",
        before=f"""
        mov.b32 nil, 0; mov.b32 line, thread;
        FILL: mad.lo.u32 place, line, 16, room; st.shared.v4.b32 [place], {{nil, nil, nil, nil}};
        add.u32 line, line, 128; setp.lt.u32 p, line, {tile.nbytes // 16}; @p bra FILL;
        fence.proxy.async.shared::cta; bar.sync 0;
        and.b32 head, cta, {tensor.heads - 1}; shr.u32 base, cta, 4; mul.lo.u32 base, base, {tensor.rows};
        """,
        ctas=-1 if everywhere else 1, smem_bytes=tile.nbytes, tiles=tensor, rounds=5, chips=("sm_90a", "sm_100a"),
        notes={"sharers": 1, "cold": False} if everywhere else {},
    )  # fmt: skip


_THREADS = 128


def copied_tiles(columns: int, segment: int, everywhere: bool) -> Bench:
    """The same tiles by cp.async of 16 bytes a thread: a group each, and two groups in flight. Threads side by side
    take `segment` bytes of a row, the next threads those of the next row."""
    row_bytes, nbytes = 2 * columns, 2 * columns * _ROWS
    stride, across = 16 * row_bytes, segment // 16
    rows_at_once = _THREADS // across
    places = [(row, chunk) for row in range(0, _ROWS, rows_at_once) for chunk in range(0, row_bytes, segment)]
    copies = "".join(
        f"cp.async.cg.shared.global [to+{16 * _THREADS * i}], [from+{row * stride + chunk}], 16;\n"
        for i, (row, chunk) in enumerate(places)
    )
    load = f"""
    and.b32 line, load, {_AGAIN - 1}; mul.wide.u32 step, line, {_ROWS * stride}; add.u64 from, own, step;
    and.b32 line, load, 1; mad.lo.u32 to, line, {nbytes}, place;
    {copies}
    cp.async.commit_group; cp.async.wait_group 1;
    add.u32 load, load, 1;
    """
    body = timed(0, f"mov.b32 load, 0; {looped(load, _LOADS, 'NEXT')} cp.async.wait_group 0;")
    rows = _AGAIN * _ROWS
    return Bench(
        f"cp.async tiles of {_ROWS} rows of {row_bytes} bytes, {segment} side by side, {_WHERE[everywhere]}",
        (Section("stream", _LOADS, "tile"),), body, lambda: torch.zeros(SCRATCH // 4, dtype=torch.int32),
        lambda before, rounds: before,
        declared=".reg .b32 line, column, load, to, place, head; .reg .b64 own, step, from;",
        before=f"""
        shl.b32 place, thread, 4; add.u32 place, place, room; and.b32 head, cta, 15; shr.u32 line, cta, 4;
        mad.wide.u32 own, line, {rows * stride}, data; mul.lo.u32 head, head, {row_bytes};
        div.u32 line, thread, {across}; mad.lo.u32 column, line, {-across}, thread;
        mad.lo.u32 head, line, {stride}, head; mad.lo.u32 head, column, 16, head;
        cvt.u64.u32 step, head; add.u64 own, own, step; add.u64 own, own, {SCRATCH};
        """,
        ctas=-1 if everywhere else 1, threads=_THREADS, smem_bytes=2 * nbytes, tiles=TiledTensor(rows, columns),
        rounds=5, notes={"sharers": 1, "cold": False} if everywhere else {},
    )  # fmt: skip


BENCHES = (
    *(tma_tiles(columns, 128, where) for where in _WHERE for columns in WIDTHS),
    *(tma_tiles(columns, 64, where) for where in _WHERE for columns in (64, 72, 96)),
    *(stored_tiles(columns, everywhere) for everywhere in (False, True) for columns in WIDTHS),
    *(copied_tiles(*of, everywhere) for everywhere in (False, True)
      for of in ((64, 128), (128, 128), (96, 64), (80, 32))),
)  # fmt: skip
