"""Every rank gets all keys and values, some heads at a time: while it computes with these, the next ones travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import sharing
from ..spec import Saved
from .group_rank import Gathering, Summing
from .parts import Call, Parts

_MOST_GROUPS = 4


class _Heads(NamedTuple):
    """Some of the heads, and their keys and values on the way."""

    queries: slice
    keys: slice
    coming: tuple[Gathering, Gathering]

    def of(self, x: Tensor) -> Tensor:
        """Theirs of (..., heads, head_dim), or of statistics, (..., heads, rows)."""
        return x[..., self.queries, :]


def calls(parts: Parts) -> list[tuple[Call, int]]:
    """The calls of a forward and a backward, each with the number of ranks whose keys it gets."""
    return [(call, parts.place.world) for call in parts.with_all_keys()]


def _groups(q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> Iterator[tuple[_Heads, Tensor, Tensor]]:
    """Groups of heads with all their keys and values; the next group's are asked for before this one is handed out."""
    heads = k.shape[-2]
    count = next(n for n in range(_MOST_GROUPS, 0, -1) if heads % n == 0)
    step, step_q = heads // count, q.shape[-2] // count

    def ask(i: int) -> _Heads:
        keys = slice(i * step, (i + 1) * step)
        k_way, v_way = (Gathering(parts.sent(x[..., keys, :]), parts.place) for x in (k, v))
        return _Heads(slice(i * step_q, (i + 1) * step_q), keys, (k_way, v_way))

    coming = [ask(0)]
    for i in range(count):
        if i + 1 < count:
            coming.append(ask(i + 1))
        here = coming.pop(0)
        k_whole, v_whole = (parts.whole(x.wait()) for x in here.coming)
        yield here, k_whole, v_whole


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts) -> tuple[Tensor, Tensor]:
    """out and lse."""
    calls, axis = parts.with_all_keys(), q.ndim - 3
    outs, lses = [], []
    for heads, k_whole, v_whole in _groups(q, k, v, parts):
        of_sink = None if sink is None else sink[heads.queries]
        with sharing():  # the next heads' keys are on their way
            results = [call.forward(heads.of(q), k_whole, v_whole, of_sink) for call in calls]
        out, lse = (
            results[0]
            if len(results) == 1
            else (parts.join(results[0][i], results[1][i], a) for i, a in ((0, axis), (1, axis + 1)))
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, -2), torch.cat(lses, -2)


def backward(
    saved: Saved, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsink."""
    calls, axis = parts.with_all_keys(), q.ndim - 3
    dqs, dsinks, on_their_way = [], [], []
    for heads, k_whole, v_whole in _groups(q, k, v, parts):
        of_sink = None if sink is None else sink[heads.queries]
        dlse = None if saved.dlse is None else heads.of(saved.dlse)
        theirs = Saved(heads.of(saved.out), heads.of(saved.lse), heads.of(saved.dout), dlse)
        grads = [call.backward(theirs, heads.of(q), k_whole, v_whole, of_sink) for call in calls]
        for_owners = parts.by_rank([of.dk for of in grads]), parts.by_rank([of.dv for of in grads])
        on_their_way.append([Summing(x, parts.place) for x in for_owners])
        dqs.append(grads[0].dq if len(grads) == 1 else parts.join(grads[0].dq, grads[1].dq, axis))
        dsinks.append([of.dsink for of in grads if of.dsink is not None])
    dk, dv = (
        torch.cat([parts.received(group[i].wait()).to(x.dtype) for group in on_their_way], -2)
        for i, x in ((0, k), (1, v))
    )
    dsink = None if sink is None else torch.cat([torch.stack(of).sum(0) for of in dsinks])
    return torch.cat(dqs, -2), dk, dv, dsink
