"""Divergence, convergence, barriers and progress, on hand-written PTX."""

import numpy as np
import pytest
from warpcheck.errors import BarrierMisuse, Deadlock, DivergentAligned, UninitializedRead, UnknownInstruction
from warpcheck_cases.handwritten import launch

SCHEDULES = ("round_robin", "random", "adversarial")
ADDRESS = "mul.wide.u32 %d0, %r0, 4; add.s64 %d1, %a0, %d0;"


def test_loop_with_a_trip_count_per_lane_reconverges():
    out = np.zeros(64, np.uint32)
    launch(
        f"""{ADDRESS} mov.b32 %r3, 0; mov.b32 %r4, 0;
        LOOP: setp.ge.u32 %p0, %r3, %r0; @%p0 bra DONE;
        add.u32 %r4, %r4, %r3; add.u32 %r3, %r3, 1; bra LOOP;
        DONE: activemask.b32 %r5; vote.sync.all.pred %p1, %p0, -1; selp.b32 %r4, %r4, 0, %p1;
        st.global.b32 [%d1], %r4;""",
        [out],
        block=64,
    )
    lanes = np.arange(64)
    np.testing.assert_array_equal(out, lanes * (lanes - 1) // 2)


# name -> PTX, CTAs, words of memory, and the value of the last word
POLLING = {
    # Independent forward progress: lane 0 spins on a flag that lane 31 sets further down.
    "lanes of one warp": (
        """setp.ne.u32 %p0, %r0, 0; @%p0 bra OTHERS;
        SPIN: ld.relaxed.gpu.global.b32 %r3, [%a0]; setp.eq.u32 %p1, %r3, 0; @%p1 bra SPIN; bra DONE;
        OTHERS: setp.ne.u32 %p2, %r0, 31; @%p2 bra DONE; st.relaxed.gpu.global.b32 [%a0], 7;
        DONE:""",
        1, 1, 7,
    ),
    "CTA for a flag": (
        """setp.ne.u32 %p0, %r0, 0; @%p0 bra DONE; setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT;
        st.global.b32 [%a0+4], 42; st.release.gpu.global.b32 [%a0], 1; bra DONE;
        WAIT: ld.acquire.gpu.global.b32 %r3, [%a0]; setp.eq.u32 %p2, %r3, 0; @%p2 bra WAIT;
        ld.global.b32 %r4, [%a0+4]; st.global.b32 [%a0+8], %r4;
        DONE:""",
        2, 3, 42,
    ),
    "spin lock": (
        """setp.ne.u32 %p0, %r0, 0; @%p0 bra DONE;
        TAKE: atom.acquire.gpu.global.cas.b32 %r3, [%a0], 0, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra TAKE;
        ld.global.b32 %r4, [%a0+4]; add.u32 %r4, %r4, 1; st.global.b32 [%a0+4], %r4;
        atom.release.gpu.global.exch.b32 %r5, [%a0], 0;
        DONE:""",
        24, 2, 24,
    ),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ptx, ctas, words, last", POLLING.values(), ids=list(POLLING))
def test_polling_ends_when_another_thread_writes(ptx, ctas, words, last, schedule):
    out = np.zeros(words, np.uint32)
    launch(ptx, [out], grid=ctas, schedule=schedule)
    assert out[-1] == last


def test_flag_that_nobody_sets_is_a_deadlock():
    with pytest.raises(Deadlock, match=r"polls array 0 \+ 0, which nobody changes"):
        launch(
            "SPIN: ld.acquire.gpu.global.b32 %r3, [%a0]; setp.eq.u32 %p1, %r3, 0; @%p1 bra SPIN;",
            [np.zeros(1, np.uint32)],
        )


def test_deadlock_names_barrier_phase_and_missing_arrivals():
    with pytest.raises(Deadlock) as caught:
        launch(
            """setp.ne.u32 %p0, %r0, 0; @%p0 bra READY; mbarrier.init.shared.b64 [%r2], 3;
            mbarrier.arrive.shared.b64 _, [%r2], 1;
            READY: bar.sync 0;
            WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra WAIT;"""
        )
    text = str(caught.value)
    assert "mbarrier at 0x400" in text and "phase 0" in text and "2 of 3 arrivals missing" in text


def test_barrier_with_too_few_threads_is_a_deadlock():
    with pytest.raises(Deadlock, match="barrier 1: 32 of 64 threads have arrived"):
        launch("setp.lt.u32 %p0, %r0, 32; @!%p0 bra DONE; bar.sync 1, 64; DONE:", block=64)


def test_barrier_counts_must_agree():
    with pytest.raises(BarrierMisuse, match="thread count"):
        launch("setp.lt.u32 %p0, %r0, 32; @%p0 bra A; bar.sync 1, 96; bra DONE; A: bar.sync 1, 64; DONE:", block=64)


def test_aligned_instruction_in_divergent_code():
    with pytest.raises(DivergentAligned):
        launch("setp.lt.u32 %p0, %r0, 7; @%p0 bra A; bar.sync 0; bra DONE; A: bar.sync 0; DONE:")


def test_undefined_values_may_not_steer_or_leave():
    fresh = "ld.shared.b32 %r3, [%r2];"  # shared memory starts undefined
    with pytest.raises(UninitializedRead, match="control flow"):
        launch(fresh + "setp.eq.u32 %p0, %r3, 0; @%p0 bra DONE; DONE:")
    with pytest.raises(UninitializedRead, match="global memory"):
        launch(fresh + "add.u32 %r4, %r3, 1; st.global.b32 [%a0], %r4;", [np.zeros(1, np.uint32)])
    with pytest.raises(UninitializedRead, match="address"):
        launch(fresh + "cvt.u64.u32 %d0, %r3; ld.global.b32 %r4, [%d0];")
    launch(fresh + "setp.lt.u32 %p0, %r0, 32; selp.b32 %r4, 1, %r3, %p0; setp.lt.u32 %p1, %r4, 2; @%p1 bra DONE; DONE:")


def test_elements_of_vectors_of_registers():
    """ISA 6.4.3: .x .y .z .w, or .r .g .b .a, and the name alone is the whole vector."""
    out = np.zeros(4, np.uint32)
    launch(
        """setp.ne.u32 %p0, %r0, 0; { .reg .v4 .b32 four; .reg .v2 .u32 two;
        mov.b32 four.x, 7; mov.b32 four.g, 8; mov.b32 two.x, 9; mov.b32 two.y, four.r;
        mov.b32 four.z, two.r; add.u32 four.a, two.g, two.x; @!%p0 st.global.v4.b32 [%a0], four; }""",
        [out],
    )
    np.testing.assert_array_equal(out, [7, 8, 9, 16])


def test_unknown_modifier_is_named():
    with pytest.raises(UnknownInstruction, match=r"add\.sideways\.u32"):
        launch("add.sideways.u32 %r3, %r0, 1;")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_seed_same_trace(schedule):
    body = """mbarrier.init.shared.b64 [%r2], 1; mov.b32 %r3, 0;
        LOOP: add.u32 %r3, %r3, 1; setp.lt.u32 %p0, %r3, %r0; @%p0 bra LOOP; bar.sync 0;"""
    body = body.replace("mbarrier.init.shared.b64 [%r2], 1;", "")
    runs = [launch(body, block=128, grid=6, seed=seed, schedule=schedule, trace=True) for seed in (5, 5, 6)]
    assert runs[0].trace_hash == runs[1].trace_hash and runs[0].trace == runs[1].trace
    if schedule == "random":
        assert runs[0].trace_hash != runs[2].trace_hash


def test_cluster_barrier_and_distributed_shared_memory():
    out = np.zeros(4, np.uint32)
    launch(
        """mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %p0, %r0, 0;
        @!%p0 st.shared.b32 [%r2], %r1;
        barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
        xor.b32 %r4, %r3, 1; mapa.shared::cluster.u32 %r5, %r2, %r4; ld.shared::cluster.b32 %r6, [%r5];
        mul.wide.u32 %d0, %r1, 4; add.s64 %d1, %a0, %d0; @!%p0 st.global.b32 [%d1], %r6;
        barrier.cluster.arrive.release; barrier.cluster.wait.acquire;""",
        [out],
        grid=4,
        cluster=2,
    )
    np.testing.assert_array_equal(out, [1, 0, 3, 2])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("waits", ["bar.sync 0;", "bar.warp.sync -1;", "vote.sync.any.pred %p3, %p1, -1;"])
def test_lanes_that_exit_later_are_not_waited_for(waits, schedule):
    """Lanes 0 to 7 come to the instruction while the others are still in a loop, behind which they exit."""
    out = np.zeros(1, np.uint32)
    body = f"""setp.ge.u32 %p1, %r0, 8; @%p1 bra LATER;
        {waits}
        setp.eq.u32 %p2, %r0, 0; @%p2 st.global.b32 [%a0], 7; ret;
        LATER: mov.u32 %r3, 0; BUSY: add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 500; @%p2 bra BUSY;"""
    for seed in range(4):
        launch(body, [out], schedule=schedule, seed=seed)
    assert out[0] == 7


OWN_MASK = {
    "vote": "vote.sync.ballot.b32 %r5, %p1, %r4;",
    "shuffle": "shfl.sync.idx.b32 %r5, %r0, 0, 31, %r4;",
    "match": "match.any.sync.b32 %r5, %r0, %r4;",
    "warp barrier": "bar.warp.sync %r4;",
}


@pytest.mark.parametrize("instruction", OWN_MASK.values(), ids=list(OWN_MASK))
def test_a_lane_is_in_its_own_mask(instruction):
    with pytest.raises(DivergentAligned, match="not in its own member mask"):
        launch("setp.eq.u32 %p1, %r0, 0; mov.u32 %r4, 0x7fffffff;" + instruction)


def test_the_tiles_of_a_warp_name_different_masks():
    """As cooperative groups of 16 lanes do, in one instruction."""
    launch("setp.lt.u32 %p1, %r0, 16; selp.b32 %r4, 0xffff, 0xffff0000, %p1; bar.warp.sync %r4;")
