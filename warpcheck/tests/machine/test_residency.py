"""A launch guarantees one resident CTA, or cluster: what needs more is told, also where more happen to be resident."""

import re

import numpy as np
import pytest
from warpcheck.emulated import Emulated
from warpcheck.errors import CoResidency, Deadlock, EmulationError, LaunchRefused
from warpcheck.machine import SCHEDULES, Checks, EmulationOptions
from warpcheck_cases.handwritten import entry, launch

N = 6  # CTAs
ONE = "setp.ne.u32 %p0, %r0, 0; @%p0 bra DONE;"  # thread, of every CTA
SPIN = "ld.acquire.gpu.global.u32 %r10, [%d1];"

# Every CTA adds to N sums, in its own order or in one common order, and waits at each for its order index, as a
# deterministic backward that adds to dQ. %r4: step; %r5: sum; %r6: order index.
ORDERED_SUMS = f"""{ONE}
    mov.u32 %r4, 0;
    STEP:
    WHICH
    mul.wide.u32 %d0, %r5, 4;
    add.u64 %d1, %a0, %d0;
    WAIT: POLL
    setp.ne.u32 %p1, %r10, %r6;
    @%p1 bra WAIT;
    add.u64 %d2, %a1, %d0;
    ld.relaxed.gpu.global.u32 %r11, [%d2];
    mad.lo.u32 %r11, %r11, 10, %r1;
    st.relaxed.gpu.global.u32 [%d2], %r11;
    red.release.gpu.global.add.u32 [%d1], 1;
    add.u32 %r4, %r4, 1;
    setp.lt.u32 %p2, %r4, {N};
    @%p2 bra STEP;
    DONE:"""
IN_LAUNCH_ORDER = "mov.u32 %r5, %r4; mov.u32 %r6, %r1;"
# CTA p begins at sum p, modulo N: at step s its order index is s, so that CTA p waits for CTA p + 1.
ROTATED = f"add.u32 %r5, %r4, %r1; rem.u32 %r5, %r5, {N}; mov.u32 %r6, %r4;"


def ordered_sums(which: str, poll: str = SPIN) -> str:
    return ORDERED_SUMS.replace("WHICH", which).replace("POLL", poll)


def run(body: str, **options) -> tuple[list[int], list]:
    """The sums, and what was found."""
    options = {"grid": N, "sms": N, "resident": 1, "on_finding": "collect", **options}
    sums = np.zeros(N, np.uint32)
    report = launch(body, [np.zeros(N, np.uint32), sums], **options)
    return sums.tolist(), list(report.findings)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("resident", [1, 2, N - 1])
def test_a_ring_of_waits_needs_all_ctas(schedule: str, resident: int, seed: int) -> None:
    sums, found = run(ordered_sums(ROTATED), resident=resident, schedule=schedule, seed=seed)
    assert {finding.kind for finding in found} == {"co-residency"}, f"seed {seed}: {found}"
    assert sums == [int("".join(str((i - step) % N) for step in range(N))) for i in range(N)], "the run goes on"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("resident", [0, 1, 2, N - 1])
def test_waits_for_lower_indices_need_none(schedule: str, resident: int, seed: int) -> None:
    sums, found = run(ordered_sums(IN_LAUNCH_ORDER), resident=resident, schedule=schedule, seed=seed)
    assert not found, f"seed {seed}: {found}"
    assert sums == [12345] * N


def test_all_resident_nothing_is_told(seed: int) -> None:
    assert not run(ordered_sums(ROTATED), resident=0, seed=seed)[1]
    assert not run(ordered_sums(ROTATED), resident=N, seed=seed)[1]


def test_a_chip_that_is_full_is_one_more_limit(seed: int) -> None:
    """Two multiprocessors, each with room for one CTA."""
    found = run(ordered_sums(ROTATED), resident=0, sms=2, smem=200_000, seed=seed)[1]
    assert {finding.kind for finding in found} == {"co-residency"}


def test_who_waits_for_what() -> None:
    with pytest.raises(CoResidency) as caught:
        run(ordered_sums(ROTATED), on_finding="raise")
    error = caught.value
    assert isinstance(error, Deadlock)
    assert error.message == (
        "CTA 0 waits for array 0 + 4, which only CTAs 1 to 5 of 6 CTAs would change, which had not started"
    )
    assert error.location.cta == (0, 0, 0) and error.location.ptx_text.startswith("ld.acquire.gpu.global.u32")
    (sentence, writer), *_ = error.others
    assert sentence == "it was changed by" and writer.cta == (1, 0, 0) and writer.ptx_text.startswith("red.release")
    assert "lower launch index" in error.finding.repair and "cooperatively" in error.finding.repair


def test_all_that_wait_are_named() -> None:
    error = run(ordered_sums(ROTATED), resident=3)[1][0].error
    assert "CTAs 3 to 5 of 6 CTAs" in error.message
    waiting = {place.cta[0] for sentence, place in error.others if sentence.startswith("waits as well, for array 0")}
    assert waiting | {error.location.cta[0]} == {0, 1, 2}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "poll",
    [
        f"{SPIN} nanosleep.u32 40;",
        "ld.volatile.global.u32 %r10, [%d1];",
        "ld.global.u32 %r10, [%d1];",
        "atom.acquire.gpu.global.add.u32 %r10, [%d1], 0;",
        "atom.acquire.gpu.global.cas.b32 %r10, [%d1], 77, 78; ld.relaxed.gpu.global.u32 %r12, [%a0];",
    ],
)  # fmt: skip
def test_however_it_polls(poll: str, schedule: str, seed: int) -> None:
    found = run(ordered_sums(ROTATED, poll), schedule=schedule, seed=seed, checks=Checks(races=False))[1]
    assert {finding.kind for finding in found} == {"co-residency"}, f"seed {seed}: {found}"


def test_what_nobody_changes_is_a_deadlock() -> None:
    """More CTAs do not help: the wait for turn 77 ends never."""
    for resident in (0, 1, 2):
        with pytest.raises(Deadlock, match="polls array 0 \\+ 0, which nobody changes") as caught:
            run(ordered_sums("mov.u32 %r5, 0; mov.u32 %r6, 77;"), resident=resident, on_finding="raise")
        assert not isinstance(caught.value, CoResidency)


def test_a_barrier_within_a_cta_is_a_deadlock() -> None:
    body = f"setp.ne.u32 %p0, %r0, 0; @!%p0 mbarrier.init.shared.b64 [%r2], 2; bar.sync 0; {ONE} \
        W: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra W; DONE:"
    with pytest.raises(Deadlock, match="2 of 2 arrivals missing") as caught:
        run(body, on_finding="raise")
    assert not isinstance(caught.value, CoResidency)


# CTA 2j waits for CTA 2j + 1.
PAIRS = f"""{ONE}
    shr.u32 %r4, %r1, 1;
    mul.wide.u32 %d0, %r4, 4;
    add.u64 %d1, %a0, %d0;
    and.b32 %r5, %r1, 1;
    setp.eq.u32 %p1, %r5, 1;
    @%p1 bra GIVE;
    WAIT: {SPIN}
    setp.eq.u32 %p2, %r10, 0;
    @%p2 bra WAIT;
    bra DONE;
    GIVE: st.release.gpu.global.u32 [%d1], 1;
    DONE:"""


def test_a_cluster_is_resident_as_a_whole(seed: int) -> None:
    assert {finding.kind for finding in run(PAIRS, seed=seed)[1]} == {"co-residency"}
    assert not run(PAIRS, resident=2, seed=seed)[1]
    assert not run(PAIRS, cluster=2, seed=seed)[1]
    of_clusters = re.sub(r"%r1\b", "%r13", ordered_sums(ROTATED))
    of_clusters = f"and.b32 %r14, %r1, 1; setp.eq.u32 %p3, %r14, 1; @%p3 bra DONE; shr.u32 %r13, %r1, 1; {of_clusters}"
    found = run(of_clusters, grid=2 * N, cluster=2, sms=2 * N, seed=seed, checks=Checks(races=False))[1]
    assert found and "clusters 1 to 5 of 6 clusters" in found[0].message


def test_a_cooperative_launch_is_resident_as_a_whole(seed: int) -> None:
    assert not run(ordered_sums(ROTATED), cooperative=True, seed=seed)[1]
    with pytest.raises(LaunchRefused, match="cooperative launch of 6 CTAs; at most 2 are resident"):
        run(ordered_sums(ROTATED), cooperative=True, sms=2, smem=200_000, on_finding="raise")
    sums = np.zeros(N, np.uint32)
    chip = Emulated("sm_100a", sms=N, resident=1)
    args = [np.zeros(N, np.uint32), sums]
    chip.launch(entry(ordered_sums(ROTATED), 2), grid=N, block=32, smem_bytes=64, args=args, cooperative=True)
    assert sums.all()


# CTAs that stay take tiles from a counter, and wait for the tile before.
PERSISTENT = f"""{ONE}
    NEXT: atom.relaxed.gpu.global.add.u32 %r4, [%a0], 1;
    setp.ge.u32 %p1, %r4, 20;
    @%p1 bra DONE;
    add.u64 %d1, %a0, 4;
    WAIT: {SPIN}
    setp.ne.u32 %p2, %r10, %r4;
    @%p2 bra WAIT;
    red.release.gpu.global.add.u32 [%d1], 1;
    bra NEXT;
    DONE:"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("resident", [0, 1, 3])
def test_tiles_from_a_counter_need_none(resident: int, schedule: str, seed: int) -> None:
    assert not run(PERSISTENT, resident=resident, schedule=schedule, seed=seed)[1]


def test_it_can_be_switched_off(seed: int) -> None:
    assert not run(ordered_sums(ROTATED), seed=seed, checks=Checks(off={"co-residency"}))[1]
    sums, _ = run(ordered_sums(ROTATED), seed=seed, checks=Checks(off={"co-residency"}), on_finding="raise")
    assert all(sums)


def test_orders_with_an_odd_seed_run_one_at_a_time() -> None:
    assert [EmulationOptions(seed=seed).resident_limit for seed in range(4)] == [0, 1, 0, 1]
    assert [EmulationOptions(seed=1, resident=k).resident_limit for k in (0, 1, 5)] == [0, 1, 5]
    assert EmulationOptions(seed=1, timing=True).resident_limit == 0
    for seed in range(4):  # any two orders have one
        chip = Emulated("sm_100a", sms=N, seed=seed, seeds=2, on_finding="collect")
        chip.launch(entry(ordered_sums(ROTATED), 2), grid=N, block=32, smem_bytes=64, args=[np.zeros(N, np.uint32)] * 2)
        assert "co-residency" in {finding.kind for finding in chip.findings}
    with pytest.raises(EmulationError):
        Emulated("sm_100a", sms=N, resident=1).launch(
            entry(ordered_sums(ROTATED), 2), grid=N, block=32, smem_bytes=64, args=[np.zeros(N, np.uint32)] * 2
        )


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="resident is -1, expected at least 1, or 0"):
        Emulated("sm_100a", resident=-1)
    with pytest.raises(ValueError, match="resident is 2, expected None or 0 with timing"):
        Emulated("sm_100a", resident=2, timing=True)
