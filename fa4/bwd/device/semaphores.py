"""Semaphores of the dQ sums, one or more per block of rows.

Deterministic order: the key blocks add to a block of rows one after the other. The semaphore counts the key blocks that
have added. A key block waits until the count equals its order index, and increments it after its additions.

First writer: without an order the semaphore is a state. The first CTA claims it and stores its share; later CTAs add
theirs. So sums need no zero fill. CTAs that arrive before the store is complete wait for it. This cannot deadlock: the
first writer is running and does not wait.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

NOBODY, CLAIMED, INITIALIZED = 0, 1, 2  # states of a semaphore without an order


def semaphore_ptr(semaphores: cute.Tensor, block: Int32, head: Int32) -> cute.Pointer:
    """Pointer to the semaphore of a block of rows; semaphores: (blocks, heads)."""
    return semaphores.iterator + cute.crd2idx((block, head), semaphores.layout)


@cute.jit
def wait_semaphore(semaphore: cute.Pointer, order_index: Int32):
    """Wait until `order_index` key blocks have added."""
    count = Int32(-1)
    while count != order_index:
        count = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")


@cute.jit
def has_reached(semaphore: cute.Pointer, order_index: Int32) -> Boolean:
    """Return at once whether `order_index` key blocks have added; then bulk additions may follow. Called by the whole
    warp, whose lanes get the same answer."""
    count = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")
    count = cute.arch.shuffle_sync(count, 0)
    cute.arch.sync_warp()  # the elected lane also observes what lane 0 has acquired
    cute.arch.fence_proxy("async.global")
    return Boolean(count == order_index)


def release_semaphore(semaphore: cute.Pointer) -> None:
    """Increment the count after the additions of a key block; called by one thread."""
    cute.arch.red(semaphore, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def wait_bulk_semaphore(semaphore: cute.Pointer, order_index: Int32):
    """`wait_semaphore` before bulk additions."""
    wait_semaphore(semaphore, order_index)
    cute.arch.fence_proxy("async.global")  # orders later bulk additions after the wait


@cute.jit
def wait_for_bulk_additions(newer: cutlass.Constexpr[int] = 0):
    """Wait for this thread's bulk additions but those of the `newer` last groups; call before `release_semaphore`."""
    cute.arch.cp_async_bulk_wait_group(newer)
    cute.arch.fence_proxy("async.global")


def first_writer_state(semaphore: cute.Pointer) -> Int32:
    """State of a semaphore, loaded early for `claim_first_writer`; called by the whole warp."""
    return cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")


@cute.jit
def claim_first_writer(semaphore: cute.Pointer, state: Int32) -> Boolean:
    """Claim the first write; called by the whole warp before a bulk store or addition. Return True if this warp must
    store and then call `release_semaphore`; False if the sum is initialised and the warp must add. state: result of
    `first_writer_state`."""
    state = cute.arch.shuffle_sync(state, 0)
    if state != INITIALIZED:
        if cute.arch.lane_idx() == 0:
            state = cute.arch.atomic_cas(semaphore, cmp=Int32(NOBODY), val=Int32(CLAIMED), sem="acquire", scope="gpu")
        state = cute.arch.shuffle_sync(state, 0)
        if state == CLAIMED:
            wait_semaphore(semaphore, Int32(INITIALIZED))
    cute.arch.sync_warp()  # the elected lane also observes what lane 0 has acquired
    cute.arch.fence_proxy("async.global")
    return Boolean(state == NOBODY)
