"""Method "ring": keys and values travel from rank to rank. Partial outputs are merged; gradients of keys travel too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..fwd.launchers import JOIN, JoinConfig, can_join
from ..runtime.device import chip_of, sharing
from ..runtime.jit import can_run_kernels
from ..runtime.spec import Saved, compute_dtype
from .group_rank import GroupRank, RingExchange
from .parts import ChunkCall, Parts


@contextlib.contextmanager
def _messages(group_rank: GroupRank) -> Iterator[Callable[..., RingExchange]]:
    """Context of the messages of one call. Yield a function that sends tensors to the next rank, and receives those of
    the previous rank. After an error wait for the messages: neighbours with the same error have sent theirs, and the
    next call would receive pending messages as its own."""
    sent: list[RingExchange] = []

    def send(*tensors: Tensor) -> RingExchange:
        sent[:] = [*(x for x in sent if x.is_pending), RingExchange(tensors, group_rank)]  # do not keep finished ones
        return sent[-1]

    try:
        yield send
    except Exception:
        for exchange in sent:
            exchange.wait()
        raise


def calls(parts: Parts) -> list[tuple[ChunkCall, int]]:
    """Return the calls of a forward and a backward, each with the number of ranks whose keys it gets."""
    others = [parts.with_keys_of(source) for source in range(parts.group_rank.world) if source != parts.group_rank.rank]
    return [(call, 1) for call in (parts.own_at_once(), *parts.own(), *others)]


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts) -> tuple[Tensor, Tensor]:
    """Return out and lse. Each step computes with the available keys while they travel to the next rank."""
    with _messages(parts.group_rank) as send:
        rank, world, _ = parts.group_rank
        exchange = send(k, v) if world > 1 else None
        with sharing(exchange is not None):
            out, lse = parts.own_at_once().forward(q, k, v, sink)  # only this call has the sink, one logit of each row
        if exchange is None:
            return out, lse
        if world > 2:  # merged more than once
            out = out.to(compute_dtype(q.dtype))
        for step in range(1, world):
            k, v = exchange.wait()
            if step + 1 < world:
                exchange = send(k, v)
            call = parts.with_keys_of((rank - step) % world)
            with sharing(step + 1 < world):
                part = call.forward(q, k, v)
            _merge(call.rows(out), call.statistics(lse), *part)
        return out.to(q.dtype), lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part into out and lse in place, as `fa4.merge_states`; padding rows of the part are zeros. A kernel needs
    one pass over memory; torch operators, where no kernel can be compiled, need several."""
    chip = chip_of(out.device)
    if can_run_kernels(chip) and can_join(part):
        kernel = JOIN.launcher(JoinConfig(part.dtype, out.dtype, part.shape[-1]), chip)
        packed = out.ndim == 3  # a batch of one
        with torch.cuda.device_of(out):
            kernel(tuple(x.unsqueeze(0) if packed else x for x in (out, lse, part, part_lse)))
        return
    total = torch.logaddexp(lse, part_lse)

    def weight(lse_in: Tensor) -> Tensor:
        weights = torch.exp(lse_in - total).masked_fill_(total == -torch.inf, 0.0)
        return weights.transpose(-1, -2)[..., None]

    if out.dtype == lse.dtype:
        out.mul_(weight(lse)).addcmul_(part, weight(part_lse))
    else:
        out.copy_((out * weight(lse)).addcmul_(part, weight(part_lse)))
    lse.copy_(total)


def backward(
    saved: Saved, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parts: Parts
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk, dv and dsink. A rank computes part of its own keys while the first keys of others arrive, and the
    rest while the gradients of its keys travel back to it."""
    with _messages(parts.group_rank) as send:
        rank, world, _ = parts.group_rank
        exchange = send(k, v) if world > 1 else None
        first, *last = parts.own()
        grads = first.backward(saved, q, k, v, sink)
        sum_dtype = compute_dtype(q.dtype)
        dq, dsink = _embed(grads.dq, first.rows, q, sum_dtype), grads.dsink
        own = tuple(_embed(grad, first.keys_of, x, sum_dtype) for grad, x in ((grads.dk, k), (grads.dv, v)))
        grad_exchange = None
        for step in range(1, world):
            assert exchange is not None
            k_here, v_here = exchange.wait()
            if step + 1 < world:
                exchange = send(k_here, v_here)
            call = parts.with_keys_of((rank - step) % world)
            grads = call.backward(saved, q, k_here, v_here)
            call.rows(dq).add_(grads.dq)
            if grad_exchange is None:  # no sums yet: they travel in the input dtype, half the bytes
                kv_grads = tuple(_embed(grad, call.keys_of, x) for grad, x in ((grads.dk, k), (grads.dv, v)))
            else:  # add to the sums of the previous ranks
                kv_grads = tuple(x.to(sum_dtype) for x in grad_exchange.wait())
                _add(tuple(call.keys_of(x) for x in kv_grads), (grads.dk, grads.dv))
            grad_exchange = send(*kv_grads)
        for call in last:
            grads = call.backward(saved, q, k, v, sink)
            call.rows(dq).add_(grads.dq)
            _add(tuple(call.keys_of(x) for x in own), (grads.dk, grads.dv))
            dsink = None if dsink is None or grads.dsink is None else dsink + grads.dsink
        if grad_exchange is not None:
            _add(own, grad_exchange.wait())
        dk, dv = own
        return dq, dk, dv, dsink


def _embed(part: Tensor, rows: Callable[[Tensor], Tensor], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the gradient of some rows as the gradient of all rows (0 elsewhere), in dtype or its own."""
    dtype = dtype or part.dtype
    if part.shape == like.shape:
        return part.to(dtype)
    total = torch.zeros(like.shape, dtype=dtype, device=part.device)
    rows(total).copy_(part)
    return total


def _add(totals: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> None:
    for total, part in zip(totals, parts):
        total.add_(part)
