"""Orders of a launch after the first: each on its own copy of the memory from before, several at a time."""

import threading
import time

import numpy as np
import pytest
from warpcheck.errors import CoResidency
from warpcheck.machine import Machine
from warpcheck.machine.machine import LaunchStopped

from warpcheck import Emulated

# out[i] += the number of CTAs of earlier launches, which a variable of the module counts.
COUNTED = """.version 8.8
.target sm_90a
.address_size 64
.visible .global .align 4 .u32 launched;
.visible .entry count(.param .u64 pout)
.reqntid 32
{
    .reg .b64 %d<4>; .reg .b32 %r<6>; .reg .pred %p<2>;
    ld.param.u64 %d0, [pout]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1;
    mov.u64 %d3, launched; ld.global.u32 %r1, [%d3]; ld.global.u32 %r2, [%d2];
    add.s32 %r2, %r2, %r1; st.global.u32 [%d2], %r2;
    bar.warp.sync 0xffffffff;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 red.relaxed.gpu.global.add.u32 [%d3], 1;
    ret;
}
"""

# The last of two CTAs to arrive says who it is; every order of arrivals is right, and leaves other bytes.
LAST = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry last(.param .u64 pcounter, .param .u64 pout)
.reqntid 1
{
    .reg .b64 %d<2>; .reg .b32 %r<3>; .reg .pred %p<2>;
    ld.param.u64 %d0, [pcounter]; ld.param.u64 %d1, [pout]; mov.u32 %r0, %ctaid.x;
    atom.acq_rel.gpu.global.add.u32 %r1, [%d0], 1;
    setp.eq.u32 %p0, %r1, 1;
    @%p0 st.global.u32 [%d1+8], %r0;
    ret;
}
"""

# CTA 0 waits for CTA 1.
WAITS = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry waits(.param .u64 pflag, .param .u64 pout)
.reqntid 1
{
    .reg .b64 %d<2>; .reg .b32 %r<3>; .reg .pred %p<2>;
    ld.param.u64 %d0, [pflag]; ld.param.u64 %d1, [pout]; mov.u32 %r0, %ctaid.x;
    setp.eq.u32 %p0, %r0, 1;
    @%p0 bra SET;
AGAIN:
    ld.acquire.gpu.global.u32 %r1, [%d0];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    st.global.u32 [%d1], 5;
    ret;
SET:
    st.release.gpu.global.u32 [%d0], 1;
    ret;
}
"""

ENDLESS = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry endless(.param .u64 pout)
.reqntid 32
{
    .reg .b32 %r<2>;
    .shared .b32 last;
    mov.u32 %r0, 0;
AGAIN:
    add.u32 %r0, %r0, 1;
    st.shared.u32 [last], %r0;
    bra AGAIN;
}
"""


def test_every_order_starts_from_the_same_memory_and_variables():
    out = np.zeros(32, np.uint32)
    emulated = Emulated("sm_90a", seeds=5)
    for launches in range(1, 4):
        report = emulated.launch(COUNTED, "count", grid=1, args=[out])
        assert not report.differs, report.differences
        np.testing.assert_array_equal(out, np.full(32, sum(range(launches)), np.uint32))


def test_other_bytes_are_named_and_the_first_order_decides(seed):
    first, orders = set(), 0
    for number in range(seed, seed + 6):
        counter, out = np.zeros(1, np.uint32), np.full(4, 77, np.uint32)
        report = Emulated("sm_90a", seeds=8, seed=number, schedule="random").launch(
            LAST, "last", grid=2, args=[counter, out]
        )
        assert counter == 2 and list(out[[0, 1, 3]]) == [77] * 3 and out[2] in (0, 1)
        first.add(int(out[2]))
        orders += len(report.differs)
        assert all(text == "argument 1, array 4 uint32 + 8" for text in report.differences), report.differences
    assert orders, f"seeds {seed} to {seed + 12}: all orders of {sorted(first)} agree"


def test_an_error_of_a_later_order_leaves_the_results_of_the_first():
    """An odd seed runs one CTA at a time."""
    flag, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    emulated = Emulated("sm_90a", seeds=4)
    with pytest.raises(CoResidency) as caught:
        emulated.launch(WAITS, "waits", grid=2, args=[flag, out])
    assert caught.value.finding.seed == 1
    assert (flag, out) == (1, 5) and len(emulated.launches) == 1


def test_a_launch_that_nobody_waits_for_is_stopped():
    stopped = threading.Event()
    timer = threading.Timer(0.3, stopped.set)
    timer.start()
    began = time.monotonic()
    with pytest.raises(LaunchStopped, match=r"endless was stopped after [\d,]+ warp-instructions"):
        Machine("sm_90a").launch(
            ENDLESS, "endless", grid=(1, 1, 1), block=(32, 1, 1), params=[bytes(8)], stopped=stopped
        )
    assert time.monotonic() - began < 30
