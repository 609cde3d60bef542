"""Method "all-gather": every rank gathers all keys and values by groups of heads; the next group travels meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.device import sharing
from ..runtime.spec import Saved
from .group_rank import AllGather, AllToAllSum
from .parts import ChunkCall, Parts

_MAX_GROUPS = 4


class _Heads(NamedTuple):
    """A group of heads, and the pending gathers of its keys and values."""

    queries: slice
    keys: slice
    gathers: tuple[AllGather, AllGather]

    def select(self, x: Tensor) -> Tensor:
        """Return the group's query heads of (..., heads, head_dim), or of statistics (..., heads, rows)."""
        return x[..., self.queries, :]


def calls(parts: Parts) -> list[tuple[ChunkCall, int]]:
    """Return the calls of a forward and a backward, each with the number of ranks whose keys it gets."""
    return [(call, parts.group_rank.world) for call in parts.with_all_keys()]


def _groups(q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> Iterator[tuple[_Heads, Tensor, Tensor]]:
    """Yield groups of heads with all their keys and values. The gathers of the next group start before each yield."""
    heads = k.shape[-2]
    count = next(n for n in range(_MAX_GROUPS, 0, -1) if heads % n == 0)
    step, step_q = heads // count, q.shape[-2] // count

    def start(i: int) -> _Heads:
        keys = slice(i * step, (i + 1) * step)
        k_gather, v_gather = (AllGather(parts.as_message(x[..., keys, :]), parts.group_rank) for x in (k, v))
        return _Heads(slice(i * step_q, (i + 1) * step_q), keys, (k_gather, v_gather))

    pending = [start(0)]
    for i in range(count):
        if i + 1 < count:
            pending.append(start(i + 1))
        current = pending.pop(0)
        k_whole, v_whole = (parts.whole(x.wait()) for x in current.gathers)
        yield current, k_whole, v_whole


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts) -> tuple[Tensor, Tensor]:
    """Return out and lse."""
    calls, axis = parts.with_all_keys(), q.ndim - 3
    outs, lses = [], []
    for heads, k_whole, v_whole in _groups(q, k, v, parts):
        sink_part = None if sink is None else sink[heads.queries]
        with sharing():  # with the gathers of the next heads
            results = [call.forward(heads.select(q), k_whole, v_whole, sink_part) for call in calls]
        out, lse = results[0]
        if len(results) == 2:
            out, lse = (parts.join(early, late, rows) for early, late, rows in zip(*results, (axis, axis + 1)))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, -2), torch.cat(lses, -2)


def backward(
    saved: Saved, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk, dv and dsink."""
    calls, axis = parts.with_all_keys(), q.ndim - 3
    dqs, dsinks, pending = [], [], []
    for heads, k_whole, v_whole in _groups(q, k, v, parts):
        sink_part = None if sink is None else sink[heads.queries]
        dlse = None if saved.dlse is None else heads.select(saved.dlse)
        saved_part = Saved(heads.select(saved.out), heads.select(saved.lse), heads.select(saved.dout), dlse)
        grads = [call.backward(saved_part, heads.select(q), k_whole, v_whole, sink_part) for call in calls]
        sums = parts.by_rank([grad.dk for grad in grads]), parts.by_rank([grad.dv for grad in grads])
        pending.append([AllToAllSum(x, parts.group_rank) for x in sums])
        dqs.append(grads[0].dq if len(grads) == 1 else parts.join(grads[0].dq, grads[1].dq, axis))
        dsinks.append([grad.dsink for grad in grads if grad.dsink is not None])
    dk, dv = (
        torch.cat([parts.from_message(group[i].wait()).to(x.dtype) for group in pending], -2)
        for i, x in ((0, k), (1, v))
    )
    dsink = None if sink is None else torch.cat([torch.stack(terms).sum(0) for terms in dsinks])
    return torch.cat(dqs, -2), dk, dv, dsink
