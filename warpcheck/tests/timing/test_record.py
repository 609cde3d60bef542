"""What the machine writes down for the clock, on hand-written PTX."""

import numpy as np
import pytest
from warpcheck.machine import EmulationOptions
from warpcheck.machine.record import EVENTS, KINDS
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


def test_named_barriers_are_recorded_though_the_machine_steps_over_them():
    _, record, *_ = copy_in_and_out()
    assert len(events(record, "named")) == 8  # two by each of four warps


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
