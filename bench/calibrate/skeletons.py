"""Skeletons of the Hopper forward: the kernel with its softmax or its loads left out. What it computes is of no use;
how long it takes says whether products, arithmetic and copies are right by themselves."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from cutlass import Boolean

from fa4.fwd.device import load, softmax
from fa4.runtime import jit

SOFTMAX, LOADS = "softmax", "loads"
LEFT_OUT = ((SOFTMAX,), (LOADS,), (SOFTMAX, LOADS))


def _softmax_step(self, s, at, is_masked: bool) -> Boolean:
    """S is taken for P."""
    return Boolean(False)


def _load_block(context, name: str, work, block, cursor) -> None:
    """A stage is full when nothing has come."""
    cursor.wait()
    cursor.expect_tx(0)


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
        if SOFTMAX in parts:
            stack.enter_context(mock.patch.object(softmax.Softmax, "softmax_step", _softmax_step))
        if LOADS in parts:
            stack.enter_context(mock.patch.object(load, "load_block", _load_block))
        yield
