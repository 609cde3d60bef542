"""Asynchronous operations, their barriers, and data races, on hand-written PTX."""

import numpy as np
import pytest
from warpcheck.errors import (
    BarrierMisuse,
    DataRace,
    Deadlock,
    IllegalInstruction,
    Misaligned,
    OutOfBounds,
    TmemMisuse,
    UnknownInstruction,
)
from warpcheck.machine import EmulationOptions, Machine, load_core
from warpcheck_cases.handwritten import ROUND_TRIP, WAIT, entry, launch, pointers

SCHEDULES = ("round_robin", "random", "adversarial")


def round_trip(expected=512, wait=WAIT, fence="fence.proxy.async.shared::cta;", **keywords):
    source, target = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    launch(ROUND_TRIP.format(expected=expected, wait=wait, fence=fence), [source, target], block=128, **keywords)
    return source, target


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_bulk_copy_in_and_out(schedule, seed):
    source, target = round_trip(schedule=schedule, seed=seed)
    np.testing.assert_array_equal(target, source + 1)


def test_missing_proxy_fence_is_named():
    with pytest.raises(DataRace, match=r"needs fence\.proxy\.async") as caught:
        round_trip(fence="")
    assert "st.shared.b32" in str(caught.value) and "cp.async.bulk.global" in str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_missing_wait_is_a_race_under_every_schedule(schedule):
    with pytest.raises(DataRace):
        round_trip(wait="", schedule=schedule)


def test_more_bytes_expected_than_come():
    with pytest.raises(Deadlock, match="16 expected bytes have not come"):
        round_trip(expected=528)


def test_fewer_bytes_expected_than_come():
    with pytest.raises(Deadlock, match="16 more bytes came than were expected"):
        round_trip(expected=496)


def test_too_many_arrivals():
    with pytest.raises(BarrierMisuse, match="arrivals but only"):
        launch(
            """setp.ne.u32 %p0, %r0, 0; @!%p0 mbarrier.init.shared.b64 [%r2], 2; bar.sync 0;
            mbarrier.arrive.shared.b64 _, [%r2], 2;
            @!%p0 mbarrier.expect_tx.shared.b64 [%r2], 16; @!%p0 mbarrier.arrive.shared.b64 _, [%r2], 3;"""
        )


def test_arrival_at_no_barrier():
    with pytest.raises(BarrierMisuse, match="no initialised mbarrier"):
        launch("mbarrier.arrive.shared.b64 _, [%r2+64], 1;")


def test_unaligned_and_outside():
    data = np.zeros(8, np.uint32)
    with pytest.raises(Misaligned):
        launch("ld.global.b32 %r3, [%a0+2];", [data])
    with pytest.raises(OutOfBounds, match="array 0, 32 bytes, overrun by 4"):
        launch("ld.global.b32 %r3, [%a0+32];", [data])
    with pytest.raises(OutOfBounds):
        launch("ld.shared.b32 %r3, [%r2+4096];", smem=4096)


OUTSIDE = f"""
    setp.ne.u32 %p0, %r0, 0; @!%p0 mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0; @%p0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128; mov.b32 %r6, {{place}};
    cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2+128], [%a0, {{{{%r6}}}}], [%r2];
    WAIT: {WAIT} mul.wide.u32 %d0, %r0, 4; add.s64 %d1, %a1, %d0; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3;
    ld.shared.b32 %r7, [%r4+128]; st.global.b32 [%d1], %r7;"""


def load_a_box(place: int, below: int) -> np.ndarray:
    """What a copy of 32 words from `place` on gives, of a tensor of 64 that begins `below` words before 128 ones."""
    ones, result = np.ones(128, np.uint32), np.full(32, 7, np.uint32)
    fields = dict(base=ones.ctypes.data - 4 * below, type=2, extent=[64], stride=[4], box=[32])
    buffer = np.zeros(192, np.uint8)
    first = -buffer.ctypes.data % 64
    buffer[first : first + 128] = np.frombuffer(load_core().encode_tensormap(fields), np.uint8)
    launch(OUTSIDE.format(place=place), [buffer[first : first + 128], result, ones], target="sm_90a")
    return result


def test_a_box_outside_its_tensor_touches_where_the_tensor_begins():
    """An H100 lost its context by such boxes of a map that began below all memory. A box that crosses the end is told
    by ISA 5.5.3.3 to be filled, and touches what it holds only."""
    assert not load_a_box(64, below=0).any()
    crossing = load_a_box(48, below=32)
    assert crossing[:16].all() and not crossing[16:].any()
    with pytest.raises(OutOfBounds, match="wholly outside its tensor"):
        load_a_box(64, below=1 << 20)


STORED = """setp.ne.u32 %p0, %r0, 0; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; st.shared.b32 [%r4+128], 5;
    fence.proxy.async.shared::cta; bar.sync 0; @%p0 bra DONE; mov.b32 %r6, {place};
    {copy}.global.shared::cta.{how}bulk_group [%a0, {{%r6}}], [%r2+128];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE:"""


@pytest.mark.parametrize(
    "copy, how", [("cp.async.bulk.tensor.1d", "tile."), ("cp.reduce.async.bulk.tensor.1d", "add.tile.")]
)
def test_a_store_may_cross_the_end_of_its_tensor_and_not_the_beginning(copy: str, how: str) -> None:
    """An H100 ends such stores and additions in an illegal instruction, whether a part of the box lies in the tensor or
    none, and leaves out what lies beyond the end."""

    def store(place: int) -> np.ndarray:
        stored = np.zeros(64, np.uint32)
        fields = dict(base=stored.ctypes.data, type=2, extent=[64], stride=[4], box=[32])
        buffer = np.zeros(192, np.uint8)
        first = -buffer.ctypes.data % 64
        buffer[first : first + 128] = np.frombuffer(load_core().encode_tensormap(fields), np.uint8)
        body = STORED.format(place=place, copy=copy, how=how)
        launch(body, [buffer[first : first + 128], stored], target="sm_90a")
        return stored

    assert store(48).nonzero()[0].tolist() == list(range(48, 64))
    assert not store(64).any()
    for place in (-1, -32, -1000):
        with pytest.raises(IllegalInstruction, match=f"from coordinate {place} of dimension 0"):
            store(place)


@pytest.mark.parametrize(
    "type_, packed", [(12, 64), (13, 96)], ids=["4 bits in 16 bytes of 16", "6 bits in 16 bytes of 16"]
)
def test_the_end_of_a_padded_load_counts_packed_bytes(type_: int, packed: int) -> None:
    """CUTLASS expects as many bytes as the elements have bits, without the padding that the copy adds."""
    ones, result = np.full(packed, 0xFF, np.uint8), np.zeros(32, np.uint32)
    fields = dict(base=ones.ctypes.data, type=type_, extent=[128], stride=[0], box=[128])
    buffer = np.zeros(192, np.uint8)
    first = -buffer.ctypes.data % 64
    buffer[first : first + 128] = np.frombuffer(load_core().encode_tensormap(fields), np.uint8)
    body = OUTSIDE.replace("_, [%r2], 128", f"_, [%r2], {packed}").format(place=0)
    launch(body, [buffer[first : first + 128], result, ones], target="sm_100a")
    taken = packed // 32  # words of each four that hold elements
    assert (result.reshape(8, 4)[:, :taken] == 0xFFFFFFFF).all()


EXCHANGE = """shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; st.shared.b32 [%r4], %r0; {barrier}
    xor.b32 %r5, %r3, 128; add.u32 %r6, %r2, %r5; ld.shared.b32 %r7, [%r6];
    mul.wide.u32 %d0, %r0, 4; add.s64 %d1, %a0, %d0; st.global.b32 [%d1], %r7;"""


def test_shared_memory_needs_the_barrier():
    out = np.zeros(64, np.uint32)
    launch(EXCHANGE.format(barrier="bar.sync 0;"), [out], block=64)
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)
    with pytest.raises(DataRace) as caught:
        launch(EXCHANGE.format(barrier="nanosleep.u32 100;"), [out], block=64)
    assert "shared memory" in str(caught.value)


@pytest.mark.parametrize("release", ["st.release.gpu", "fence.acq_rel.gpu; st.relaxed.gpu"])
@pytest.mark.parametrize("acquire", ["acquire", "relaxed"])
def test_flags_order_only_with_release_and_acquire(release, acquire):
    *fence, store = release.split("; ")
    body = f"""setp.ne.u32 %p0, %r0, 0; @%p0 bra DONE; setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT;
        st.global.b32 [%a0+4], 42; {";".join(fence)}; {store}.global.b32 [%a0], 1; bra DONE;
        WAIT: ld.{acquire}.gpu.global.b32 %r3, [%a0]; setp.eq.u32 %p2, %r3, 0; @%p2 bra WAIT;
        ld.global.b32 %r4, [%a0+4];
        DONE:"""
    if acquire == "acquire":
        launch(body, [np.zeros(2, np.uint32)], grid=2)
    else:
        with pytest.raises(DataRace, match="global memory"):
            launch(body, [np.zeros(2, np.uint32)], grid=2)


TMEM = """setp.lt.u32 %p0, %r0, 32; @!%p0 bra READY; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
    READY: bar.sync 0; ld.shared.b32 %r3, [%r2]; and.b32 %r4, %r0, 96; shl.b32 %r4, %r4, 16; add.u32 %r5, %r3, %r4;
    {body}
    bar.sync 0; @!%p0 bra DONE; {free} DONE:"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;"


def test_tensor_memory_round_trip_and_leak():
    out = np.zeros(128, np.uint32)
    body = """tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r0}; tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r5]; tcgen05.wait::ld.sync.aligned;
        mul.wide.u32 %d0, %r0, 4; add.s64 %d1, %a0, %d0; st.global.b32 [%d1], %r6;"""
    launch(TMEM.format(body=body, free=FREE), [out], block=128)
    np.testing.assert_array_equal(out, np.arange(128))
    with pytest.raises(TmemMisuse, match="still allocated"):
        launch(TMEM.format(body=body, free=""), [out], block=128)
    with pytest.raises(DataRace, match="tensor memory"):
        launch(TMEM.format(body=body.replace("tcgen05.wait::st.sync.aligned;", ""), free=FREE), [out], block=128)
    with pytest.raises(TmemMisuse, match="not allocated"):
        launch(TMEM.format(body=body.replace("[%r5]", "[%r5+40]"), free=FREE), [out], block=128)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("min.f32", lambda x: np.fmin.reduce(x, 1)),
        ("max.f32", lambda x: np.fmax.reduce(x, 1)),
        ("max.abs.f32", lambda x: np.fmax.reduce(np.abs(x), 1)),
        ("min.NaN.f32", lambda x: np.minimum.reduce(x, 1)),
        ("max.s32", lambda x: x.view(np.int32).max(1).view(np.float32)),
        ("min.u32", lambda x: x.view(np.uint32).min(1).view(np.float32)),
    ],
)
def test_a_load_of_tensor_memory_reduces_each_lane(operation, expected, seed):
    """tcgen05.ld.red, PTX ISA 9.7.16.8.3: the loaded columns as they are, and one register with their extreme."""
    values = np.random.default_rng(seed).standard_normal((128, 4)).astype(np.float32)
    values[3, 1] = np.nan
    out = np.zeros((128, 5), np.float32)
    body = f"""mul.wide.u32 %d0, %r0, 16; add.s64 %d0, %a0, %d0;
        ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d0];
        tcgen05.st.sync.aligned.32x32b.x4.b32 [%r5], {{%r10, %r11, %r12, %r13}}; tcgen05.wait::st.sync.aligned;
        tcgen05.ld.red.sync.aligned.32x32b.x4.{operation} {{%r20, %r21, %r22, %r23}}, %r24, [%r5];
        tcgen05.wait::ld.sync.aligned;
        mul.wide.u32 %d1, %r0, 20; add.s64 %d1, %a1, %d1;
        {" ".join(f"st.global.b32 [%d1+{4 * i}], %r{20 + i};" for i in range(5))}"""
    launch(TMEM.format(body=body, free=FREE), [values, out], block=128, target="sm_103a")
    np.testing.assert_array_equal(out[:, :4].view(np.uint32), values.view(np.uint32))
    np.testing.assert_array_equal(out[:, 4], expected(values), err_msg=f"seed {seed}")
    with pytest.raises(UnknownInstruction, match="chips that have it: sm_103a"):
        launch(TMEM.format(body=body, free=FREE), [values, out], block=128)


CANCEL = """
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2+16], [%r2];
LOOP{step}: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], {parity}; @!%p1 bra LOOP{step};
    ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r2+16];
    ld.shared.v2.b64 {{%d1, %d2}}, [%r2+16]; mov.b128 %q, {{%d1, %d2}};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r20, %r21, %r22, _}}, %q;
    selp.u32 %r23, 1, 0, %p2; and.b32 %r12, %r12, 1;
    st.global.v4.b32 [%a0+{at}], {{%r20, %r21, %r22, %r23}};
    and.b32 %r14, %r11, 65535; shr.u32 %r15, %r11, 16;
    st.global.v4.b32 [%a0+{further}], {{%r10, %r14, %r15, %r12}};
    fence.proxy.async.shared::cta;
"""


def test_the_response_to_a_cancellation_is_as_chips_have_it():
    """x in word 0, y and z in the halves of word 1, bit 0 of word 2: ptxas decodes it so, and cuDNN reads it itself."""
    values = [{"step": step, "parity": step % 2, "at": 32 * step, "further": 32 * step + 16} for step in range(6)]
    steps = "".join(CANCEL.format(**value) for value in values)
    body = f"""
        .reg .b128 %q;
        setp.ne.u32 %p0, %r0, 0; @%p0 bra DONE;
        mbarrier.init.shared.b64 [%r2], 1; fence.proxy.async.shared::cta;
        {steps}
    DONE:
    """
    out = np.zeros((6, 2, 4), np.uint32)
    Machine("sm_100a", EmulationOptions(sms=1)).launch(
        entry(body, 1), "test", grid=(1, 2, 3), block=(32, 1, 1), smem_bytes=200_000,
        **pointers([out]),
    )  # fmt: skip
    want = [(0, y, z, 1) for z in range(3) for y in range(2)][1:]
    np.testing.assert_array_equal(out[:5], np.repeat(np.array(want)[:, None], 2, 1))
    assert not out[5, :, 3].any()


# Warp 0 copies 16 bytes a lane again and again; the other warp waits, and gives the place back.
REPEATED_COPIES = """
    setp.ne.u32 %p0, %r0, 0;
    @!%p0 mbarrier.init.shared.b64 [%r2+2048], 32;
    @!%p0 mbarrier.init.shared.b64 [%r2+2056], 32;
    fence.mbarrier_init.release.cluster; bar.sync 0;
    mov.u32 %r8, 0;
    shl.b32 %r3, %r0, 4; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d0, %r3; add.s64 %d1, %a0, %d0;
    setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUME;
AGAIN:
    cp.async.cg.shared.global [%r4], [%d1], 16;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+2048];
    and.b32 %r9, %r8, 1;
BACK: mbarrier.try_wait.parity.shared.b64 %p1, [%r2+2056], %r9; @!%p1 bra BACK;
    add.u32 %r8, %r8, 1;
    setp.ne.u32 %p3, %r8, {iterations}; @%p3 bra AGAIN;
    bra DONE;
CONSUME:
    and.b32 %r9, %r8, 1;
THERE: mbarrier.try_wait.parity.shared.b64 %p1, [%r2+2048], %r9; @!%p1 bra THERE;
    ld.shared.b32 %r6, [%r4+-512];
    mbarrier.arrive.shared.b64 _, [%r2+2056];
    add.u32 %r8, %r8, 1;
    setp.ne.u32 %p3, %r8, {iterations}; @%p3 bra CONSUME;
DONE:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_clocks_do_not_grow_with_the_iterations_of_copies(schedule, seed):
    """An arrival for copies has a slot of its own, which is free again once its phase was waited for."""
    data = np.zeros(256, np.uint32)
    few, many = (
        launch(REPEATED_COPIES.format(iterations=n), [data], block=64, schedule=schedule, seed=seed % 1000).clock_slots
        for n in (8, 64)
    )
    assert many <= few + 32 < 8 * 32
