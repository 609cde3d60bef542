"""Keys and values travel from rank to rank; what each rank makes of them is joined, or travels on."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import Saved
from .parts import Parts, Sums, accumulator
from .place import Passing


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts) -> tuple[Tensor, Tensor]:
    """out and lse. Each round computes with the keys at hand while they travel on."""
    rank, world, _ = parts.place
    passing = Passing((k, v), parts.place) if world > 1 else None
    out, lse = parts.own_at_once().forward(q, k, v, sink)  # the sink is one logit of each row: this call has it
    if passing is None:
        return out, lse
    out = out.to(accumulator(q))
    for step in range(1, world):
        k, v = passing.wait()
        if step + 1 < world:
            passing = Passing((k, v), parts.place)
        call = parts.with_keys_of((rank - step) % world)
        _merge(call.rows(out), call.statistics(lse), *call.forward(q, k, v))
    return out.to(q.dtype), lse


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """In place, `fa4.merge_states` of two, the second of which has idle rows of zeros: four passes over memory."""
    total = torch.logaddexp(lse, more_lse)

    def weight(of: Tensor) -> Tensor:
        weights = torch.exp(of - total).masked_fill_(total == -torch.inf, 0.0)
        return weights.transpose(-1, -2)[..., None]

    out.mul_(weight(lse)).addcmul_(more, weight(more_lse))
    lse.copy_(total)


def backward(
    saved: Saved, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsink. Of its own keys a rank computes one part while the first ones of others travel here, and
    one while the gradients of its keys travel home."""
    rank, world, _ = parts.place
    passing = Passing((k, v), parts.place) if world > 1 else None
    first, *last = parts.own()
    sums = Sums.like(q, k, v)
    dsink = first.backward(saved, q, k, v, sums, sink)
    home = None
    for step in range(1, world):
        assert passing is not None
        k_here, v_here = passing.wait()
        if step + 1 < world:
            passing = Passing((k_here, v_here), parts.place)
        theirs = Sums.like(q[:0], k_here, v_here)._replace(dq=sums.dq)
        parts.with_keys_of((rank - step) % world).backward(saved, q, k_here, v_here, theirs)
        if home is not None:  # what the ranks before have added to these keys' gradients
            for total, before in zip(theirs[1:], home.wait()):
                total += before
        home = Passing(theirs[1:], parts.place)
    for call in last:
        dsink += call.backward(saved, q, k, v, sums, sink)
    if home is not None:
        for total, of_others in zip(sums[1:], home.wait()):
            total += of_others
    return *sums, None if sink is None else dsink
