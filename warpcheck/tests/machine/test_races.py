"""One pair per edge of the memory model: with it the kernel is clean, without it a race, whatever the schedule does."""

from dataclasses import dataclass, field

import pytest
from warpcheck.errors import DataRace
from warpcheck.machine import SCHEDULES, Checks
from warpcheck_cases.handwritten import data_and_map, launch

FIRST = "setp.ne.u32 %p0, %r0, 0;"  # %p0: not thread 0
SLOT = "shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3;"  # %r4: this thread's word of shared memory
BARRIER = f"""{FIRST} @!%p0 mbarrier.init.shared.b64 [%r2+2048], {{count}};
    fence.mbarrier_init.release.cluster; bar.sync 0;"""
RANK = "mov.u32 %r8, %cluster_ctarank; xor.b32 %r9, %r8, 1; mapa.shared::cluster.u32 %r10, %r2, %r9;"
CLUSTER = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"


def wait(phase: int | str = 0, barrier: str = "%r2+2048", how: str = "", label: str = "W") -> str:
    return f"{label}: mbarrier.try_wait.parity{how}.shared.b64 %p1, [{barrier}], {phase}; @!%p1 bra {label};"


@dataclass(frozen=True)
class Pair:
    """`body` holds EDGE, which `edge` fills in the clean kernel and `broken` in the other."""

    name: str
    body: str
    edge: str
    broken: str = ""
    match: str | None = None
    options: dict = field(default_factory=dict)
    checks: Checks = field(default_factory=Checks)


WARPS = {"block": 64}
FIVE = {"block": 160}
LETTER = Checks(letter=True)
PEERS = {"grid": 2, "cluster": 2}
EXCHANGE = f"{SLOT} st.shared.b32 [%r4], %r0; EDGE xor.b32 %r5, %r4, 128; ld.shared.b32 %r6, [%r5];"
HANDOVER = f"""{BARRIER.format(count=32)} setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUME;
    st.shared.b32 [%r2+64], 1; EDGE bra DONE;
    CONSUME: {wait()} AFTER ld.shared.b32 %r6, [%r2+64];
    DONE:"""
NEIGHBOUR = f"""{SLOT} {RANK} {CLUSTER} add.u32 %r11, %r10, %r3; st.shared::cluster.b32 [%r11], %r0; EDGE
    ld.shared.b32 %r6, [%r4];"""
FLAG = f"""{FIRST} @%p0 bra DONE; setp.eq.u32 %p1, %r1, 1; @%p1 bra WAIT;
    st.global.b32 [%a0+4], 42; EDGE bra DONE;
    WAIT: ld.relaxed.gpu.global.b32 %r3, [%a0]; setp.eq.u32 %p2, %r3, 0; @%p2 bra WAIT;
    fence.acq_rel.gpu; ld.global.b32 %r4, [%a0+4];
    DONE:"""
ACQUIRE = f"""{FIRST} @%p0 bra DONE; setp.eq.u32 %p1, %r1, 1; @%p1 bra WAIT;
    st.global.b32 [%a0+4], 42; st.release.gpu.global.b32 [%a0], 1; bra DONE;
    WAIT: EDGE setp.eq.u32 %p2, %r3, 0; @%p2 bra WAIT;
    ld.global.b32 %r4, [%a0+4];
    DONE:"""
# Each CTA adds to a sum, then to the number of CTAs that have ended; the last one sets the sum to 0.
RESET = f"""{FIRST} @%p0 bra DONE; atom.relaxed.gpu.global.add.u32 %r3, [%a0], 1;
    EDGE setp.ne.u32 %p1, %r3, 1; @%p1 bra DONE; st.global.b32 [%a0], 0;
    DONE:"""
STORE = f"""{SLOT} st.shared.b32 [%r4], %r0; BEFORE bar.sync 0; {FIRST} @%p0 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r2], 128;
    cp.async.bulk.commit_group; AFTER
    st.shared.b32 [%r2], 7;
    DONE:"""
WRITTEN = f"""{SLOT} st.shared.b32 [%r4], %r0; fence.proxy.async.shared::cta; bar.sync 0; {FIRST} @%p0 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r2], 128; cp.async.bulk.commit_group;
    mov.u32 %r5, 0; BUSY: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 50; @%p2 bra BUSY;
    cp.async.bulk.wait_group.read 0; EDGE ld.global.b32 %r6, [%a0];
    DONE:"""
LOAD = f"""{BARRIER.format(count=1)} @%p0 bra READ; mbarrier.arrive.expect_tx.shared.b64 _, [%r2+2048], 128;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%a0], 128, [%r2+2048];
    READ: EDGE ld.shared.b32 %r6, [%r2+4];"""
TWICE = f"""{BARRIER.format(count=1)} @%p0 bra DONE; st.global.b32 [%a0], 5; EDGE
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2+2048], 128;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%a0], 128, [%r2+2048];
    {wait()} DONE:"""
# A copy's complete-tx orders what the copy does; what its thread did before, the arrival that comes after that.
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 _, [%r2+2048], 128;"
BESIDE = f"""{BARRIER.format(count=1)} setp.ge.u32 %p2, %r0, 32; @%p2 bra READ; @%p0 bra DONE; EDGE
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%a0], 128, [%r2+2048]; bra DONE;
    READ: {wait()} ld.shared.b32 %r6, [%r2]; ld.shared.b32 %r7, [%r2+512]; DONE:"""
# A place in shared memory is read by a bulk store, given back by an arrival, and written again by another warp.
GIVEN_BACK = f"""{BARRIER.format(count=1)} setp.eq.u32 %p2, %r0, 32; @%p2 bra NEXT; @%p0 bra DONE;
    st.shared.v4.b32 [%r2], {{%r0, %r0, %r0, %r0}}; fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r2], 16; cp.async.bulk.commit_group; EDGE bra DONE;
    NEXT: {wait()} st.shared.b32 [%r2], 7; DONE:"""
REMOTE_COPY = f"""{BARRIER.format(count=1)} {SLOT} {RANK} st.shared.b32 [%r4+1024], %r0;
    fence.proxy.async.shared::cta; bar.sync 0; {CLUSTER} mapa.shared::cluster.u32 %r12, %r2, %r9; @%p0 bra READ;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2+2048], 128; add.u32 %r13, %r12, 2048; add.u32 %r14, %r2, 1024;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r12], [%r14], 128, [%r13];
    READ: EDGE ld.shared.b32 %r6, [%r2+4]; {CLUSTER}"""
GROUPS = """shl.b32 %r3, %r0, 4; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d0, %r3; add.s64 %d1, %a0, %d0;
    cp.async.cg.shared.global [%r4], [%d1], 16; cp.async.commit_group;
    cp.async.cg.shared.global [%r4+1024], [%d1], 16; cp.async.commit_group;
    EDGE ld.shared.b32 %r6, [%r4+1024];"""
NO_COMMIT = """shl.b32 %r3, %r0, 4; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d0, %r3; add.s64 %d1, %a0, %d0;
    cp.async.cg.shared.global [%r4], [%d1], 16; EDGE cp.async.wait_group 0; ld.shared.b32 %r6, [%r4];"""
ALLOCATE = """setp.lt.u32 %p3, %r0, 32; @!%p3 bra A; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64;
    A: bar.sync 0; ld.shared.b32 %r20, [%r2]; setp.ge.u32 %p4, %r0, 128;"""
FREE = "@!%p3 bra Z; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 64; Z:"
# Warps 0 and 4 share a quarter of the lanes.
TENSOR = f"""{ALLOCATE} @%p4 bra LATER; and.b32 %r21, %r0, 96; shl.b32 %r21, %r21, 16; add.u32 %r21, %r21, %r20;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r21], {{%r0}}; STORED bar.sync 1, 160; bra JOIN;
    LATER: bar.sync 1, 160; LOAD tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r22}}, [%r20]; LOADED
    JOIN: END {FREE}"""
# The same, handed over by an arrival that releases nothing.
RELAXED = (
    TENSOR.replace(ALLOCATE, ALLOCATE + BARRIER.format(count=128))
    .replace("bar.sync 1, 160; bra JOIN;", "mbarrier.arrive.relaxed.cta.shared.b64 _, [%r2+2048]; bra JOIN;")
    .replace("LATER: bar.sync 1, 160;", f"LATER: {wait()}")
)
WAIT_ST, WAIT_LD = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
# A 128 x 64 x 16 product of zeros: A at 1024, B at 1024 + 4096.
PRODUCT = f"""{ALLOCATE} {BARRIER.format(count=1)} shl.b32 %r3, %r0, 6; add.u32 %r4, %r2, %r3; mov.b32 %r5, 0;
    st.shared.v4.b32 [%r4+4096], {{%r5, %r5, %r5, %r5}}; st.shared.v4.b32 [%r4+4112], {{%r5, %r5, %r5, %r5}};
    st.shared.v4.b32 [%r4+4128], {{%r5, %r5, %r5, %r5}}; st.shared.v4.b32 [%r4+4144], {{%r5, %r5, %r5, %r5}};
    PROXY bar.sync 0; @%p0 bra READ;
    add.u32 %r6, %r2, 4096; shr.u32 %r6, %r6, 4; cvt.u64.u32 %d0, %r6; or.b64 %d0, %d0, 0x0000401000080000;
    add.u32 %r6, %r2, 8192; shr.u32 %r6, %r6, 4; cvt.u64.u32 %d1, %r6; or.b64 %d1, %d1, 0x0000401000080000;
    mov.b32 %r7, 0x08100010; setp.ne.u32 %p5, %r0, 0;
    tcgen05.mma.cta_group::1.kind::f16 [%r20], %d0, %d1, %r7, %p5;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+2048];
    READ: WAIT and.b32 %r21, %r0, 96; shl.b32 %r21, %r21, 16; add.u32 %r21, %r21, %r20;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r22}}, [%r21]; {WAIT_LD} bar.sync 0; {FREE}"""
# CTA 0 arrives at the mbarrier of CTA 1, which may end before it.
REMOTE_ARRIVAL = f"""{BARRIER.format(count=1)} mov.u32 %r8, %cluster_ctarank; {CLUSTER} setp.ne.u32 %p2, %r8, 0;
    @%p2 bra WAITS; @%p0 bra DONE; ARRIVE bra DONE; WAITS: EDGE DONE:"""
RELAXED_REMOTE = """mapa.shared::cluster.u32 %r10, %r2, 1;
    mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r10+2048];"""
COMMIT_REMOTE = """.reg .b16 %targets; mov.b16 %targets, 2;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r2+2048], %targets;"""
# CTA 1 tells by a relaxed arrival that it waited; warp 1 of it ends last.
WAITED_BY_OTHERS = f"""setp.ge.u32 %p3, %r0, 32; @%p3 bra LAST; {wait(label="W2")}
    mbarrier.arrive.relaxed.cta.shared.b64 _, [%r2+2056]; bra DONE; LAST: {wait(barrier="%r2+2056", label="W3")}"""
TENSOR_MAP = f"""{BARRIER.format(count=1)} @%p0 bra DONE; ld.global.b32 %r5, [%a1]; st.global.b32 [%a1], %r5; EDGE
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2+2048], 128; mov.b32 %r6, 0;
    cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%a1, {{%r6}}], [%r2+2048];
    {wait()} DONE:"""
MAP_RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
MAP_ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%a1], 128;"
LANES = f"{SLOT} st.shared.b32 [%r4], %r0; EDGE xor.b32 %r5, %r4, 4; ld.shared.b32 %r6, [%r5];"
ELECTED = f"""{BARRIER.format(count=1)} {SLOT} setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUME;
    st.shared.b32 [%r4], %r0; EDGE @!%p0 mbarrier.arrive.shared.b64 _, [%r2+2048]; bra DONE;
    CONSUME: {wait()} xor.b32 %r5, %r4, 128; ld.shared.b32 %r6, [%r5]; DONE:"""
# What one lane waited for is its own until the lanes synchronise.
ELECTED_WAIT = f"""{BARRIER.format(count=32)} setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUME;
    st.shared.b32 [%r2+64], 1; mbarrier.arrive.shared.b64 _, [%r2+2048]; bra DONE;
    CONSUME: setp.ne.u32 %p3, %r0, 32; @%p3 bra MEET; {wait()} MEET: EDGE ld.shared.b32 %r6, [%r2+64]; DONE:"""
ELECTED_GROUP = f"""{SLOT} st.shared.b32 [%r4], %r0; fence.proxy.async.shared::cta; bar.sync 0; {FIRST} @%p0 bra MEET;
    cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r2], 128; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0; MEET: EDGE st.shared.b32 [%r4], 7;"""
NEIGHBOURS_COPY = """shl.b32 %r3, %r0, 4; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d0, %r3; add.s64 %d1, %a0, %d0;
    cp.async.cg.shared.global [%r4], [%d1], 16; cp.async.wait_all; EDGE xor.b32 %r5, %r4, 16;
    ld.shared.b32 %r6, [%r5];"""
ELECTED_COPY = f"""{BARRIER.format(count=1)} setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUME;
    shl.b32 %r3, %r0, 4; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d0, %r3; add.s64 %d1, %a0, %d0;
    cp.async.cg.shared.global [%r4], [%d1], 16; cp.async.wait_all; EDGE
    @!%p0 mbarrier.arrive.shared.b64 _, [%r2+2048]; bra DONE;
    CONSUME: {wait()} ld.shared.b32 %r6, [%r2+64]; DONE:"""
# cp.async.mbarrier.arrive tracks what its lane's cp.async did, not its neighbours' copies; by the letter no stores.
COPIED = """setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUME;
    shl.b32 %r3, %r0, 4; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d0, %r3; add.s64 %d1, %a0, %d0;
    cp.async.cg.shared.global [%r4], [%d1], 16;"""
BESIDE_COPY = f"""{BARRIER.format(count=64)} {COPIED} EDGE cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+2048];
    bra DONE; CONSUME: {wait()} ld.shared.b32 %r6, [%r2+64]; ld.shared.b32 %r7, [%r2+1088]; DONE:"""
COPY_OF_ONE = f"""{BARRIER.format(count=1)} {COPIED} EDGE bra DONE;
    CONSUME: {wait()} ld.shared.b32 %r6, [%r2+64]; DONE:"""
COPY_WAITED = f"""{BARRIER.format(count=32)} {COPIED} cp.async.wait_all; bar.warp.sync -1; EDGE bra DONE;
    CONSUME: {wait()} ld.shared.b32 %r6, [%r2+64]; DONE:"""
COPY_ARRIVES = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+2048];"
STORE_BESIDE = "st.shared.b32 [%r4+1024], %r0; mbarrier.arrive.shared.b64 _, [%r2+2048];"
STORE_AFTER = "mbarrier.arrive.shared.b64 _, [%r2+2048]; st.shared.b32 [%r4+1024], %r0;"
# A store that only the arrival of cp.async hands over, then a proxy fence and a bulk copy by whom it was handed to.
FENCED_BY_NEXT = f"""{BARRIER.format(count=32)} {COPIED} st.shared.v4.b32 [%r4+512], {{%r0, %r0, %r0, %r0}};
    {COPY_ARRIVES} bra DONE; CONSUME: {wait()} EDGE setp.ne.u32 %p3, %r0, 32; @%p3 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r2+512], 512;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE:"""
ELECTED_FLAG = """setp.eq.u32 %p1, %r1, 1; @%p1 bra WAIT; setp.ne.u32 %p0, %r0, 0; @%p0 bra DONE;
    st.global.b32 [%a0+4], 42; st.release.gpu.global.b32 [%a0], 1; bra DONE;
    WAIT: setp.ne.u32 %p0, %r0, 0; @%p0 bra MEET;
    SPIN: ld.acquire.gpu.global.b32 %r3, [%a0]; setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN;
    MEET: EDGE ld.global.b32 %r4, [%a0+4]; DONE:"""
INIT = f"""{FIRST} {SLOT} @!%p0 mbarrier.init.shared.b64 [%r2+2048], 1; EDGE bar.sync 0; @%p0 bra READ;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2+2048], 128;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%a0], 128, [%r2+2048]; READ: {wait()}"""
# The last CTA reads what all have stored. Thread 0 counts for its CTA, after a barrier.
LAST_CTA = f"""cvt.u64.u32 %d0, %r0; mul.wide.u32 %d1, %r1, 64; add.s64 %d1, %d1, %d0; add.s64 %d1, %a0, %d1;
    st.global.u8 [%d1], %r0; BEFORE {FIRST} @%p0 bra COUNTED;
    atom.relaxed.gpu.global.add.u32 %r5, [%a0+508], 1; st.shared.b32 [%r2], %r5;
    COUNTED: bar.sync 0; ld.shared.b32 %r5, [%r2]; setp.ne.u32 %p1, %r5, 1; @%p1 bra DONE; AFTER
    add.s64 %d2, %a0, %d0; ld.global.u8 %r6, [%d2]; ld.global.u8 %r7, [%d2+64]; DONE:"""
FENCE_SC = "fence.sc.gpu;"
EVERY_THREAD = FENCE_SC + "bar.sync 0;"
COUNTS = {"grid": 2, "block": 64}


def last_cta(before: str = EVERY_THREAD, after: str = FENCE_SC) -> str:
    return LAST_CTA.replace("BEFORE", before).replace("AFTER", after)


PAIRS = [
    Pair("fence.sc of every thread, a barrier, a count by one", last_cta("EDGE"), EVERY_THREAD, FENCE_SC,
         options=COUNTS),
    Pair("fence.sc and no fence.acq_rel before a barrier", last_cta("EDGE"), EVERY_THREAD,
         "fence.acq_rel.gpu; bar.sync 0;", options=COUNTS),
    Pair("membar.gl is fence.sc", last_cta("EDGE"), "membar.gl; bar.sync 0;", "membar.cta; bar.sync 0;",
         options=COUNTS),
    Pair("fence.sc by one after a barrier", last_cta("bar.sync 0; EDGE"), FENCE_SC, options=COUNTS),
    Pair("acquire by one before a barrier",
         last_cta("bar.sync 0; fence.acq_rel.gpu;", "").replace("1; st.sh", "1; EDGE st.sh"),
         "fence.acq_rel.gpu;", options=COUNTS),
    Pair("fence.sc after the count", last_cta(after="EDGE"), FENCE_SC, options=COUNTS),
    Pair("fence.sc of the scope of the chip after the count", last_cta(after="EDGE"), FENCE_SC, "fence.sc.cta;",
         options=COUNTS),
    Pair("bar.sync", EXCHANGE, "bar.sync 0;", options=WARPS),
    Pair("named barrier", EXCHANGE, "bar.sync 3, 64;", options=WARPS),
    Pair("arrival beside a copy", BESIDE, f"st.shared.b32 [%r2+512], 1; {EXPECT}",
         f"{EXPECT} st.shared.b32 [%r2+512], 1;", options=WARPS),
    Pair("relaxed arrival after a copy, which is a letter", GIVEN_BACK,
         "cp.async.bulk.wait_group.read 0; mbarrier.arrive.shared.b64 _, [%r2+2048];",
         "cp.async.bulk.wait_group.read 0; mbarrier.arrive.relaxed.cta.shared.b64 _, [%r2+2048];",
         match="by a relaxed arrival, which orders nothing", options=WARPS),
    Pair("wait for a copy before a relaxed arrival", GIVEN_BACK,
         "cp.async.bulk.wait_group.read 0; mbarrier.arrive.shared.b64 _, [%r2+2048];",
         "mbarrier.arrive.relaxed.cta.shared.b64 _, [%r2+2048];", match="no synchronisation orders", options=WARPS),
    Pair("bar.warp.sync", LANES, "bar.warp.sync -1;", match=r"needs bar\.warp\.sync"),
    Pair("bar.warp.sync before an elected arrival", ELECTED, "bar.warp.sync -1;", options=WARPS),
    Pair("bar.warp.sync after an elected wait", ELECTED_WAIT, "bar.warp.sync -1;", options=WARPS),
    Pair("bar.warp.sync after an elected wait for a group", ELECTED_GROUP, "bar.warp.sync -1;"),
    Pair("bar.warp.sync after an elected acquire", ELECTED_FLAG, "bar.warp.sync -1;", options={"grid": 2}),
    Pair("bar.warp.sync before a neighbour's cp.async", NEIGHBOURS_COPY, "bar.warp.sync -1;"),
    Pair("bar.warp.sync before an elected arrival for cp.async", ELECTED_COPY, "bar.warp.sync -1;", options=WARPS),
    Pair("arrival for a store beside that of a cp.async", BESIDE_COPY, STORE_BESIDE, STORE_AFTER,
         match="lies between, which orders what its thread copied", options=WARPS, checks=LETTER),
    Pair("arrival of a cp.async is its lane's", COPY_OF_ONE,
         "cp.async.wait_all; bar.warp.sync -1; @!%p0 mbarrier.arrive.shared.b64 _, [%r2+2048];",
         f"@!%p0 {COPY_ARRIVES}", match="no synchronisation orders", options=WARPS),
    Pair("arrival of a cp.async that was waited for", COPY_WAITED, COPY_ARRIVES,
         "mbarrier.arrive.relaxed.cta.shared.b64 _, [%r2+2048];", options=WARPS, checks=LETTER),
    Pair("proxy fence after the arrival of a cp.async", FENCED_BY_NEXT, "fence.proxy.async.shared::cta;",
         match=r"needs fence\.proxy\.async", options=WARPS),
    Pair("mbarrier release", HANDOVER.replace("AFTER", ""), "mbarrier.arrive.shared.b64 _, [%r2+2048];",
         "mbarrier.arrive.relaxed.cta.shared.b64 _, [%r2+2048];", options=WARPS),
    Pair("fence before a relaxed arrival", HANDOVER.replace("AFTER", ""),
         "fence.acq_rel.cta; mbarrier.arrive.relaxed.cta.shared.b64 _, [%r2+2048];",
         "mbarrier.arrive.relaxed.cta.shared.b64 _, [%r2+2048];", options=WARPS),
    Pair("fence after a relaxed wait",
         HANDOVER.replace(wait(), wait(how=".relaxed.cta")).replace("EDGE", "mbarrier.arrive.shared.b64 _, [%r2+2048];")
         .replace("AFTER", "EDGE"), "fence.acq_rel.cta;", options=WARPS),
    Pair("cluster barrier", NEIGHBOUR, CLUSTER, CLUSTER.replace("release", "relaxed"), options=PEERS),
    Pair("fence and relaxed cluster barrier", NEIGHBOUR,
         "fence.acq_rel.cluster;" + CLUSTER.replace("release", "relaxed"), CLUSTER.replace("release", "relaxed"),
         options=PEERS),
    Pair("end of a CTA", f"{SLOT} {RANK} st.shared.b32 [%r4], %r0; {CLUSTER} ld.shared::cluster.b32 %r6, [%r10]; EDGE",
         CLUSTER, match="end of the CTA", options=PEERS),
    Pair("relaxed arrival before the end of a CTA", REMOTE_ARRIVAL.replace("ARRIVE", RELAXED_REMOTE), wait(),
         match="end of the CTA", options=PEERS),
    Pair("tcgen05.commit before the end of a CTA", REMOTE_ARRIVAL.replace("ARRIVE", COMMIT_REMOTE), wait(),
         match="end of the CTA", options=PEERS),
    Pair("commit that another warp waited for", f"{FIRST} @!%p0 mbarrier.init.shared.b64 [%r2+2056], 32; "
         + REMOTE_ARRIVAL.replace("ARRIVE", COMMIT_REMOTE), WAITED_BY_OTHERS, match="end of the CTA",
         options={**PEERS, "block": 64}),
    Pair("release at the scope of the chip", FLAG, "st.release.gpu.global.b32 [%a0], 1;",
         "st.release.cta.global.b32 [%a0], 1;", options={"grid": 2}),
    Pair("release by fence", FLAG, "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%a0], 1;",
         "fence.acq_rel.cta; st.relaxed.gpu.global.b32 [%a0], 1;", options={"grid": 2}),
    Pair("release by red", FLAG, "red.release.gpu.global.add.u32 [%a0], 1;", "red.relaxed.gpu.global.add.u32 [%a0], 1;",
         options={"grid": 2}),
    Pair("acquire", ACQUIRE, "ld.acquire.gpu.global.b32 %r3, [%a0];", "ld.relaxed.gpu.global.b32 %r3, [%a0];",
         options={"grid": 2}),
    Pair("acquire at the scope of the chip", ACQUIRE, "ld.acquire.gpu.global.b32 %r3, [%a0];",
         "ld.acquire.cta.global.b32 %r3, [%a0];", options={"grid": 2}),
    Pair("last atomic of each CTA, then a plain store", RESET, "atom.acq_rel.gpu.global.add.u32 %r3, [%a0+64], 1;",
         "atom.relaxed.gpu.global.add.u32 %r3, [%a0+64], 1;", match="write against an earlier atomic write",
         options={"grid": 2}),
    Pair("release within a cluster", FLAG, "st.release.cluster.global.b32 [%a0], 1;",
         "st.release.cta.global.b32 [%a0], 1;", options=PEERS),
    Pair("proxy fence, generic to async",
         STORE.replace("BEFORE", "EDGE").replace("AFTER", "cp.async.bulk.wait_group.read 0;"),
         "fence.proxy.async.shared::cta;", match=r"needs fence\.proxy\.async"),
    Pair("proxy fence of global memory", TWICE, "fence.proxy.async.global;", "fence.proxy.async.shared::cta;",
         match=r"needs fence\.proxy\.async"),
    Pair("bulk group", STORE.replace("BEFORE", "fence.proxy.async.shared::cta;").replace("AFTER", "EDGE"),
         "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group.read 1;"),
    Pair("bulk group, once read", WRITTEN, "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"),
    Pair("bytes of a bulk copy", LOAD, wait()),
    Pair("bytes from a neighbour", REMOTE_COPY, wait(), options=PEERS),
    Pair("cp.async group", GROUPS, "cp.async.wait_group 0;", "cp.async.wait_group 1;", options={"target": "sm_80"}),
    Pair("cp.async commit", NO_COMMIT, "cp.async.commit_group;", options={"target": "sm_80"}),
    Pair("mbarrier.init fence", INIT, "fence.mbarrier_init.release.cluster;", match=r"needs fence\.mbarrier_init"),
    Pair("tensor map release", TENSOR_MAP, MAP_RELEASE + MAP_ACQUIRE, MAP_ACQUIRE, match="tensormap"),
    Pair("tensor map acquire", TENSOR_MAP, MAP_RELEASE + MAP_ACQUIRE, MAP_RELEASE, match="tensormap"),
]  # fmt: skip


def tensor(stored=WAIT_ST + BEFORE, load=AFTER, loaded=WAIT_LD + BEFORE, end="bar.sync 0;", body=TENSOR) -> str:
    return body.replace("STORED", stored).replace("LOADED", loaded).replace("LOAD", load).replace("END", end)


def product(proxy="fence.proxy.async.shared::cta;", waits=None) -> str:
    return PRODUCT.replace("PROXY", proxy).replace("WAIT", wait() + AFTER if waits is None else waits)


FOUR = {"block": 128, "smem": 16384}
FENCE = r"needs tcgen05\.wait or tcgen05\.fence"
TENSOR_PAIRS = [
    Pair("tcgen05.wait::st", tensor(stored="EDGE"), WAIT_ST, options=FIVE),
    Pair("tcgen05.wait::st before a relaxed arrival", tensor(stored="EDGE", body=RELAXED), WAIT_ST, options=FIVE),
    Pair("fence::before_thread_sync before a relaxed arrival", tensor(stored=WAIT_ST + "EDGE", body=RELAXED),
         BEFORE, match=FENCE, options=FIVE, checks=LETTER),
    Pair("tcgen05.wait::ld", tensor(loaded="EDGE"), WAIT_LD, options=FIVE, checks=Checks(leftovers=True)),
    Pair("barrier before tcgen05.dealloc", tensor(end="EDGE"), "bar.sync 0;", options=FIVE,
         checks=Checks(leftovers=True)),
    Pair("fence::before_thread_sync", tensor(stored=WAIT_ST + "EDGE"), BEFORE, match=FENCE, options=FIVE,
         checks=LETTER),
    Pair("fence::after_thread_sync", tensor(load="EDGE"), AFTER, match=FENCE, options=FIVE, checks=LETTER),
    Pair("operands of tcgen05.mma", product(proxy="EDGE"), "fence.proxy.async.shared::cta;",
         match=r"needs fence\.proxy\.async", options=FOUR),
    Pair("tcgen05.commit", product(waits="EDGE"), wait(), options=FOUR),
    Pair("fence after a commit", product(waits=wait() + "EDGE"), AFTER, match=FENCE, options=FOUR, checks=LETTER),
]  # fmt: skip


def run(pair: Pair, edge: str, **keywords) -> None:
    launch(pair.body.replace("EDGE", edge), data_and_map(), checks=pair.checks, **pair.options, **keywords)


ALL = pytest.mark.parametrize("pair", PAIRS + TENSOR_PAIRS, ids=lambda pair: pair.name)


@ALL
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_with_the_edge_it_is_clean(pair, schedule, seed):
    run(pair, pair.edge, schedule=schedule, seed=seed)


@ALL
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_without_the_edge_it_is_a_race_in_any_order(pair, schedule, seed):
    with pytest.raises(DataRace, match=pair.match):
        run(pair, pair.broken, schedule=schedule, seed=seed)


# Warps 0 to 3 fill a place and hand it to warp 4, warp 4 to warp 8, which writes it or stores it in bulk.
PASSED_ON = f"""{{alloc}} {FIRST} @!%p0 mbarrier.init.shared.b64 [%r2+2056], 32; {BARRIER.format(count=128)}
    shr.u32 %r7, %r0, 5; setp.eq.u32 %p5, %r7, 4; @%p5 bra SECOND; setp.eq.u32 %p5, %r7, 8; @%p5 bra THIRD;
    setp.gt.u32 %p5, %r7, 4; @%p5 bra JOIN;
    {{first}} mbarrier.arrive.shared.b64 _, [%r2+2048]; bra JOIN;
    SECOND: {wait(label="W2")} {{second}} bra JOIN;
    THIRD: {wait(barrier="%r2+2056", label="W3")} {{third}}
    JOIN: {{free}}"""
QUARTER = "and.b32 %r21, %r0, 96; shl.b32 %r21, %r21, 16; add.u32 %r21, %r21, %r20;"
STORE_TENSOR = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r21], {%r0};"
STORE_WORD = "st.shared.b32 [%r4], %r0;"
PROXY = "fence.proxy.async.shared::cta;"
BULK = """setp.ne.u32 %p6, %r0, 256; @%p6 bra JOIN; cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r2], 512;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
RELEASED, RELAXED_ON = (f"mbarrier.arrive{how}.shared.b64 _, [%r2+2056];" for how in ("", ".relaxed.cta"))
SHARED_ON = {"alloc": SLOT, "first": STORE_WORD, "third": "st.shared.b32 [%r4+-1024], 7;", "free": ""}
TENSOR_ON = {
    "alloc": f"{ALLOCATE} {QUARTER}", "first": f"{STORE_TENSOR} {WAIT_ST}", "third": f"{STORE_TENSOR} {WAIT_ST}",
    "free": f"bar.sync 0; {FREE}",
}  # fmt: skip
PROXY_ON = {**SHARED_ON, "first": STORE_WORD + PROXY, "third": BULK}
NOT_WAITED = {**TENSOR_ON, "first": STORE_TENSOR}
NOT_ACQUIRED = {**SHARED_ON, "first": ""}
# name -> parts, arrival of warp 4, kinds that are told
HANDED_ON = {
    "shared memory, released": (SHARED_ON, RELEASED, set()),
    "shared memory, relaxed": (SHARED_ON, RELAXED_ON, {"relaxed-arrival"}),
    "tensor memory, released": (TENSOR_ON, RELEASED, set()),
    "tensor memory, relaxed": (TENSOR_ON, RELAXED_ON, {"relaxed-arrival"}),
    "proxy fence, released": (PROXY_ON, RELEASED, set()),
    "proxy fence, relaxed": (PROXY_ON, RELAXED_ON, {"relaxed-arrival"}),
    "no proxy fence, relaxed": ({**PROXY_ON, "first": STORE_WORD}, RELAXED_ON, {"relaxed-arrival", "proxy-fence"}),
    "no wait::st, relaxed": (NOT_WAITED, RELAXED_ON, {"race"}),
    "no wait::st, released": (NOT_WAITED, RELEASED, {"race"}),
    "own store, relaxed": (NOT_ACQUIRED, "st.shared.b32 [%r4+-512], 1;" + RELAXED_ON, {"race"}),
}


@pytest.mark.parametrize("parts, arrival, kinds", HANDED_ON.values(), ids=HANDED_ON)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_thread_had_acquired_is_handed_on(parts, arrival, kinds, schedule):
    """By practice also by a relaxed arrival, which is a letter; a store of that thread itself is not."""
    body = PASSED_ON.format(second=arrival, **parts)
    report = launch(body, data_and_map(), block=288, schedule=schedule, seed=1, on_finding="collect")
    assert {finding.kind for finding in report.findings} == kinds, report.findings
    for finding in report.findings.of("letter"):
        assert "says so by a relaxed arrival" in finding.message and ".release" in finding.repair


MANY = f"""{BARRIER.format(count=1)} @%p0 bra DONE; mov.b32 %r5, 0; st.shared.v4.b32 [%r2], {{%r5, %r5, %r5, %r5}};
    fence.proxy.async.shared::cta; cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r2], 16;
    cp.async.bulk.commit_group; add.u32 %r6, %r2, 1024;
    LOOP: mbarrier.arrive.expect_tx.shared.b64 _, [%r2+2048], 16; and.b32 %r7, %r5, 1;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r6], [%a0+64], 16, [%r2+2048];
    {wait("%r7")} add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 500; @%p2 bra LOOP;
    st.shared.b32 [%r2], 7;
    DONE:"""


EACH_ARRIVES = f"""{BARRIER.format(count="COUNT")} {SLOT}
    setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUME;
    st.shared.b32 [%r4+128], %r0; mbarrier.arrive.shared.b64 _, [%r2+2048]; bra DONE;
    CONSUME: {wait()} ld.shared.b32 %r6, [%r4]; DONE:"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_arrival_of_a_lane_that_comes_too_late_hands_over_nothing(schedule):
    """32 lanes arrive by one instruction; where the barrier expects fewer, the stores of the last are a race."""
    launch(EACH_ARRIVES.replace("COUNT", "32"), data_and_map(), schedule=schedule, **WARPS)
    with pytest.raises(DataRace, match="no synchronisation orders"):
        launch(EACH_ARRIVES.replace("COUNT", "31"), data_and_map(), schedule=schedule, **WARPS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_by_practice_an_arrival_of_cp_async_hands_over_stores(schedule):
    body = BESIDE_COPY.replace("EDGE", STORE_AFTER)
    assert not launch(body, data_and_map(), schedule=schedule, **WARPS, on_finding="collect").findings
    by_letter = launch(body, data_and_map(), schedule=schedule, **WARPS, on_finding="collect", checks=LETTER).findings
    assert [finding.kind for finding in by_letter] == ["copy-arrival"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_by_the_letter_a_fence_is_not_asked_for_twice(schedule):
    """The store lacks its order, whose fence is there."""
    found = launch(FENCED_BY_NEXT.replace("EDGE", "fence.proxy.async.shared::cta;"), data_and_map(), schedule=schedule,
                   **WARPS, on_finding="collect", checks=LETTER).findings  # fmt: skip
    assert {finding.kind for finding in found} == {"copy-arrival"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_store_stays_in_the_history_through_many_later_copies(schedule):
    with pytest.raises(DataRace):
        launch(MANY, data_and_map(), schedule=schedule)
