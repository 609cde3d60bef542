"""Scale registers of mma.sync: only the threads that `thread-id` selects have to define theirs."""

import numpy as np
import pytest
from warpcheck.errors import UninitializedRead
from warpcheck_cases.handwritten import launch

# Zero operands; %p1 and %p2 select the lanes whose scale registers are defined.
BODY = """
    and.b32 %r20, %r0, 3;
    {select}
    mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
    mov.b32 %r4, 0; mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0; mov.b32 %r8, 0; mov.b32 %r9, 0;
    @%p1 mov.b32 %r10, 0x7f7f7f7f;
    @%p2 mov.b32 %r11, 0x7f7f7f7f;
    mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0
        {{%f0, %f1, %f2, %f3}}, {{%r4, %r5, %r6, %r7}}, {{%r8, %r9}}, {{%f0, %f1, %f2, %f3}},
        %r10, {{0, {thread_a}}}, %r11, {{0, {thread_b}}};
    mul.wide.u32 %d0, %r0, 16;
    add.u64 %d0, %d0, %a0;
    st.global.v4.f32 [%d0], {{%f0, %f1, %f2, %f3}};
"""
SELECT = "shr.u32 %r21, %r20, 1; setp.eq.u32 %p1, %r21, {pair}; setp.eq.u32 %p2, %r20, {thread};"


def run(pair: int, thread: int, thread_a: int, thread_b: int) -> None:
    select = SELECT.format(pair=pair, thread=thread)
    body = BODY.format(select=select, thread_a=thread_a, thread_b=thread_b)
    launch(body, [np.ones(128, np.float32)], target="sm_120a")


@pytest.mark.parametrize("thread_a, thread_b", [(0, 0), (1, 2), (0, 3), (1, 1)])
def test_threads_that_are_not_selected_may_leave_theirs_undefined(thread_a, thread_b):
    run(thread_a, thread_b, thread_a, thread_b)


@pytest.mark.parametrize("pair, thread", [(1, 2), (0, 1)])
def test_a_selected_thread_has_to_define_its_scale(pair, thread):
    with pytest.raises(UninitializedRead):
        run(pair, thread, 0, 2)
