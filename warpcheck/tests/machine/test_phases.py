"""Phases that end well in one order and not in others are told in every order, and what is ordered is not."""

import pytest
from warpcheck.machine import SCHEDULES, Checks
from warpcheck_cases.handwritten import data_and_map, launch

FULL, FREE = "%r2+2048", "%r2+2056"
ORDERS = pytest.mark.parametrize("schedule, seed", [(schedule, seed) for schedule in SCHEDULES for seed in range(3)])


def init(full: int, free: int = 1) -> str:
    return f"""setp.ne.u32 %p0, %r0, 0; @!%p0 mbarrier.init.shared.b64 [{FULL}], {full};
        @!%p0 mbarrier.init.shared.b64 [{FREE}], {free}; fence.mbarrier_init.release.cluster; bar.sync 0;"""


def wait(barrier: str, parity: str | int, label: str) -> str:
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p1, [{barrier}], {parity}; @!%p1 bra {label};"


def copy(half: int) -> str:
    to, source = f"%r2+{64 * half}", f"%a0+{64 * half}"
    return f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{to}], [{source}], 64, [{FULL}];"


EXPECT = f"mbarrier.expect_tx.relaxed.cta.shared.b64 [{FULL}], 64;"
ARRIVE, RELAXED = (f"mbarrier.arrive{how}.shared.b64 _, [{FULL}];" for how in ("", ".relaxed.cta"))
ARRIVE_EXPECT = f"mbarrier.arrive.expect_tx.shared.b64 _, [{FULL}], 64;"
# Threads 0 and 32 expect bytes, copy and arrive; then all wait for phase 0. name -> both parts, whether it is right
EXPECTED = {
    "before the arrival": (f"{EXPECT} {copy(0)} {copy(1)} {ARRIVE_EXPECT}", "", True),
    "before a relaxed arrival": (f"{EXPECT} {copy(0)} {RELAXED}", "", True),
    "after the copy": (f"{copy(0)} {EXPECT} {ARRIVE}", "", True),
    "both, then the copies": (f"{ARRIVE_EXPECT} {EXPECT} {copy(0)} {copy(1)}", "", True),
    "between the copies": (f"{ARRIVE_EXPECT} {copy(0)} {EXPECT} {copy(1)}", "", False),
    "before the other's arrival": (f"{EXPECT} {copy(0)} bar.sync 1, 64;", f"bar.sync 1, 64; {ARRIVE}", True),
    "beside the other's arrival": (f"{EXPECT} {copy(0)}", ARRIVE, False),
    "beside bytes that the other copies": (f"{EXPECT} {copy(0)}", f"{ARRIVE_EXPECT} {copy(1)}", False),
}  # fmt: skip


@ORDERS
@pytest.mark.parametrize("name", [name for name, (*_, right) in EXPECTED.items() if right])
def test_bytes_that_are_expected_in_time(name: str, schedule: str, seed: int) -> None:
    first, second, _ = EXPECTED[name]
    body = f"""{init(1)} setp.ge.u32 %p2, %r0, 32; @%p2 bra OTHER; BARRIER_0 @%p0 bra WAIT; {first} bra WAIT;
        OTHER: BARRIER_1 setp.ne.u32 %p3, %r0, 32; @%p3 bra WAIT; {second} {wait(FULL, 0, "WAIT")}"""
    for number, part in enumerate((first, second)):  # all lanes of a warp reach its named barrier
        if "bar.sync 1, 64;" in part:
            before, after = part.split("bar.sync 1, 64;")
            leader = "setp.eq.u32 %p4, %r0, 0;" if number == 0 else "setp.eq.u32 %p4, %r0, 32;"
            skipped = f"@!%p4 bra S{number}; {before} S{number}: bar.sync 1, 64;"
            body = body.replace(part, after, 1).replace(f"BARRIER_{number}", f"{leader} {skipped}")
    body = body.replace("BARRIER_0", "").replace("BARRIER_1", "")
    given = {"block": 64, "schedule": schedule, "seed": seed, "on_finding": "collect", "max_instructions": 100_000}
    assert not launch(body, data_and_map(), **given).findings


@pytest.mark.parametrize("name", [name for name, (*_, right) in EXPECTED.items() if not right])
def test_a_late_expect_tx_is_told_where_it_is_in_time(name: str) -> None:
    """In an order in which the phase has ended before it, it counts for the next phase."""
    first, second, _ = EXPECTED[name]
    body = f"""{init(1)} setp.ge.u32 %p2, %r0, 32; @%p2 bra OTHER; @%p0 bra DONE; {first} bra DONE;
        OTHER: setp.ne.u32 %p3, %r0, 32; @%p3 bra DONE; mov.u32 %r5, 0;
        BUSY: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 99; @%p2 bra BUSY; {second} DONE: bar.sync 0;"""
    for seed in range(5):
        found = launch(body, data_and_map(), block=64, seed=seed, on_finding="collect").findings
        (finding,) = (finding for finding in found if finding.kind == "early-phase")
        assert finding.location.ptx_text.startswith("mbarrier.expect_tx") and "arrive.expect_tx" in finding.repair


# Warp 0 fills a slot four times and waits until it is free; warps 1 and 2 wait for it. GIVE_1 and GIVE_2: what they do
# then. FILL: the filling.
RING = f"""INIT setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUME; mov.u32 %r5, 0; mov.u32 %r6, 1;
    PRODUCE: {wait(FREE, "%r6", "WAIT_FREE")} FILL xor.b32 %r6, %r6, 1;
    add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 4; @%p2 bra PRODUCE; bra DONE;
    CONSUME: mov.u32 %r5, 0; mov.u32 %r6, 0;
    AGAIN: {wait(FULL, "%r6", "WAIT_FULL")} setp.ge.u32 %p3, %r0, 64; @%p3 bra THIRD; GIVE_1 bra GIVEN;
    THIRD: GIVE_2 GIVEN: xor.b32 %r6, %r6, 1; add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 4; @%p2 bra AGAIN; DONE:"""
FREES, FREES_RELAXED = (f"mbarrier.arrive{how}.shared.b64 _, [{FREE}];" for how in ("", ".relaxed.cta"))
FREES_ONE = f"setp.eq.u32 %p4, %r0, 32; @%p4 {FREES}"
FILLED = f"mbarrier.arrive.shared.b64 _, [{FULL}];"
COPIED = f"@!%p0 {ARRIVE_EXPECT} @!%p0 {copy(0)}"
# name -> counts, filling, what warp 1 and warp 2 do, whether it is right
RINGS = {
    "both give back": ((32, 64), FILLED, FREES, FREES, True),
    "both give back, relaxed": ((32, 64), FILLED, FREES_RELAXED, FREES_RELAXED, True),
    "a barrier, then one lane": ((32, 1), FILLED, f"bar.sync 1, 64; {FREES_ONE}", "bar.sync 1, 64;", True),
    "a copy fills": ((1, 64), COPIED, FREES, FREES, True),
    "a copy fills, relaxed": ((1, 64), COPIED, FREES_RELAXED, FREES_RELAXED, True),
    "one gives back": ((32, 32), FILLED, FREES, "", False),
    "one lane gives back without a barrier": ((32, 1), FILLED, FREES_ONE, "", False),
    "one gives back to a copy": ((1, 32), COPIED, FREES, "", False),
}  # fmt: skip


@ORDERS
@pytest.mark.parametrize("counts, fill, first, second, right", RINGS.values(), ids=RINGS)
def test_waits_in_a_ring(counts, fill, first, second, right, schedule: str, seed: int) -> None:
    body = RING.replace("INIT", init(*counts)).replace("FILL", fill, 1)
    body = body.replace("GIVE_1", first).replace("GIVE_2", second)
    given = {"block": 96, "schedule": schedule, "seed": seed, "on_finding": "collect", "max_instructions": 100_000}
    found = launch(body, data_and_map(), **given).findings
    if right:
        assert {finding.kind for finding in found} <= ({"relaxed-arrival"} if FREES_RELAXED in first else set())
        return
    # A warp that is late in this order waits for ever.
    told = {"lapped-wait"} if schedule == "round_robin" else {"lapped-wait", "deadlock"}
    assert {finding.kind for finding in found} & told
    assert {finding.kind for finding in found} <= {"lapped-wait", "deadlock"}
    for finding in found:
        if finding.kind == "lapped-wait":
            assert finding.location.warp == 2 and "the last arrival" in finding.others[0][0]


def test_the_bytes_of_a_copy_may_be_what_comes_after_a_wait() -> None:
    """Warp 3 arrives for both phases at once; the copies of warp 0 come after the waits."""
    body = f"""{init(1, 32)} setp.ge.u32 %p2, %r0, 64; @%p2 bra EXPECT; setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUME;
        @%p0 bra DONE; {copy(0)} {wait(FREE, 0, "W0")} {copy(0)} bra DONE;
        CONSUME: {wait(FULL, 0, "W1")} {FREES} {wait(FULL, 1, "W2")} bra DONE;
        EXPECT: setp.ne.u32 %p3, %r0, 64; @%p3 bra DONE; {ARRIVE_EXPECT} {wait(FULL, 0, "W3")} {ARRIVE_EXPECT}
        DONE:"""
    for schedule in SCHEDULES:
        assert not launch(body, data_and_map(), block=96, schedule=schedule, on_finding="collect").findings


def test_the_scope_of_a_wait_is_a_letter_on_request() -> None:
    body = """setp.ne.u32 %p0, %r0, 0; @!%p0 mbarrier.init.shared.b64 [%r2+2048], 32;
        fence.mbarrier_init.release.cluster; barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
        mov.u32 %r3, %cluster_ctarank; xor.b32 %r3, %r3, STEP; add.u32 %r4, %r2, 2048;
        mapa.shared::cluster.u32 %r5, %r4, %r3; mbarrier.arriveRELEASE.shared::cluster.b64 _, [%r5];
        W: mbarrier.try_wait.parityACQUIRE.shared.b64 %p1, [%r2+2048], 0; @!%p1 bra W;
        barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"""
    wide, acquire = ".release.cluster", ".acquire.cluster"
    for step, release, acquires, told in (
        (1, wide, acquire, None), (0, "", "", None), (1, wide, "", "the wait"), (1, "", acquire, "the arrival"),
    ):  # fmt: skip
        text = body.replace("STEP", str(step)).replace("RELEASE", release).replace("ACQUIRE", acquires)
        given = {"grid": 2, "cluster": 2, "on_finding": "collect"}
        assert not launch(text, **given).findings
        found = launch(text, checks=Checks(letter=True), **given).findings
        assert [finding.kind for finding in found] == ["wait-scope"] * (told is not None)
        assert told is None or found[0].message.startswith(told)
