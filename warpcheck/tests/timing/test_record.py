"""What the machine writes down for the clock, on hand-written PTX."""

import numpy as np
import pytest
from warpcheck.machine import EmulationOptions
from warpcheck.machine.record import EVENTS, KINDS
from warpcheck.timing.code import issue_of
from warpcheck.timing.replay import replay
from warpcheck_cases.handwritten import ROUND_TRIP, WAIT, launch


def recorded(body, arrays, **options):
    report = launch(body, arrays, timing=True, **options)
    return report, report.record


def events(record, kind):
    """The values of all events of a kind, by name."""
    names = EVENTS[KINDS[kind]][1:]
    return [
        dict(zip(names, map(int, row[2:]))) for warp in record.warps for row in warp.events if row[1] == KINDS[kind]
    ]


def copy_in_and_out():
    source, target = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    body = ROUND_TRIP.format(expected=512, wait=WAIT, fence="fence.proxy.async.shared::cta;")
    return (*recorded(body, [source, target], block=128), source, target)


def test_every_executed_instruction_is_recorded_once():
    report, record, *_ = copy_in_and_out()
    waited = len(events(record, "named")) - report.instructions["bar.sync"]  # those the machine stepped over
    assert sum(warp.executed for warp in record.warps) == report.warp_instructions + waited
    for warp in record.warps:
        assert warp.runs[:, 1].sum() == warp.executed
        assert record.instructions[warp.runs[:, 0]].max() < len(record.kernel.instructions)


def test_a_copy_and_the_barrier_that_hears_of_it():
    _, record, source, target = copy_in_and_out()
    (init,), (arrival,), (load,), (store,) = (events(record, kind) for kind in ("init", "arrive", "load", "store"))
    assert init["arrivals"] == arrival["arrivals"] == 1
    assert init["barrier"] == arrival["barrier"] == load["barrier"]
    assert arrival["bytes"] == load["bytes"] == store["bytes"] == 512
    assert load["address"] == source.ctypes.data and store["address"] == target.ctypes.data


def test_a_wait_is_recorded_once_however_long_it_takes():
    _, record, *_ = copy_in_and_out()
    waits = [int(w.events[:, 1].tolist().count(KINDS["wait"])) for w in record.warps]
    assert waits == [1, 1, 1, 1]
    assert {wait["phases"] for wait in events(record, "wait")} == {1}


def test_a_loop_of_tests_of_a_barrier_is_recorded_as_one_wait():
    """How often the emulation looks at the barrier is no fact of a chip."""
    body = """
        setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [%r2], 1;
        bar.sync 0;
        shr.u32 %r4, %r0, 5; setp.eq.u32 %p2, %r4, 0;
        @%p2 bra LOOP;
        mov.u32 %r5, 0;
    BUSY: add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 500; @%p3 bra BUSY;
        setp.eq.u32 %p4, %r0, 32;
        @%p4 mbarrier.arrive.shared.b64 %d0, [%r2];
        bra DONE;
    LOOP: mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra LOOP;
    DONE:
    """
    _, record = recorded(body, [], block=64)
    (wait,) = events(record, "wait")
    assert wait["phases"] == 1
    waiting = next(warp for warp in record.warps if warp.warp == 0)
    assert waiting.executed < 20


def test_named_barriers_are_recorded_though_the_machine_steps_over_them():
    _, record, *_ = copy_in_and_out()
    assert len(events(record, "named")) == 8  # two by each of four warps


# Each lane copies a word, and the barrier at the start of shared memory has 32 arrivals a phase.
COPIES = """
    setp.ne.u32 %p0, %r0, 0;
    @!%p0 mbarrier.init.shared.b64 [%r2], 32;
    bar.sync 0;
    mul.wide.u32 %d0, %r0, 4; add.u64 %d0, %a0, %d0;
    shl.b32 %r4, %r0, 2; add.u32 %r4, %r4, %r2;
    cp.async.ca.shared.global [%r4+128], [%d0], 4;
    cp.async.mbarrier.arrive{noinc}.shared.b64 [%r2];
    {more}
"""


@pytest.mark.parametrize(
    ("noinc", "added", "more"), [(".noinc", 0, ""), ("", 32, "mbarrier.arrive.shared.b64 %d1, [%r2];")]
)
def test_copies_of_threads_arrive_when_they_are_done(noinc, added, more):
    body = COPIES.format(noinc=noinc, more=more) + WAIT
    _, record = recorded(body, [np.arange(32, dtype=np.uint32)])
    (arrival,), (init,) = events(record, "copy_arrive"), events(record, "init")
    assert arrival == {"cta": 0, "barrier": init["barrier"], "arrivals": 32, "added": added}
    times = replay(record, issue_of(record, guess=True))
    (cycles,) = (
        waited for (_, at), waited in times.waited.items() if "try_wait" in record.kernel.instructions[at].opcode
    )
    assert cycles > times.chip.numbers["l2_latency"].value / 2  # the copies were on their way


@pytest.mark.parametrize(("stride", "passes"), [(4, 1), (8, 2), (128, 32), (0, 1)])
def test_bank_conflicts_are_counted(stride, passes):
    body = (
        f"mul.lo.u32 %r4, %r0, {stride}; add.u32 %r4, %r4, %r2; st.shared.b32 [%r4], {'%r2' if not stride else '%r4'};"
    )
    _, record = recorded(body, [], smem=4096)
    assert [e["passes"] for e in events(record, "shared")] == [passes]


def test_sectors_of_global_accesses_are_counted():
    room = np.zeros(32 * 16 + 8, np.uint32)
    source = room[-(room.ctypes.data // 4) % 8 :][: 32 * 16]  # begins with a sector
    body = "mul.wide.u32 %d0, %r0, {}; add.u64 %d0, %d0, %a0; ld.global.b32 %r5, [%d0];"
    for stride, sectors in ((4, 4), (32, 32), (64, 32)):
        _, record = recorded(body.format(stride), [source])
        assert [e["sectors"] for e in events(record, "global")] == [sectors]


def test_without_timing_nothing_is_recorded():
    assert launch("", []).record is None


def test_other_schedules_are_refused():
    with pytest.raises(ValueError, match="round_robin"):
        EmulationOptions(timing=True, schedule="random")
