"""Whose turn it is, in a deterministic run, to add to the dQ of a block of rows.

The key blocks that a block of rows meets add to it one after the other. A counter for each block of rows says how many
have; whoever adds waits until it reaches his place in the order, and counts up when his additions are done.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def counter(turns: cute.Tensor, block: Int32, head: Int32) -> cute.Pointer:
    """Of a block of rows; turns: (blocks, heads)."""
    return turns.iterator + cute.crd2idx((block, head), turns.layout)


@cute.jit
def wait_for_turn(count: cute.Pointer, turn: Int32):
    """Until `turn` key blocks have added."""
    done = Int32(-1)
    while done != turn:
        done = cute.arch.load(count, Int32, sem="acquire", scope="gpu")


def pass_turn_on(count: cute.Pointer) -> None:
    """One thread: count one more key block, whose additions are done."""
    cute.arch.red(count, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def wait_for_bulk_turn(count: cute.Pointer, turn: Int32):
    """The same before bulk additions."""
    wait_for_turn(count, turn)
    cute.arch.fence_proxy("async.global")  # additions after the wait come after those before it


@cute.jit
def wait_for_bulk_additions():
    """Before a turn is passed on."""
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.fence_proxy("async.global")
