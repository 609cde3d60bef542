"""Barriers of threads and of memory, asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from warpcheck_cases.opcodes.case import Case, element_address, entry, load_element, store_element

_SINCE_HOPPER = ("sm_90a", "sm_100a")


def _words(count: int):
    return lambda rng: (rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32),)


def _block(
    name: str, target: str, lines: list[str], shared: str, expected: Callable[..., np.ndarray], words: int = 1
) -> Case:
    """128 threads with `words` words each."""
    ptx = entry(target, "\n".join(lines), pointers=1, shared=shared)
    chips = ("sm_80", *_SINCE_HOPPER) if target == "sm_80" else _SINCE_HOPPER
    return Case(name, ptx, _words(128 * words), expected, target=target, block=128, chips=chips)


# Each thread loads its word to %r0 and has its place in the buffer in %r2; it reads that of the mirrored thread to %r4.
_LOAD = [load_element("%r0"), "  mov.u32 %r1, buffer;", "  mad.lo.u32 %r2, %i, 4, %r1;"]
_MIRROR = ["  sub.u32 %r3, 127, %i;", "  mad.lo.u32 %r3, %r3, 4, %r1;", "  ld.shared.b32 %r4, [%r3];"]


def _thread_barriers() -> list[Case]:
    shared = ".shared .align 16 .b8 buffer[1024];"
    mirror = [*_MIRROR, store_element("%r4")]
    exchange = [*_LOAD, "  st.shared.b32 [%r2], %r0;", "  bar.sync 0;", *mirror]
    named = [*_LOAD, "  st.shared.b32 [%r2], %r0;", "  barrier.sync 5, 128;", *mirror]
    # Warps 0 and 1 produce and only arrive; warps 2 and 3 wait and read.
    producer = [
        *_LOAD,
        "  setp.lt.u32 %p0, %i, 64;",
        "  @!%p0 bra CONSUME;",
        "  st.shared.b32 [%r2], %r0;",
        "  bar.arrive 3, 128;",
        "  bra DONE;",
        "CONSUME:",
        "  bar.sync 3, 128;",
        "  sub.u32 %r3, %i, 64;",
        "  mad.lo.u32 %r4, %r3, 4, %r1;",
        "  ld.shared.b32 %r5, [%r4];",
        store_element("%r5", index="%r3"),
        "DONE:",
    ]
    reduce = [
        *_LOAD,
        "  and.b32 %r3, %r0, 1;",
        "  setp.ne.b32 %p0, %r3, 0;",
        "  barrier.red.popc.u32 %r4, 1, 128, %p0;",
        "  barrier.red.and.pred %p1, 1, 128, %p0;",
        "  barrier.red.or.pred %p2, 1, 128, %p0;",
        "  selp.b32 %r5, 1000, 0, %p1;",
        "  selp.b32 %r6, 2000, 0, %p2;",
        "  add.u32 %r4, %r4, %r5;",
        "  add.u32 %r4, %r4, %r6;",
        store_element("%r4"),
    ]

    def reduced(a: np.ndarray) -> np.ndarray:
        odd = a & 1
        return np.full(128, odd.sum() + 1000 * odd.all() + 2000 * odd.any(), np.uint32)

    return [
        _block("bar.sync", "sm_80", exchange, shared, lambda a: a[::-1]),
        _block("barrier.sync named", "sm_80", named, shared, lambda a: a[::-1]),
        _block("bar.arrive, bar.sync", "sm_80", producer, shared, lambda a: a[:64]),
        _block("barrier.red", "sm_80", reduce, shared, reduced),
    ]


_WAIT = """{label}:
  mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r20], {parity};
  @!%p9 bra {label};"""


def _mbarriers() -> list[Case]:
    shared = ".shared .align 16 .b8 buffer[1024];\n.shared .align 8 .b64 ready;"
    begin = [
        "  mov.u32 %r20, ready;",
        "  setp.eq.u32 %p8, %i, 0;",
        "  @%p8 mbarrier.init.shared::cta.b64 [%r20], {count};",
        "  bar.sync 0;",
    ]
    store = store_element("%r5")
    # Two phases: each thread publishes a value, everyone reads the mirrored one, twice.
    two = [
        *(line.format(count=128) for line in begin),
        *_LOAD,
        "  st.shared.b32 [%r2], %r0;",
        "  mbarrier.arrive.shared::cta.b64 %d5, [%r20];",
        _WAIT.format(label="W0", parity=0),
        *_MIRROR,
        "  mov.u32 %r5, %r4;",
        "  bar.sync 0;",
        "  not.b32 %r6, %r0;",
        "  st.shared.b32 [%r2], %r6;",
        "  mbarrier.arrive.shared::cta.b64 %d5, [%r20];",
        _WAIT.format(label="W1", parity=1),
        *_MIRROR,
        "  mad.lo.u32 %r5, %r5, 3, %r4;",
        store,
    ]
    # test_wait by state: false before the last arrival, true after it.
    state = [
        *(line.format(count=2) for line in begin),
        "  mov.u32 %r5, 0;",
        "  @!%p8 bra END;",
        "  mbarrier.arrive.shared::cta.b64 %d5, [%r20];",
        "  mbarrier.test_wait.shared::cta.b64 %p0, [%r20], %d5;",
        "  selp.b32 %r6, 1, 0, %p0;",
        "  mbarrier.arrive.shared::cta.b64 %d6, [%r20];",
        "  mbarrier.test_wait.shared::cta.b64 %p1, [%r20], %d6;",
        "  selp.b32 %r7, 2, 0, %p1;",
        "  mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r20], 0;",
        "  selp.b32 %r8, 4, 0, %p2;",
        "  mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r20], 1;",
        "  selp.b32 %r9, 8, 0, %p3;",
        "  mbarrier.pending_count.b64 %r10, %d5;",
        "  shl.b32 %r10, %r10, 4;",
        "  add.u32 %r5, %r6, %r7;",
        "  add.u32 %r5, %r5, %r8;",
        "  add.u32 %r5, %r5, %r9;",
        "  add.u32 %r5, %r5, %r10;",
        "END:",
        store,
    ]

    def states(a: np.ndarray) -> np.ndarray:
        out = np.zeros(128, np.uint32)
        # Not complete after one of two arrivals (0), complete after both (2); phase 0 is over (4), and phase 1, the
        # current one, is not: parity 1 names the phase before phase 0 (8 stays unset). Before the first arrival 2
        # were pending.
        out[0] = 2 + 4 + (2 << 4)
        return out

    return [
        _block("mbarrier.arrive, try_wait.parity", "sm_90a", two, shared, lambda a: a[::-1] * np.uint32(3) + ~a[::-1]),
        _block("mbarrier.test_wait, pending_count", "sm_90a", state, shared, states),
    ]


def _copies() -> list[Case]:
    shared = ".shared .align 128 .b8 buffer[4096];\n.shared .align 8 .b64 ready;"
    out = [element_address("%out", "%d1", 16), "  st.global.v4.b32 [%d1], {%r4, %r5, %r6, %r7};"]
    read = [
        "  sub.u32 %r3, 127, %i;",
        "  mad.lo.u32 %r3, %r3, 16, %r1;",
        "  ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];",
    ]
    mine = ["  mov.u32 %r1, buffer;", "  mad.lo.u32 %r2, %i, 16, %r1;", element_address("%in0", "%d0", 16)]
    grouped = [
        *mine,
        "  cp.async.cg.shared.global [%r2], [%d0], 16;",
        "  cp.async.commit_group;",
        "  cp.async.wait_group 0;",
        "  bar.sync 0;",
        *read,
        *out,
    ]
    # A source size below 16 fills the rest with zeros.
    filled = [
        *mine,
        "  and.b32 %r8, %i, 15;",
        "  cp.async.cg.shared.global [%r2], [%d0], 16, %r8;",
        "  cp.async.commit_group;",
        "  cp.async.wait_all;",
        "  bar.sync 0;",
        *read,
        *out,
    ]

    def mirrored(a: np.ndarray) -> np.ndarray:
        return a.reshape(128, 4)[::-1]

    def cut(a: np.ndarray) -> np.ndarray:
        rows = a.copy().view(np.uint8).reshape(128, 16)
        for i, row in enumerate(rows):
            row[i & 15 :] = 0
        return rows[::-1].copy().view(np.uint32)

    def reversed_words(a: np.ndarray) -> np.ndarray:
        return a.reshape(128, 4)[:, ::-1]

    def added(a: np.ndarray) -> np.ndarray:
        return a.reshape(128, 4) + np.arange(128, dtype=np.uint32)[:, None]

    begin = [
        "  mov.u32 %r20, ready;",
        "  setp.eq.u32 %p8, %i, 0;",
        "  @%p8 mbarrier.init.shared::cta.b64 [%r20], 1;",
        "  fence.mbarrier_init.release.cluster;",
        "  bar.sync 0;",
    ]
    bulk = [
        *begin,
        "  mov.u32 %r1, buffer;",
        "  @!%p8 bra WAITING;",
        "  mbarrier.arrive.expect_tx.shared::cta.b64 %d5, [%r20], 2048;",
        "  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%in0], 2048, [%r20];",
        "WAITING:",
        _WAIT.format(label="W0", parity=0),
        *read,
        *out,
    ]
    back = [
        "  mov.u32 %r1, buffer;",
        "  mad.lo.u32 %r2, %i, 16, %r1;",
        element_address("%in0", "%d0", 16),
        "  ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d0];",
        "  st.shared.v4.b32 [%r2], {%r7, %r6, %r5, %r4};",
        "  fence.proxy.async.shared::cta;",
        "  bar.sync 0;",
        "  setp.eq.u32 %p8, %i, 0;",
        "  @!%p8 bra END;",
        "  cp.async.bulk.global.shared::cta.bulk_group [%out], [%r1], 2048;",
        "  cp.async.bulk.commit_group;",
        "  cp.async.bulk.wait_group 0;",
        "END:",
    ]
    reduce = [line.replace("{%r7, %r6, %r5, %r4}", "{%r4, %r5, %r6, %r7}") for line in back]
    reduce = [
        line.replace(
            "cp.async.bulk.global.shared::cta.bulk_group [%out]",
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out]",
        )
        for line in reduce
    ]
    reduce[3:3] = [
        element_address("%out", "%d1", 16),
        "  st.global.v4.b32 [%d1], {%i, %i, %i, %i};",
        "  fence.proxy.async.global;",
    ]

    return [
        _block("cp.async.cg 16", "sm_80", grouped, shared, mirrored, words=4),
        _block("cp.async.cg with zero fill", "sm_80", filled, shared, cut, words=4),
        _block("cp.async.bulk global to shared", "sm_90a", bulk, shared, mirrored, words=4),
        _block("cp.async.bulk shared to global", "sm_90a", back, shared, reversed_words, words=4),
        _block("cp.reduce.async.bulk add.u32", "sm_90a", reduce, shared, added, words=4),
    ]


CASES = [*_thread_barriers(), *_mbarriers(), *_copies()]
