"""Whose turn it is to add to the dQ of a block of rows.

In a deterministic run the key blocks that a block of rows meets add to it one after the other. A counter for each block
of rows says how many have; whoever adds waits until it reaches his place in the order, and counts up when his additions
are done.

Without an order the counter says whether anybody has: the first to come claims it and stores his share where others add
theirs, so that nobody clears sums. Those who come before that is done wait for it; the one they wait for runs, and does
not wait.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32

NOBODY, CLAIMED, INITIALIZED = 0, 1, 2  # what a counter says where additions have no order


def semaphore_ptr(semaphores: cute.Tensor, block: Int32, head: Int32) -> cute.Pointer:
    """Of a block of rows; turns: (blocks, heads)."""
    return semaphores.iterator + cute.crd2idx((block, head), semaphores.layout)


@cute.jit
def wait_semaphore(count: cute.Pointer, order_index: Int32):
    """Until `order_index` key blocks have added."""
    done = Int32(-1)
    while done != order_index:
        done = cute.arch.load(count, Int32, sem="acquire", scope="gpu")


def release_semaphore(count: cute.Pointer) -> None:
    """One thread: count one more key block, whose additions are done."""
    cute.arch.red(count, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def wait_bulk_semaphore(count: cute.Pointer, order_index: Int32):
    """The same before bulk additions."""
    wait_semaphore(count, order_index)
    cute.arch.fence_proxy("async.global")  # additions after the wait come after those before it


@cute.jit
def wait_for_bulk_additions():
    """Before a turn is passed on."""
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.fence_proxy("async.global")


def first_writer_state(count: cute.Pointer) -> Int32:
    """Whole warp: what the counter says, asked ahead of `claim_first_writer`."""
    return cute.arch.load(count, Int32, sem="acquire", scope="gpu")


@cute.jit
def claim_first_writer(count: cute.Pointer, state: Int32) -> Boolean:
    """Whole warp, before a bulk store or addition: whether nobody has stored, so that this warp is to, and then to
    `release_semaphore`; if not, somebody has. known: what the counter said before."""
    state = cute.arch.shuffle_sync(state, 0)
    if state != INITIALIZED:
        if cute.arch.lane_idx() == 0:
            state = cute.arch.atomic_cas(count, cmp=Int32(NOBODY), val=Int32(CLAIMED), sem="acquire", scope="gpu")
        state = cute.arch.shuffle_sync(state, 0)
        if state == CLAIMED:
            wait_semaphore(count, Int32(INITIALIZED))
    cute.arch.sync_warp()  # what the first lane saw has happened for the elected one, too
    cute.arch.fence_proxy("async.global")
    return Boolean(state == NOBODY)
