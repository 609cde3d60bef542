"""Skeletons of the Hopper forward and of both backwards: kernels with softmax, loads or additions of dQ left out. What
they compute is of no use; how long they take says whether products, arithmetic and copies are right by themselves."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import cutlass
import cutlass.cute as cute
from cutlass import Boolean

from fa4.fwd.device import load, softmax
from fa4.runtime import jit
from fa4.sm80 import backward_tile as portable
from fa4.sm90.bwd import consumer, reduce
from fa4.sm90.bwd.common import load as backward_load
from fa4.sm90.bwd.common.pointwise import pack

SOFTMAX, LOADS, ADDITIONS = "softmax", "loads", "additions"
LEFT_OUT = ((SOFTMAX,), (LOADS,), (SOFTMAX, LOADS))
LEFT_OUT_BACKWARD = ((), (SOFTMAX,), (LOADS,), (ADDITIONS,), (SOFTMAX, LOADS, ADDITIONS))


def _softmax_step(self, s, at, is_masked: bool) -> Boolean:
    """S is taken for P."""
    return Boolean(False)


def _load_block(context, name: str, work, block, cursor) -> None:
    """A stage is full when nothing has come."""
    cursor.wait()
    cursor.expect_tx(0)


def _compute_p(context, s, minus_lse, scores) -> list:
    """S is taken for P."""
    return [s[i] for i in range(cute.size(s))]


def _compute_ds(context, s, p, minus_delta, dp, scores) -> list:
    """dP is taken for dS."""
    return pack([dp[i] for i in range(cute.size(dp))], context.cfg.dtype)


def _load_step(context, cursor, work, name: str, head, block) -> None:
    """A stage is full when nothing has come."""
    cursor.expect_tx(0)


def _load_statistics(context, cursor, work, head, m_block) -> None:
    pass


def _start_nothing(copy, context, work, block, head, consumer) -> None:
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_commit_group()


def _portable_p_ds(work, memory, mma, s, dp, m_block, stage, masked) -> None:
    """S and dP are rounded and stored as P and dS."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), work.cfg.dtype, num_bits_per_copy=32)
    to_smem = cute.make_tiled_copy_C(atom, mma).get_slice(work.thread)
    for acc, staged in ((s, memory.p), (dp, memory.ds)):
        half = cute.make_fragment_like(acc, work.cfg.dtype)
        half.store(acc.load().to(work.cfg.dtype))
        cute.copy(to_smem, to_smem.retile(half), to_smem.partition_D(staged))


def _portable_loads(work, memory, m_block, stage) -> None:
    cute.arch.cp_async_commit_group()


_add_dq = portable.add_dq


@cute.jit
def _portable_add_dq(work, dq: cute.Tensor, m_block: cutlass.Int32):
    """Add below row 0, where no tile is: the compiler keeps the product."""
    if m_block < 0:
        _add_dq(work, dq, m_block)


_PATCHES = {
    SOFTMAX: (
        (softmax.Softmax, "softmax_step", _softmax_step), (consumer, "compute_p", _compute_p),
        (consumer, "compute_ds", _compute_ds), (portable, "compute_p_ds", _portable_p_ds),
    ),
    LOADS: (
        (load, "load_block", _load_block), (backward_load, "load_tile", _load_step),
        (backward_load, "load_statistics", _load_statistics), (portable, "load_queries", _portable_loads),
    ),
    ADDITIONS: ((reduce, "start", _start_nothing), (portable, "add_dq", _portable_add_dq)),
}  # fmt: skip


@contextlib.contextmanager
def without(parts: tuple[str, ...]) -> Iterator[None]:
    """Kernels that are built inside lack these parts, and have a cache of their own: a key says nothing of them."""
    if not parts:
        yield
        return
    with contextlib.ExitStack() as stack:
        kept = Path(tempfile.gettempdir()) / f"fa4-without-{'-'.join(parts)}" / jit.fingerprint()
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not by the environment, which is read once.
        stack.enter_context(mock.patch.object(jit, "cache_directory", lambda: kept))
        stack.enter_context(mock.patch.dict(jit._launchers, clear=True))
        for part in parts:
            for owner, name, other in _PATCHES[part]:
                stack.enter_context(mock.patch.object(owner, name, other))
        yield
