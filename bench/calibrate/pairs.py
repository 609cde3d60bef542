"""Two CTAs of a cluster: their barrier, a load from the other's shared memory, copies there and back."""

from __future__ import annotations

import torch

from .frame import Bench, Section, init, timed, wait

MEETINGS, LOADS = 16, 32
SIZES = (1024, 4096, 16384)


def _barrier(cluster: int, order: str = "") -> Bench:
    meet = f"barrier.cluster.arrive{order}.aligned; barrier.cluster.wait.aligned;"
    return Bench(
        f"barrier of a cluster of {cluster}{', relaxed' if order else ''}", (Section("meet", MEETINGS, "barrier"),),
        timed(0, meet * MEETINGS, together=False), lambda: torch.zeros(cluster, dtype=torch.int32),
        lambda before, rounds: before + rounds, declared=".reg .b64 mine;",
        after="mad.wide.u32 mine, cta, 4, data; @first st.global.b32 [mine], round;", ctas=cluster, cluster=cluster,
    )  # fmt: skip


_MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def _remote_loads() -> Bench:
    """A chain of loads, each from an address that the one before gave: own shared memory, then the other CTA's."""
    chain = "ld.shared::cluster.b32 hop, [hop];\n" * LOADS
    body = "mov.b32 hop, here;" + timed(0, f"@!first bra OWN;\n{chain}OWN:")
    body += "mov.b32 hop, there;" + timed(1, f"@!first bra OTHER;\n{chain}OTHER:") + "sub.u32 hop, hop, there;"
    return Bench(
        "loads of a cluster's shared memory", (Section("own", LOADS, "load"), Section("the other's", LOADS, "load")),
        body, lambda: torch.full((2,), -1, dtype=torch.int32), lambda before, rounds: torch.zeros_like(before),
        declared=".reg .b32 hop, here, there, other; .reg .b64 mine;",
        # At room its own address, at room + 4 what the other one's loads find: theirs of here.
        before=f"""
        xor.b32 other, rank, 1; mapa.shared::cluster.u32 here, room, rank; add.u32 there, room, 4;
        mapa.shared::cluster.u32 there, there, other;
        @first st.shared.b32 [room], here; mov.b32 hop, 0;
        add.u32 hop, room, 4; mapa.shared::cluster.u32 hop, hop, rank; @first st.shared.b32 [room+4], hop;
        {_MEET}
        """,
        after=f"{_MEET} mad.wide.u32 mine, cta, 4, data; @first st.global.b32 [mine], hop;",
        ctas=2, cluster=2, smem_bytes=16,
    )  # fmt: skip


def _copies() -> Bench:
    """Bytes to the other CTA and back: each copy completes on a barrier there. Half of it is one way."""
    most = max(SIZES)
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [room], {}, [bell];"
    expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], {};"
    body, sections = "", []
    for i, size in enumerate(SIZES):
        # Each expects before the other can have sent: they met before, and only the first one sends unasked.
        body += _MEET + f"@first {expect.format(size)}" + _MEET
        body += timed(i, f"""
        @!first bra OTHERS{i};
        setp.ne.u32 q, rank, 0;
        @q bra ANSWER{i};
        {copy.format(size)}
        {wait("smem", "parity", f"BACK{i}")}
        bra OTHERS{i};
        ANSWER{i}:
        {wait("smem", "parity", f"CAME{i}")}
        {copy.format(size)}
        OTHERS{i}:
        """, together=False) + "bar.sync 0; xor.b32 parity, parity, 1;"  # fmt: skip
        sections.append(Section(f"{size} bytes", 2, "copy"))
    fill = f"""
    mov.b32 place, room; shl.b32 word, thread, 2; add.u32 place, place, word; add.u32 word, room, {most};
    FILL: st.shared.b32 [place], thread; add.u32 place, place, 512; setp.lt.u32 p, place, word; @p bra FILL;
    """
    return Bench(
        "bulk copies to the other CTA and back", tuple(sections), body, lambda: torch.zeros(256, dtype=torch.int32),
        lambda before, rounds: torch.arange(128, dtype=torch.int32).repeat(2),
        declared=".reg .b32 there, bell, other, parity, place, word; .reg .b64 mine;",
        before=f"""
        xor.b32 other, rank, 1; mapa.shared::cluster.u32 there, room, other; mapa.shared::cluster.u32 bell, smem, other;
        mov.b32 parity, 0; {fill} {init(1)} {_MEET}
        """,
        after=f"""
        {_MEET} shl.b32 word, thread, 2; add.u32 place, room, word; ld.shared.b32 word, [place];
        mad.lo.u32 place, cta, 128, thread; mad.wide.u32 mine, place, 4, data; st.global.b32 [mine], word;
        """,
        ctas=2, cluster=2, smem_bytes=most,
    )  # fmt: skip


BENCHES = (_barrier(2), _barrier(4), _barrier(2, ".relaxed"), _remote_loads(), _copies())
