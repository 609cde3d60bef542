"""Programmatic dependent launch: what two grids share needs griddepcontrol.wait when the second may start early."""

import random

import numpy as np
import pytest
from warpcheck.errors import DataRace
from warpcheck.machine import SCHEDULES, Checks, EmulationOptions, Machine
from warpcheck_cases.handwritten import entry, pointers

WORD = "cvt.u64.u32 %d0, %r0; shl.b64 %d0, %d0, 2; add.s64 %d1, %a0, %d0; add.s64 %d2, %a1, %d0;"
WRITE, READ = f"{WORD} st.global.b32 [%d1], %r0;", f"{WORD} ld.global.b32 %r5, [%d1]; st.global.b32 [%d2], %r5;"
EARLY, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
TMA_READ = """setp.ne.u32 %p0, %r0, 0; @%p0 bra DONE; mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128; EDGE
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2+1024], [%a0], 128, [%r2];
    W: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra W;
    DONE:"""


def run(*grids: str, programmatic: bool = True, after_unknown: bool = False, arrays=None, checks=None) -> None:
    """Run the bodies one after the other on one chip; the last one is launched with the attribute, or not."""
    seed, schedule = random.randrange(1000), random.choice(SCHEDULES)
    print(f"seed {seed}, {schedule}")
    machine = Machine("sm_100a", EmulationOptions(seed=seed, schedule=schedule, checks=checks or Checks()))
    arrays = arrays or (np.zeros(32, np.int32), np.zeros(32, np.int32))
    for i, body in enumerate(grids):
        last = i + 1 == len(grids)
        machine.launch(
            entry(body, 2), "test", grid=(1, 1, 1), block=(32, 1, 1), smem_bytes=4096,
            **pointers(arrays), programmatic=i > 0 and (programmatic or not last), after_unknown=after_unknown and last,
        )  # fmt: skip


@pytest.mark.parametrize("first, second", [(WRITE, READ), (WRITE, WRITE), (READ, WRITE)], ids=["RAW", "WAW", "WAR"])
def test_the_wait_is_needed_before_what_both_touch(first: str, second: str) -> None:
    run(EARLY + first, WAIT + second)
    with pytest.raises(DataRace, match=r"grid before.*may (write|read) it; needs griddepcontrol.wait"):
        run(EARLY + first, second)


def test_a_copy_of_the_asynchronous_proxy_needs_the_wait_too() -> None:
    run(EARLY + WRITE, TMA_READ.replace("EDGE", WAIT))
    with pytest.raises(DataRace, match=r"griddepcontrol\.wait"):
        run(EARLY + WRITE, TMA_READ.replace("EDGE", ""))


def test_a_barrier_orders_other_threads_after_the_wait_of_one() -> None:
    run(EARLY + WRITE, f"setp.ne.u32 %p0, %r0, 0; @!%p0 griddepcontrol.wait; bar.sync 0; {READ}")


def test_two_reads_need_nothing() -> None:
    read = f"{WORD} ld.global.b32 %r5, [%d1];"
    run(EARLY + read, read)


def test_no_wait_is_needed_where_the_grids_do_not_overlap() -> None:
    run(WRITE, READ)  # the first one does not let dependents start: the ISA asks for the wait only if it does
    run(EARLY + WRITE, READ, programmatic=False)
    run(EARLY + WRITE, READ, checks=Checks(races=False))


def test_other_memory_needs_no_wait() -> None:
    one = np.zeros(64, np.int32)
    halves = one[:32], one[32:]
    run(EARLY + WRITE, f"{WORD} ld.global.b32 %r5, [%d2];", arrays=halves)


def test_a_grid_without_a_wait_leaves_its_predecessor_unordered() -> None:
    other = f"{WORD} ld.global.b32 %r5, [%d2];"
    run(EARLY + WRITE, EARLY + WAIT + other, READ.replace("st.global.b32 [%d2], %r5;", ""))
    with pytest.raises(DataRace, match=r"griddepcontrol\.wait"):
        run(EARLY + WRITE, EARLY + other, READ.replace("st.global.b32 [%d2], %r5;", ""))


def test_a_grid_after_an_unknown_one_must_wait_before_anything() -> None:
    run(WAIT + READ, after_unknown=True)
    run(READ, WAIT + READ, after_unknown=True)
    with pytest.raises(DataRace, match=r"may touch it; needs griddepcontrol\.wait"):
        run(READ, READ, after_unknown=True)
