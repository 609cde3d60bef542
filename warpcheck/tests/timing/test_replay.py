"""The replay's units against the laws that were measured, on hand-written PTX."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from warpcheck.emulated import Emulated
from warpcheck.machine import Checks
from warpcheck.timing import (
    _replay,  # type: ignore[attr-defined]
    timeline,
)
from warpcheck.timing.chips import GPUS, TABLES, chip_table
from warpcheck.timing.code import issue_of
from warpcheck.timing.grid import CtaCost, Sample, TileScheduler, makespan, ordered_makespan, shared_makespan
from warpcheck.timing.replay import replay
from warpcheck_cases.handwritten import ROUND_TRIP, WAIT, entry, launch

# A batch of products by one thread, the commit that follows them, and the wait for it. 4096 bytes are A, as many B.
PRODUCTS = """
    setp.ne.u32 %p0, %r0, 0;
    add.u32 %r4, %r2, 16384;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 512;
    ld.shared.b32 %r5, [%r4];
    @!%p0 mbarrier.init.shared.b64 [%r4+8], 1;
    bar.sync 0;
    mov.b64 %d0, {descriptor};
    shr.u32 %r6, %r2, 4; cvt.u64.u32 %d1, %r6; or.b64 %d0, %d0, %d1;
    mov.u32 %r7, {shape};
    setp.eq.u32 %p1, %r0, 99;
    @%p0 bra WAITS;
    {products}
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4+8];
WAITS:
    add.u32 %r8, %r4, 8;
    LOOP: mbarrier.try_wait.parity.shared.b64 %p2, [%r8], 0; @!%p2 bra LOOP;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 512;
"""


def test_a_record_without_ctas_is_refused_and_an_empty_replay_ends_at_once():
    record = launch("add.u32 %r3, %r0, 1;", [], timing=True).record
    assert guessed(record).cycles > 0
    with pytest.raises(ValueError, match="the record of test has no warp"):
        guessed(replace(record, warps=()))
    issue = issue_of(record, guess=True)
    result = _replay.run(
        chip_table("sm_100a").values(), len(issue.pipes), issue.slots, issue.instructions, issue.blocks,
        record.instructions.tolist(), [], np.zeros((0, 6), dtype=np.int64), False, False, [], 0.0,
    )  # fmt: skip
    assert result["end"] == 0 and not result["stuck"] and not result["cta_end"]


def guessed(record, **options):
    return replay(record, issue_of(record, guess=True), **options)


def is_wait(record, track, instruction):
    """Whether an interval is a wait on an mbarrier."""
    if timeline.TRACKS[track] != "waits":
        return False
    return record.kernel.instructions[instruction].opcode.startswith("mbarrier.try_wait")


def batch(count, n, tmem=False):
    """Cycles from the first product's issue to the reader behind the commit."""
    a = "[%r5+256]" if tmem else "%d0"
    product = f"tcgen05.mma.cta_group::1.kind::f16 [%r5], {a}, %d0, %r7, %p1;"
    shape = (1 << 4) | (1 << 7) | (1 << 10) | (n // 8 << 17) | (128 // 16 << 24)
    descriptor = (1 << 46) | (2 << 61) | (1 << 16) | (64 << 32)
    text = PRODUCTS.format(descriptor=descriptor, shape=shape, products="\n".join([product] * count))
    checks = Checks(races=False, poison=False, tmem=False)
    record = launch(text, [], smem=32768, timing=True, checks=checks).record
    times = guessed(record, timeline=True)
    (wait,) = (end for track, _, _, what, _, end in times.intervals if is_wait(record, track, what))
    issued = times.products[0, 0] - chip_table("sm_100a").numbers[f"mma_start_{'ts' if tmem else 'ss'}"].value
    return wait - issued


@pytest.mark.parametrize(
    ("n", "tmem", "interval", "rest"),
    # timing of a B200 by SemiAnalysis: a batch of x products takes interval * x + rest to its reader
    [(128, False, 64, 148), (64, False, 48, 148), (256, False, 128, 148), (128, True, 64, 116), (64, True, 32, 116)],
)
def test_a_batch_of_products_takes_what_a_b200_takes(n, tmem, interval, rest):
    for count in (4, 16):
        assert batch(count, n, tmem) == pytest.approx(interval * count + rest, abs=1)


WARP_PRODUCTS = {  # type of an mma.sync -> cycles of a scheduler, by GPU
    "m16n8k16.row.col.f32.bf16.bf16.f32": {"RTX 5090": 32, "RTX PRO 6000": 16, "GB10": 16},
    "m16n8k32.row.col.f32.e4m3.e4m3.f32": {"RTX 5090": 32, "RTX PRO 6000": 16, "GB10": 16},
    "m16n8k32.row.col.f16.e4m3.e4m3.f16": {"RTX 5090": 16, "RTX PRO 6000": 16, "GB10": 16},
    "m16n8k8.row.col.f32.tf32.tf32.f32": {"RTX 5090": 32, "RTX PRO 6000": 16, "GB10": 16},
}


@pytest.mark.parametrize("kind", WARP_PRODUCTS)
def test_products_of_a_warp_take_what_consumer_blackwell_takes(kind):
    """Each warp of a scheduler has independent products; two warps share its tensor core."""
    has_halves = kind.split(".")[3] == "f16"
    names = [f"%r{20 + i}" for i in range(8)] if has_halves else [f"%f{i}" for i in range(16)]
    each = len(names) // 4
    lists = ["{" + ", ".join(names[i : i + each]) + "}" for i in range(0, len(names), each)]
    ab = "{%r8, %r9, %r10, %r11}, {%r12, %r13}"
    body = "".join(f"mma.sync.aligned.{kind} {c}, {ab}, {c};\n" for c in lists * 16)
    record = launch(body, [], block=256, target="sm_120a", timing=True).record
    issue = issue_of(record, guess=True)
    for gpu, cycles in WARP_PRODUCTS[kind].items():
        products = replay(record, issue, GPUS[gpu]).products
        assert len(products) == 8 * 64
        assert products[:, 1].max() - products[:, 0].min() == pytest.approx(2 * 64 * cycles, rel=0.02), gpu


def test_a_copy_takes_what_a_b200_takes():
    source, target = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    body = ROUND_TRIP.format(expected=512, wait=WAIT, fence="fence.proxy.async.shared::cta;")
    record = launch(body, [source, target], block=128, timing=True).record
    times = guessed(record, timeline=True)
    (begin,) = (i[4] for i in times.intervals if timeline.TRACKS[i[0]] == "copies in")
    woken = max(end for track, _, _, what, _, end in times.intervals if is_wait(record, track, what))
    assert woken - begin == pytest.approx(460 + 6 * 0.5 + 512 / 70, abs=8)  # META: 460 + 6 a KB, and the link from L2


def test_what_several_of_a_gpc_read_together_comes_to_it_once():
    source, target = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    body = ROUND_TRIP.format(expected=512, wait=WAIT, fence="fence.proxy.async.shared::cta;")
    record = launch(body, [source, target], block=128, timing=True).record
    table = chip_table("sm_100a").but(l2_own_bytes=4, gpcs=8)

    def copied(sharers):
        """Cycles of the copy of 512 bytes that so many multiprocessors read."""
        ranges = [(0, 1 << 62, sharers, False)] if sharers else ()
        times = guessed(record, chip=table, ranges=ranges, timeline=True)
        (cycles,) = (i[5] - i[4] for i in times.intervals if timeline.TRACKS[i[0]] == "copies in")
        return cycles - table.numbers["tma_latency"].value

    # Neighbours go to one GPC each; of 16, two lie in each; where all do, the multiprocessor's own way is the narrower.
    expected = {1: 512 / 4, 8: 512 / 4, 16: 512 / 8, 148: 512 / 70, None: 512 / 70}
    assert {sharers: copied(sharers) for sharers in expected} == pytest.approx(expected)


def test_what_was_recorded_is_replayed_and_nothing_else():
    source, target = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    body = ROUND_TRIP.format(expected=512, wait=WAIT, fence="fence.proxy.async.shared::cta;")
    report = launch(body, [source, target], block=128, timing=True)
    times = guessed(report.record)
    assert times.instructions == sum(warp.executed for warp in report.record.warps)
    assert times.untied == (0, 0)
    assert times.busy["smem"] * 128 == pytest.approx(512 + 512 + 2 * 4 * 128 * 1, rel=0.2)
    assert guessed(report.record).cycles == times.cycles  # the same from the same


def test_timing_needs_a_record():
    gpu = Emulated("sm_100a", sms=1)
    gpu.launch(entry("", 0), "test", grid=1, block=32)
    with pytest.raises(ValueError, match="timing=True"):
        gpu.timing()


def test_timing_reports_and_draws(tmp_path):
    gpu = Emulated("sm_100a", sms=1, timing=True, checks=Checks(poison=False))
    gpu.launch(entry("ld.shared.b32 %r4, [%r2]; bar.sync 0;", 0), "test", grid=1, block=64, smem_bytes=4096)
    timing = gpu.timing(timeline=True)
    assert "predicted" in str(timing) and timing.cycles > 0
    assert timeline.write(tmp_path / "t.json", timing.launches) > 0


def test_numbers_say_where_they_come_from():
    from warpcheck.timing import _replay

    assert all(table in GPUS.values() for table in TABLES.values())
    for table in GPUS.values():
        assert set(table.numbers) == set(_replay.CHIP_NUMBERS)
        for name, number in table.numbers.items():
            assert number.sure in "ABC" and number.source, name
            assert not number.open or number.sure == "C", f"{name} is fitted, so not sure"
    with pytest.raises(ValueError, match="sm_80"):
        chip_table("sm_80")
    with pytest.raises(ValueError, match="smem_byte"):
        chip_table("sm_100a").but(smem_byte=1)


def test_grid_costs_are_recovered_from_samples():
    cost = CtaCost(1000, 300, 4000)
    samples = [Sample(t, f, cost.cycles(t, f)) for t, f in ((1, 1e6), (1, 4e6), (2, 3e6), (3, 9e6))]
    found = CtaCost.fitted(samples)
    assert (found.start, found.tile, found.rate) == pytest.approx((1000, 300, 4000))
    with pytest.raises(ValueError, match="same FLOPs"):
        CtaCost.fitted(samples[:1] * 2)


def test_what_a_tile_takes_does_not_depend_on_who_got_which():
    """Causal tiles on two SMs that were not evenly loaded. Where the makespan stood for what an SM did, 7 % more than
    that, a step of the backward of (192, 128) took 20 % more than its CTAs did: more than a deterministic one."""
    cost = CtaCost(100, 0, 2)

    def launch(*by_sm):
        ends, flops = {}, 0
        for tiles in by_sm:
            now = 0.0
            for work in tiles:
                ends[len(ends)] = now, now + cost.cycles(1, work)
                now, flops = ends[len(ends) - 1][1] + 50, flops + work
        return SimpleNamespace(sms=len(by_sm), ends=ends, flops=flops)

    launches = launch((800, 400, 200), (600,)), launch((1600, 1200), (1400, 1000, 800, 600, 400, 200))
    found = CtaCost.of_each([Sample.of(times, len(times.ends) // 2) for times in launches])
    assert (found.start, found.tile, found.rate) == pytest.approx((100, 0, 2))


def test_tile_schedulers_by_hand():
    cost = CtaCost(10, 0, 1)
    tiles = [8, 1, 1, 1, 1, 1, 1, 1, 1]
    assert makespan(tiles, 2, cost, TileScheduler.STATIC, 0) == 10 + 8 + 4
    assert makespan(tiles, 2, cost, TileScheduler.DYNAMIC, 0) == 10 + 8
    assert makespan([8, 8, 8], 2, cost, TileScheduler.PER_CTA, 5) == 2 * 18 + 5


def test_ctas_that_share_multiprocessors_by_hand():
    cost = CtaCost(start=0, tile=0, rate=1)
    # Three tiles on one multiprocessor of two CTAs: two at a time, then the third alone, 1.5 times as fast.
    assert shared_makespan([60, 60, 60], 1, 2, cost, 1.5) == pytest.approx(60 + 60 / 1.5)
    # Both CTAs of a launch get a multiprocessor first; a third one is the second of the first.
    assert shared_makespan([60, 60], 2, 2, cost, 1.5) == pytest.approx(40)
    assert shared_makespan([60, 60, 60], 2, 2, cost, 1.0) == pytest.approx(60)
    # One CTA at a time: as `makespan`.
    tiles = [8, 1, 1, 1, 1, 1, 1, 1, 1]
    assert shared_makespan(tiles, 2, 1, CtaCost(10, 3, 1), 1.0) == makespan(
        tiles, 2, CtaCost(10, 3, 1), TileScheduler.DYNAMIC, 0
    )


def test_tiles_that_add_in_a_fixed_order_by_hand():
    cost = CtaCost(start=10, tile=0, rate=1)
    rows = range(3)
    # One after the other: two starts, six rows of 100 cycles, and 5 between them.
    assert ordered_makespan([(0, rows), (0, rows)], 1, cost, 100, 20, 5) == 10 + 300 + 5 + 10 + 300
    # Side by side on one sum the second is one interval behind the first, and no further: 20 < 100.
    assert ordered_makespan([(0, rows), (0, rows)], 2, cost, 100, 20, 5) == 10 + 300 + 20
    # An interval longer than a row's cycles: the second stays one interval behind.
    assert ordered_makespan([(0, rows), (0, rows)], 2, cost, 100, 150, 5) == 10 + 300 + 150
    # Different sums do not wait for each other.
    assert ordered_makespan([(0, rows), (1, rows)], 2, cost, 100, 20, 5) == 310


def test_an_instruction_that_the_compiler_merged_with_one_of_another_branch_is_replayed():
    """One warp passes the other's machine instruction alone, and each waits for both."""
    body = """
    setp.lt.u32 %p0, %r0, 32;
    @%p0 bra FIRST;
    add.u32 %r3, %r0, 1;
    bar.sync 1, 64;
    bra DONE;
FIRST:
    add.u32 %r3, %r0, 2;
    bar.sync 1, 64;
DONE:
"""
    record = launch(body, [], block=64, timing=True).record
    issue, instruction, carries = issue_of(record, guess=True), 10, 11  # columns, see core/replay.hpp
    first, second = (i for i, x in enumerate(record.kernel.instructions) if x.opcode == "bar.sync")
    slots = issue.slots.copy()
    slots[(slots[:, instruction] == second) & (slots[:, carries] == 1), instruction] = -1
    slots[slots[:, instruction] == first, instruction] = second
    times = replay(record, replace(issue, slots=slots))
    assert times.untied[0] > 0
    assert times.cycles == pytest.approx(guessed(record).cycles, rel=0.5)


def test_an_effect_under_a_predicate_is_not_replayed_in_a_passage_that_skipped_it():
    """The compiler replaced the branch around the first barrier by a predicate: from the second iteration on, the warps
    meet at it first."""
    body = """
    mov.u32 %r3, 0;
    setp.ge.u32 %p0, %r0, 32;
    @%p0 bra SECOND;
FIRST:
    setp.eq.u32 %p1, %r3, 0;
    @%p1 bra JOINED;
    bar.sync 1, 64;
JOINED:
    bar.sync 2, 64;
    add.u32 %r3, %r3, 1;
    setp.ne.u32 %p2, %r3, 3;
    @%p2 bra FIRST;
    bra DONE;
SECOND:
    bar.sync 2, 64;
    add.u32 %r3, %r3, 1;
    setp.eq.u32 %p2, %r3, 3;
    @%p2 bra DONE;
    bar.sync 1, 64;
    bra SECOND;
DONE:
"""
    record = launch(body, [], block=64, timing=True).record
    issue, instruction, carries = issue_of(record, guess=True), 10, 11  # columns, see core/replay.hpp
    first = next(i for i, x in enumerate(record.kernel.instructions) if x.opcode == "bar.sync")
    slots, blocks = issue.slots.copy(), issue.blocks.copy()
    slots[slots[:, instruction] == first, carries] = 2
    own = next(b for b, (begin, end, *_) in enumerate(blocks) if begin <= first < end)
    blocks[own, 3] -= 1
    blocks[own + 1, 2] -= 1
    times = replay(record, replace(issue, slots=slots, blocks=blocks))
    assert times.untied == (0, 0)
    assert times.cycles == pytest.approx(guessed(record).cycles, rel=0.1)
