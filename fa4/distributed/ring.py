"""Keys and values travel from rank to rank; what each rank makes of them is joined, or travels on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..device import chip_of, sharing
from ..spec import Saved
from .group_rank import GroupRank, Passing
from .parts import Call, Parts, accumulator


class _Traffic:
    """The messages of one call. If an error ends it they are waited for: neighbours that fail alike have sent theirs,
    and what is left behind would be taken for messages of the next call."""

    def __init__(self, place: GroupRank) -> None:
        self._place, self._sent = place, list[Passing]()

    def __enter__(self) -> _Traffic:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            for passing in self._sent:
                passing.wait()

    def send(self, *tensors: Tensor) -> Passing:
        """To the next rank, and those of the rank before here."""
        passing = Passing(tensors, self._place)
        self._sent = [*(x for x in self._sent if x.under_way), passing]  # what has arrived is not kept
        return passing


def calls(parts: Parts) -> list[tuple[Call, int]]:
    """The calls of a forward and a backward, each with the number of ranks whose keys it gets."""
    others = [parts.with_keys_of(source) for source in range(parts.place.world) if source != parts.place.rank]
    return [(call, 1) for call in (parts.own_at_once(), *parts.own(), *others)]


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts) -> tuple[Tensor, Tensor]:
    """out and lse. Each round computes with the keys at hand while they travel on."""
    with _Traffic(parts.place) as traffic:
        return _forward(q, k, v, sink, parts, traffic)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts, traffic: _Traffic
) -> tuple[Tensor, Tensor]:
    rank, world, _ = parts.place
    passing = traffic.send(k, v) if world > 1 else None
    with sharing(passing is not None):
        out, lse = parts.own_at_once().forward(q, k, v, sink)  # the sink is one logit of each row: this call has it
    if passing is None:
        return out, lse
    if world > 2:  # joined more than once
        out = out.to(accumulator(q))
    for step in range(1, world):
        k, v = passing.wait()
        if step + 1 < world:
            passing = traffic.send(k, v)
        call = parts.with_keys_of((rank - step) % world)
        with sharing(step + 1 < world):
            more = call.forward(q, k, v)
        _merge(call.rows(out), call.statistics(lse), *more)
    return out.to(q.dtype), lse


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """In place, `fa4.merge_states` of two, the second of which has idle rows of zeros: by a kernel in one pass over
    memory, or where none can be compiled in a few."""
    chip = chip_of(out.device)
    if chip.compiles:
        from ..fwd import join  # needs CuTe DSL

        if join.takes(more):
            kernel = join.launcher(join.Config(more.dtype, out.dtype, more.shape[-1]), chip)
            packed = out.ndim == 3  # a batch of one
            with torch.cuda.device_of(out):
                kernel(tuple(x.unsqueeze(0) if packed else x for x in (out, lse, more, more_lse)))
            return
    total = torch.logaddexp(lse, more_lse)

    def weight(of: Tensor) -> Tensor:
        weights = torch.exp(of - total).masked_fill_(total == -torch.inf, 0.0)
        return weights.transpose(-1, -2)[..., None]

    if out.dtype == lse.dtype:
        out.mul_(weight(lse)).addcmul_(more, weight(more_lse))
    else:
        out.copy_((out * weight(lse)).addcmul_(more, weight(more_lse)))
    lse.copy_(total)


def backward(
    saved: Saved, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsink. Of its own keys a rank computes one part while the first ones of others travel here, and
    one while the gradients of its keys travel home."""
    with _Traffic(parts.place) as traffic:
        return _backward(saved, q, k, v, sink, parts, traffic)


def _backward(
    saved: Saved, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts, traffic: _Traffic
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    rank, world, _ = parts.place
    passing = traffic.send(k, v) if world > 1 else None
    first, *last = parts.own()
    grads = first.backward(saved, q, k, v, sink)
    wide = accumulator(q)
    dq, dsink = _spread(grads.dq, first.rows, q, wide), grads.dsink
    own = tuple(_spread(grad, first.keys_of, x, wide) for grad, x in ((grads.dk, k), (grads.dv, v)))
    home = None
    for step in range(1, world):
        assert passing is not None
        k_here, v_here = passing.wait()
        if step + 1 < world:
            passing = traffic.send(k_here, v_here)
        call = parts.with_keys_of((rank - step) % world)
        grads = call.backward(saved, q, k_here, v_here)
        call.rows(dq).add_(grads.dq)
        # Added to nothing yet they travel as they are, half as long as a sum.
        as_sums = wide if home is not None else None
        theirs = tuple(_spread(grad, call.keys_of, x, as_sums) for grad, x in ((grads.dk, k), (grads.dv, v)))
        if home is not None:  # what the ranks before have added to these keys' gradients
            _add(theirs, home.wait())
        home = traffic.send(*theirs)
    for call in last:
        grads = call.backward(saved, q, k, v, sink)
        call.rows(dq).add_(grads.dq)
        _add(tuple(call.keys_of(x) for x in own), (grads.dk, grads.dv))
        dsink = None if dsink is None or grads.dsink is None else dsink + grads.dsink
    if home is not None:
        _add(own, home.wait())
    dk, dv = own
    return dq, dk, dv, dsink


def _spread(part: Tensor, rows: Callable[[Tensor], Tensor], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The gradient of some rows of a tensor, as that of all, in a dtype that may be wider."""
    dtype = dtype or part.dtype
    if part.shape == like.shape:
        return part.to(dtype)
    total = torch.zeros(like.shape, dtype=dtype, device=part.device)
    rows(total).copy_(part)
    return total


def _add(totals: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> None:
    for total, part in zip(totals, parts):
        total.add_(part)
