"""The time of a whole grid from a part of its clusters, beside replays of all of them."""

import dataclasses

import numpy as np
import pytest
from warpcheck.machine import Checks, EmulationOptions, Launch, Machine, Part
from warpcheck.machine.record import KINDS
from warpcheck.timing.chips import GPUS, chip_table
from warpcheck.timing.parts import _ranges, part_of, whole
from warpcheck.timing.report import Timing
from warpcheck_cases.handwritten import entry, pointers

from warpcheck import Emulated

OFF = Checks(races=False, poison=False)
# CTA i adds in a loop of 64 iterations, and of `step` more for each CTA before it, and writes its number.
LOOPS = """
    mul.lo.u32 %r4, %r1, {step};
    add.u32 %r4, %r4, 64;
    cvt.rn.f32.u32 %f0, %r4;
LOOP:
    fma.rn.f32 %f0, %f0, %f0, %f0;
    sub.u32 %r4, %r4, 1;
    setp.ne.u32 %p0, %r4, 0;
    @%p0 bra LOOP;
    mul.wide.u32 %d0, %r1, 4;
    add.u64 %d1, %a0, %d0;
    st.global.u32 [%d1], %r1;
"""


def emulated(body: str, grid: int, sms: int, sample: int | None, smem: int = 120000) -> tuple[Emulated, np.ndarray]:
    """smem: bytes of a CTA; of more than half of an SM's, one CTA is resident."""
    written = np.full(grid, -1, np.int32)
    gpu = Emulated("sm_90a", sms=sms, timing=True, sample=sample, checks=OFF)
    gpu.launch(entry(body, 1, "sm_90a"), grid=grid, block=32, args=[written], smem_bytes=smem)
    return gpu, written


@pytest.mark.parametrize("step", [0, 16])
def test_waves_take_as_long_as_all_of_them(step):
    """Of equal CTAs, and of CTAs that take longer and longer."""
    body = LOOPS.format(step=step)
    (all_of, _), (part, written) = (emulated(body, 40, 4, sample) for sample in (None, 8))
    expected = all_of.timing().cycles + chip_table("sm_90a").numbers["launch"].value
    assert (written >= 0).sum() == 8 and written[0] == 0 and written[39] == 39
    assert part.timing().cycles == pytest.approx(expected, rel=0.03)


def test_a_resident_grid_takes_as_long_as_its_longest_cta():
    """The last one is among those that run."""
    body = LOOPS.format(step=16)
    (all_of, _), (part, written) = (emulated(body, 40, 40, sample) for sample in (None, 4))
    expected = all_of.timing().cycles + chip_table("sm_90a").numbers["launch"].value
    assert (written >= 0).sum() == 4
    assert part.timing().cycles == pytest.approx(expected, rel=0.03)


TICKETS = """
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra DONE;
NEXT:
    atom.global.add.u32 %r4, [%a0], 1;
    setp.lt.u32 %p1, %r4, 100;
    @%p1 bra NEXT;
DONE:
"""


def test_a_counter_of_tiles_is_told():
    """The 4 CTAs of a part take all tiles. Atomics without a result are none."""
    for body, told in ((TICKETS, True), ("red.global.add.u32 [%a0], 1;", False)):
        counter = np.zeros(1, np.uint32)
        gpu = Emulated("sm_90a", sms=40, timing=True, sample=4, checks=OFF)
        gpu.launch(entry(body, 1, "sm_90a"), grid=40, block=32, args=[counter], smem_bytes=120000)
        assert ("too long if its atomics hand out tiles" in str(gpu.timing())) is told


def test_clusters_run_in_the_given_order_and_no_others():
    written = np.full(8, -1, np.int32)
    machine = Machine("sm_90a", EmulationOptions(timing=True, checks=OFF))
    text = entry(LOOPS.format(step=0), 1, "sm_90a")
    launch = {"grid": (8, 1, 1), "block": (32, 1, 1), **pointers([written])}
    report = machine.launch(text, "test", part=Part((5, 2), 1, 1, 1), **launch)
    assert written.tolist() == [-1, -1, 2, -1, -1, 5, -1, -1]
    assert [warp.cta for warp in report.record.warps] == [5, 2]
    with pytest.raises(ValueError, match="cluster 8 of a grid of 8"):
        machine.launch(text, "test", part=Part((8,), 1, 1, 1), **launch)


TAKES = """
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra DONE;
    mbarrier.init.shared.b64 [%r2], 1;
    mov.u32 %r5, 0;
    mov.u32 %r6, %r1;
TILE:
    mul.wide.u32 %d0, %r6, 4;
    add.u64 %d1, %a0, %d0;
    st.global.u32 [%d1], %r1;
    mov.u32 %r4, 200;
LOOP:
    sub.u32 %r4, %r4, 1;
    setp.ne.u32 %p2, %r4, 0;
    @%p2 bra LOOP;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2 + 16], [%r2];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r2], %r5;
    @!%p1 bra WAIT;
    xor.b32 %r5, %r5, 1;
    ld.shared.b32 %r6, [%r2 + 16];
    ld.shared.b32 %r7, [%r2 + 24];
    and.b32 %r7, %r7, 1;
    fence.proxy.async.shared::cta;
    setp.ne.u32 %p3, %r7, 0;
    @%p3 bra TILE;
DONE:
"""


def test_a_place_takes_its_share_of_the_tiles():
    """60 tiles on 4 places: one place takes 15 of them, spread over the grid."""
    text, results = entry(TAKES, 1), []
    for sample in (None, 20):
        written = np.full(60, -1, np.int32)
        gpu = Emulated("sm_100a", sms=4, timing=True, sample=sample, checks=OFF)
        gpu.launch(text, grid=60, block=32, args=[written], smem_bytes=120000)
        results.append((gpu.timing().cycles, written))
    (expected, _), (cycles, written) = results
    taken = np.flatnonzero(written >= 0)
    assert len(taken) == 15 and len(set(written[taken].tolist())) == 1 and np.diff(taken).max() <= 8
    assert cycles == pytest.approx(expected + chip_table("sm_100a").numbers["launch"].value, rel=0.03)


READS = """
    mul.lo.u32 %r4, %r1, {own};
    add.u32 %r4, %r4, %r0;
    mul.wide.u32 %d0, %r4, 16;
    add.u64 %d1, %a0, %d0;
    ld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [%d1];
    mul.wide.u32 %d2, %r1, 4;
    add.u64 %d3, %a1, %d2;
    st.global.u32 [%d3], %r5;
"""


@pytest.mark.parametrize("own, sharers", [(32, 1), (0, 100)])
def test_sharers_follow_from_the_size_of_what_is_read(own, sharers):
    """100 CTAs read 512 bytes each: their own, or all the same."""
    table = chip_table("sm_90a")
    source, written = np.zeros((100 * 128) if own else 128, np.uint32), np.zeros(100, np.uint32)
    gpu = Emulated("sm_90a", sms=4, timing=True, sample=8, checks=OFF)
    gpu.launch(entry(READS.format(own=own), 2, "sm_90a"), grid=100, block=32, args=[source, written], smem_bytes=120000)
    record = gpu.launches[0].record
    for capacity, cold in ((1e9, False), (100.0, True)):
        small = dataclasses.replace(table, l2_capacity=table.l2_capacity._replace(value=capacity), l2_beyond=None)
        ranges, cycles = _ranges(record, record.launch.part, 100, 4, small)
        (found,) = (r for r in ranges if r[0] <= source.ctypes.data < r[1])
        assert found[2] == min(sharers, 4) and found[3] is (cold and own > 0)
        whole = small.device_memory(source.nbytes, 0, written.nbytes, 0, 0) / 4
        assert cycles == (pytest.approx(whole, rel=0.1) if cold else 0)
    assert any(KINDS["global"] in warp.events[:, 1] for warp in record.warps)


def test_the_clock_follows_from_the_power():
    law = GPUS["H100"].power
    assert law.clock(700, 0.8) < law.clock(700, 0.5) <= law.most.value
    assert law.clock(400, 0.8) < law.clock(700, 0.8)
    assert law.clock(5000, 0.8) == law.most.value
    with pytest.raises(ValueError, match="more than the 100 of a chip at rest"):
        law.clock(50, 0.5)
    gpu, _ = emulated(LOOPS.format(step=0), 8, 4, None)
    by_default, slow = gpu.timing(), gpu.timing(clock=0.855)
    assert slow.microseconds == pytest.approx(2 * by_default.microseconds)
    assert gpu.timing(watts=700).clock == law.clock(700, 0.0)
    with pytest.raises(ValueError, match=r"clock is 1\.5 and watts 700"):
        gpu.timing(clock=1.5, watts=700)


def test_what_a_sample_excludes_is_refused():
    for options, told in (
        ({"sample": 4}, "with timing"), ({"sample": 0, "timing": True}, "sample is 0"),
        ({"sample": 4, "timing": True}, "checks of races or poison"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            EmulationOptions(**options)
    gpu, _ = emulated(LOOPS.format(step=0), 8, 4, None)
    with pytest.raises(ValueError, match="it was not sampled"):
        whole(gpu.launches[0].record, chip_table("sm_90a"), 4)
    assert "on 4 SMs" in str(gpu.timing())
    sampled, _ = emulated(LOOPS.format(step=16), 100, 4, 6)
    assert "from 6 of 100 clusters, 4 at a time; standard error" in str(sampled.timing())
    with pytest.raises(ValueError, match="no launch was recorded"):
        Timing.of([None])


def test_a_cluster_larger_than_the_chip_is_refused():
    launch = Launch(entry("", 0), "test", (), (8, 1, 1), (32, 1, 1), (8, 1, 1), 0)
    with pytest.raises(ValueError, match="expected at least 8: test has clusters of 8 CTAs"):
        part_of(launch, "sm_100a", 4, 8, [])
