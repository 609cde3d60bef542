"""All SMs go through the same memory again and again: how much of it stays in L2."""

from __future__ import annotations

import torch

from .copies import STAGES, STREAM, bulk_load, stream
from .frame import SCRATCH, Bench, Section, init, timed

SIZE = 16384
LOADS = (4, 8, 12, 16, 20, 24, 28, 32, 40, 56)  # of SIZE for each CTA: 8.7 to 121 MB on 132 SMs
_ADDS = (4, 16, 24, 56)


def reads(loads: int, together: bool) -> Bench:
    """Each repetition reads all of it: each CTA a part of its own, or every CTA everything, in the same order."""
    chunk, limit = ("mov.b32 chunk, load;", "count") if together else ("mad.lo.u32 chunk, load, ctas, cta;", str(loads))
    how = "all the same" if together else "each its own"
    return Bench(
        f"bulk loads of a working set of {loads} times {SIZE} bytes for each SM, {how}",
        (Section("stream", SIZE / 1024 * loads, "KiB for each SM"),),
        timed(0, stream(f"{chunk} mad.wide.u32 source, chunk, {SIZE}, base; {bulk_load(SIZE)}", SIZE, limit)),
        lambda: torch.zeros(SCRATCH // 4, dtype=torch.int32), lambda before, rounds: before,
        declared=STREAM + ".reg .b32 chunk, ctas, count; .reg .b64 base;",
        before=f"mov.b32 again, 0; mov.u32 ctas, %nctaid.x; mul.lo.u32 count, ctas, {loads};"
               f"add.u64 base, data, {SCRATCH};" + init(*[1] * STAGES),
        ctas=-1, smem_bytes=STAGES * SIZE, scratch=loads * SIZE, rounds=4,
    )  # fmt: skip


def adds(loads: int) -> Bench:
    """Bulk additions of float32, one after another as soon as shared memory has been read, each CTA's to its own."""
    body = timed(
        0,
        f"""
    @!first bra OTHERS;
    mov.b32 chunk, cta; mov.b32 count, 0;
    NEXT:
    mad.wide.u32 base, chunk, {SIZE}, own;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [base], [room], {SIZE};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    add.u32 chunk, chunk, ctas; add.u32 count, count, 1; setp.lt.u32 q, count, {loads};
    @q bra NEXT;
    cp.async.bulk.wait_group 0;
    OTHERS:
    """,
    )
    return Bench(
        f"bulk additions to a working set of {loads} times {SIZE} bytes for each SM",
        (Section("stream", SIZE / 1024 * loads, "KiB"),), body,
        lambda: torch.zeros(SCRATCH // 4, dtype=torch.int32), lambda before, rounds: before,
        declared=".reg .b32 chunk, ctas, count, place; .reg .b64 base, own;",
        before=f"""
        mov.u32 ctas, %nctaid.x; add.u64 own, data, {SCRATCH}; shl.b32 place, thread, 2; mov.b32 count, 0;
        FILL: add.u32 chunk, room, place; st.shared.b32 [chunk], count; add.u32 place, place, 512;
        setp.lt.u32 p, place, {SIZE}; @p bra FILL; fence.proxy.async.shared::cta; bar.sync 0;
        """,
        ctas=-1, smem_bytes=SIZE, scratch=loads * SIZE, rounds=4,
    )  # fmt: skip


BENCHES = (*(reads(loads, together) for together in (False, True) for loads in LOADS), *map(adds, _ADDS))
