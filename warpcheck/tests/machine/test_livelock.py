"""No launch runs for ever: polls give way to others, and what still does not end is over its budget."""

import signal
import threading
import time
from itertools import product

import numpy as np
import pytest
from warpcheck.emulated import Emulated
from warpcheck.errors import Deadlock, Livelock
from warpcheck.machine import SCHEDULES, Budget, Checks, EmulationOptions
from warpcheck_cases.handwritten import entry, launch

ONE = "setp.ne.u32 %p0, %r0, 0; @%p0 bra DONE;"  # thread, of every CTA
EVERY_ORDER = [(schedule, seed) for schedule in SCHEDULES for seed in range(6)]
orders = pytest.mark.parametrize("schedule, seed", EVERY_ORDER)

# CTA 0 waits until CTA 1 has set the flag at %a0.
FLAG = f"""{ONE} mov.u32 %r8, 0; setp.eq.u32 %p1, %r1, 1; @%p1 bra SET;
    WAIT: POLL
    setp.eq.u32 %p2, %r3, 0; @%p2 bra WAIT; bra DONE;
    SET: st.relaxed.gpu.global.b32 [%a0], 1;
    DONE:"""
STRONG = "ld.relaxed.gpu.global.b32 %r3, [%a0];"
TURNING = " ".join(f"ld.relaxed.gpu.global.b32 %r4, [%a0+{4 * i}];" for i in range(1, 40))
POLLS = {
    "nanosleep in the loop": f"{STRONG} nanosleep.u32 20;",
    "two flags": f"{STRONG} ld.relaxed.gpu.global.b32 %r4, [%a0+4];",
    "forty flags": STRONG + TURNING,
    "a counter of attempts": f"{STRONG} add.u32 %r8, %r8, 1;",
    "a counter in memory": f"{STRONG} red.relaxed.gpu.global.add.u32 [%a0+8], 1;",
    "a counter in shared memory": f"{STRONG} add.u32 %r8, %r8, 1; st.shared.b32 [%r2], %r8;",
    "a weak load": "ld.global.b32 %r3, [%a0];",
    "a weak load and a counter": "ld.global.b32 %r3, [%a0]; add.u32 %r8, %r8, 1;",
}


@orders
@pytest.mark.parametrize("poll", POLLS.values(), ids=POLLS)
def test_a_poll_lets_others_run(poll: str, schedule: str, seed: int) -> None:
    memory = np.zeros(64, np.uint32)
    report = launch(
        FLAG.replace("POLL", poll), [memory], grid=2, schedule=schedule, seed=seed, resident=0, on_finding="collect",
        max_instructions=3_000_000, checks=Checks(races=False),
    )  # fmt: skip
    assert not report.findings and memory[0] == 1


@orders
@pytest.mark.parametrize("wait", ["mbarrier.test_wait", "mbarrier.try_wait"])
def test_a_spin_on_two_barriers_lets_others_run(wait: str, schedule: str, seed: int) -> None:
    """Warp 0 polls two barriers in turn, with nanosleep between; warp 1 arrives at both."""
    body = f"""setp.ne.u32 %p0, %r0, 0; @!%p0 mbarrier.init.shared.b64 [%r2], 32;
        @!%p0 mbarrier.init.shared.b64 [%r2+8], 32; bar.sync 0; setp.ge.u32 %p3, %r0, 32; @%p3 bra ARRIVE;
        WAIT: {wait}.parity.shared.b64 %p1, [%r2], 0; nanosleep.u32 20;
        {wait}.parity.shared.b64 %p2, [%r2+8], 0; nanosleep.u32 20; and.pred %p1, %p1, %p2; @!%p1 bra WAIT; bra DONE;
        ARRIVE: mbarrier.arrive.shared.b64 _, [%r2]; MISSING
        DONE:"""
    given = {"block": 64, "schedule": schedule, "seed": seed, "max_instructions": 1_000_000}
    launch(body.replace("MISSING", "mbarrier.arrive.shared.b64 _, [%r2+8];"), **given)
    with pytest.raises(
        Deadlock, match="mbarrier at 0x408 of CTA 0 for the end of phase 0: 32 of 32 arrivals"
    ) as caught:
        launch(body.replace("MISSING", ""), **given)
    assert not isinstance(caught.value, Livelock)


WEAK = FLAG.replace("POLL", "ld.global.b32 %r3, [%a0];")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weak_spin_is_told_where_it_spins(schedule: str) -> None:
    found = [
        finding
        for body, seed in product((WEAK, WEAK.replace("%r1, 1;", "%r1, 0;")), range(3))
        for finding in launch(
            body, [np.zeros(1, np.uint32)], grid=2, schedule=schedule, seed=seed, resident=0, on_finding="collect"
        ).findings
    ]
    assert {finding.kind for finding in found} == {"race", "weak-poll"}
    spin = next(finding for finding in found if finding.kind == "weak-poll")
    assert "waits for array 0 + 0 to change" in spin.message and "ld.relaxed" in spin.repair


def test_weak_loads_that_wait_for_nobody_are_no_spin() -> None:
    """A loop that reads one word again and again, and a loop of weak loads that a strong load ends."""
    counted = (
        "mov.u32 %r8, 0; L: ld.global.b32 %r3, [%a0]; add.u32 %r8, %r8, 1; setp.lt.u32 %p1, %r8, 5000; @%p1 bra L;"
    )
    beside = FLAG.replace("POLL", f"ld.global.b32 %r9, [%a0+4]; {STRONG}")
    tried = """setp.ne.u32 %p0, %r0, 0; @!%p0 mbarrier.init.shared.b64 [%r2], 1; @!%p0 st.shared.b32 [%r2+16], 1;
        bar.sync 0; setp.ge.u32 %p2, %r0, 32; @%p2 bra ARRIVE;
        W: ld.shared.b32 %r3, [%r2+16]; mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra W; bra DONE;
        ARRIVE: setp.eq.u32 %p3, %r0, 32; @%p3 mbarrier.arrive.shared.b64 _, [%r2]; DONE:"""
    for schedule, seed in EVERY_ORDER:
        given = {"schedule": schedule, "seed": seed, "resident": 0}
        launch(counted, [np.zeros(1, np.uint32)], **given)
        launch(beside, [np.zeros(2, np.uint32)], grid=2, **given)
        launch(tried, block=64, **given)


def test_a_spin_on_shared_memory_that_nobody_changes_is_a_deadlock() -> None:
    body = f"{ONE} st.shared.b32 [%r2], 0; W: ld.shared.b32 %r3, [%r2]; setp.eq.u32 %p1, %r3, 0; @%p1 bra W; DONE:"
    with pytest.raises(Deadlock, match="polls shared memory at 0x400, which nobody changes"):
        launch(body, checks=Checks(races=False), max_instructions=100_000)


# Lane 0 swaps a word for ever; lane 32 waits for a value that never comes.
SWAPS = """setp.eq.u32 %p0, %r0, 0; @%p0 bra SWAP; setp.ne.u32 %p1, %r0, 32; @%p1 bra DONE;
    WAIT: ld.relaxed.gpu.global.b32 %r3, [%a0]; setp.ne.u32 %p1, %r3, 7; @%p1 bra WAIT; bra DONE;
    SWAP: atom.relaxed.gpu.global.xor.b32 %r4, [%a0], 1; bra SWAP; DONE:"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_launch_over_its_budget_lists_its_waits(schedule: str) -> None:
    given = {"block": 64, "schedule": schedule, "on_finding": "collect"}
    (found,) = launch(SWAPS, [np.zeros(1, np.uint32)], max_instructions=50_000, **given).findings
    assert found.kind == "livelock" and "did not end within 50000 warp instructions" in found.message
    assert {place.warp for _, place in found.others} == {0, 1}
    assert any("array 0 + 0" in text for text, place in found.others if place.warp == 1)
    (found,) = launch(SWAPS, [np.zeros(1, np.uint32)], max_seconds=0.3, **given).findings
    assert found.kind == "livelock" and "did not end within 0.3 s" in found.message


def test_later_orders_have_a_hundred_times_the_first() -> None:
    """CTA 0 swaps for ever if CTA 1 came first; in round_robin CTA 0 comes first."""
    body = f"""{ONE} setp.eq.u32 %p1, %r1, 1; @%p1 bra SET;
        SWAP: atom.relaxed.gpu.global.xor.b32 %r4, [%a0], 0x100; and.b32 %r4, %r4, 1; setp.eq.u32 %p1, %r4, 1;
        @%p1 bra SWAP; bra DONE;
        SET: atom.relaxed.gpu.global.or.b32 %r4, [%a0], 1; DONE:"""
    gpu = Emulated("sm_100a", seeds=9, resident=0, on_finding="collect")
    start = time.monotonic()
    gpu.launch(entry(body, 1), grid=2, block=32, smem_bytes=64, args=[np.zeros(1, np.uint32)])
    assert time.monotonic() - start < 60
    (found,) = gpu.findings
    assert found.kind == "livelock" and "1000000 warp instructions" in found.message
    assert Budget.after(50_000, 7.0) == Budget(5_000_000, 700.0)
    assert Budget().asked(EmulationOptions(max_seconds=5)) == Budget(10**10, 5)


def test_a_number_below_nothing_is_refused() -> None:
    for name in ("max_instructions", "max_seconds", "progress"):
        with pytest.raises(ValueError, match=f"{name} is -1, expected 0 or more"):
            EmulationOptions(**{name: -1})


def test_a_long_launch_says_how_far_it_is(capfd) -> None:
    with pytest.raises(Livelock):
        launch(SWAPS, [np.zeros(1, np.uint32)], block=64, max_seconds=0.8, progress=0.3)
    told = capfd.readouterr().err
    assert "warpcheck: test, seed 0, round_robin: " in told and "0 of 1 clusters have ended" in told
    with pytest.raises(Livelock):
        launch(SWAPS, [np.zeros(1, np.uint32)], block=64, max_seconds=0.4)
    assert not capfd.readouterr().err


def test_a_launch_can_be_interrupted() -> None:
    main = threading.get_ident()
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    # A process that a shell starts in the background ignores the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(SWAPS, [np.zeros(1, np.uint32)], block=64, max_seconds=20)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, handler)
