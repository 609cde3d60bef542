"""Attention over sequences that are cut among processes: context parallelism on a process group.

Of each sequence, cut into 2 W chunks, rank r of W holds chunks r and 2 W - 1 - r, one behind the other, so that all
ranks have as many visible pairs under a causal mask (`shard`, `unshard`). Two ways lead to the keys of others:

* "ring": keys and values travel from rank to rank while the part that is here is computed; the parts are joined by
  their log-sum-exps. Gradients of keys and values travel on with them. Memory for one more part.
* "all-gather": every rank gets all keys and values, and sums come back at the end. Fewer and larger messages.

Both add in an order that ranks alone decide: results repeat bit for bit where the kernels' do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks
from .checks import Options, WindowSize
from .spec import AttentionInputs, Flags, Saved
from .states import merge_states

METHODS = ("ring", "all-gather")


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    method: str = "ring",
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`fa4.flash_attn_func` over the sequences of all ranks, forward and backward. Every rank of the group calls it.

    Args:
        q, k, v: this rank's part, as `shard` cuts it: (batch, seqlen / ranks, heads, head_dim), or packed
            (total / ranks, heads, head_dim).
        group: the process group; None is the default one.
        method: "ring" or "all-gather".
        cu_seqlens: for packed parts, (batch + 1,) int32 of the whole sequences, the same on every rank. Each length
            is a multiple of 2 * ranks.
        max_seqlen: an upper bound of the whole sequences' lengths; None is all rows.
        window_size: with a left side alone, causal, and the method "all-gather".

    The other arguments are those of `flash_attn_func`. The gradient of a sink is this rank's share: sum it over
    ranks, as that of any parameter.

    Returns:
        this rank's rows: out like q, with head_dim_v, and, if asked, lse, (batch, heads_q, rows) or (heads_q, rows).

    Raises:
        TypeError, ValueError: as `flash_attn_func`; queries and keys differ in length, or chunks would not be whole.
        NotImplementedError: a window that the method has not.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {METHODS}")
    place = _Place.of(group)
    dense = isinstance(q, Tensor) and q.ndim == 4
    (checks.check_dense if dense else checks.check_packed)(q, k, v)
    flags = checks.flags(
        q, k, v, learnable_sink, Options(softmax_scale, causal, window_size, softcap, deterministic, backend)
    )
    _check_window(flags, method)
    rows = q.shape[:-2]
    if k.shape[: len(rows)] != rows:
        raise ValueError(
            f"k has rows {tuple(k.shape[: len(rows)])}, expected {tuple(rows)} like q: parts of one sequence"
        )
    if dense:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is given with padded q, k, v, expected packed ones: (rows, heads, head_dim)")
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        cu_seqlens = torch.arange(rows[0] + 1, dtype=torch.int32, device=q.device) * (rows[1] * place.world)
        max_seqlen = rows[1] * place.world
    elif cu_seqlens is None:
        raise ValueError("cu_seqlens is None, expected the cumulative lengths of the whole packed sequences")
    _check_lengths(cu_seqlens, place, q.shape[0])
    whole = place.world * q.shape[0] if max_seqlen is None else max_seqlen
    lengths = _Lengths(cu_seqlens, -(-whole // place.world))
    out, lse = _ContextParallel.apply(q, k, v, learnable_sink, lengths, flags, place, method)
    if dense:
        out, lse = out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1)
    return (out, lse) if return_lse else out


def shard(
    x: Tensor, *, dim: int = 1, group: dist.ProcessGroup | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """This rank's part of what every rank has whole: tokens, positions, or q, k, v, along the axis of positions.

    Args:
        dim: that axis; of packed sequences, with `cu_seqlens`, that of all rows.

    Raises:
        ValueError: a length is no multiple of 2 * ranks.
    """
    place = _Place.of(group)
    cu_seqlens = _bounds(x, dim, cu_seqlens)
    _check_lengths(cu_seqlens, place, x.shape[dim] // place.world)
    return x.index_select(dim, _held(cu_seqlens, place, x.shape[dim] // place.world))


def unshard(
    x: Tensor, *, dim: int = 1, group: dist.ProcessGroup | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The whole of what `shard` cut, on every rank; without a gradient."""
    place = _Place.of(group)
    parts = _gather(x.detach().movedim(dim, 0), place)
    whole = _bounds(parts, 0, cu_seqlens)
    return parts[_order(whole, place, parts.shape[0])].movedim(0, dim)


# Who holds what -------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """This process in its group."""

    rank: int
    world: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> _Place:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        return _Place(dist.get_rank(group), dist.get_world_size(group), group)

    def peer(self, rank: int) -> int:
        rank %= self.world
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class _Lengths(NamedTuple):
    """cu_seqlens of the whole sequences, and an upper bound of the lengths of a rank's parts."""

    whole: Tensor
    max_part: int


def _bounds(x: Tensor, dim: int, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is not None:
        return cu_seqlens
    return torch.tensor([0, x.shape[dim]], dtype=torch.int32, device=x.device)


def _check_lengths(cu_seqlens: Tensor, place: _Place, rows: int) -> None:
    """Where looking is free: a GPU would stall."""
    if cu_seqlens.device.type != "cpu":
        return
    wrong = [n for n in cu_seqlens.diff().tolist() if n % (2 * place.world)]
    if wrong:
        raise ValueError(f"sequences have lengths {wrong[:4]}, expected multiples of {2 * place.world}: 2 * ranks")
    if int(cu_seqlens[-1]) != rows * place.world:
        raise ValueError(
            f"cu_seqlens ends with {int(cu_seqlens[-1])}, expected {rows * place.world}: rows of all ranks"
        )


def _check_window(flags: Flags, method: str) -> None:
    if flags.window_right not in (None, 0) or (flags.window_left is not None and flags.window_right is None):
        raise NotImplementedError("window_size has a right side or no causal, expected (left, None) with causal=True")
    if flags.window_left is not None and method == "ring":
        raise NotImplementedError('window_size is given with method="ring", expected method="all-gather"')


def _held(cu_seqlens: Tensor, place: _Place, rows: int) -> Tensor:
    """(rows,): which rows of the whole this rank holds, in its order."""
    part = cu_seqlens // place.world
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(part, row, right=True) - 1
    chunk = (part.diff() // 2)[sequence]
    at = row - part[sequence]
    late = at >= chunk
    index = torch.where(late, 2 * place.world - 1 - place.rank, place.rank)
    return cu_seqlens[sequence] + index * chunk + at - late * chunk


def _order(cu_seqlens: Tensor, place: _Place, rows: int) -> Tensor:
    """(rows,): where each row of the whole lies among the parts of all ranks, one behind the other."""
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    chunk = (cu_seqlens.diff() // (2 * place.world))[sequence]
    at = row - cu_seqlens[sequence]
    index = at // chunk
    late = index >= place.world
    rank = torch.where(late, 2 * place.world - 1 - index, index)
    return rank * (rows // place.world) + (cu_seqlens // place.world)[sequence] + late * chunk + at % chunk


# One call of a kernel -------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """Which of this rank's queries see which keys: lengths for packed sequences of which nothing need be copied out."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    flags: Flags

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> AttentionInputs:
        return AttentionInputs(q, k, v, sink, *self[:6])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.ops.fa4.forward(*self.inputs(q, k, v, sink), *self.flags)

    def backward(self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, ...]:
        """dq, dk, dv and dsink, through the lse of all keys: sums of these are the gradients."""
        return torch.ops.fa4.backward(*saved, *self.inputs(q, k, v, sink), *self.flags)


def _twice(first: Tensor, second: Tensor) -> Tensor:
    """(2 * n,): the entries of both in turns."""
    return torch.stack((first, second), 1).flatten().contiguous()


def _halves(cu_seqlens: Tensor, middle: Tensor) -> Tensor:
    """Bounds of twice as many sequences: each is cut at `middle`."""
    return torch.cat((_twice(cu_seqlens[:-1], middle), cu_seqlens[-1:])).contiguous()


def _ring_call(lengths: _Lengths, flags: Flags, place: _Place, source: int) -> _Call:
    """This rank's queries and the keys of rank `source`."""
    part, most = (lengths.whole // place.world).contiguous(), lengths.max_part
    if flags.window_right is None or source == place.rank:
        return _Call(part, part, None, None, most, most, flags)
    flags, half = flags._replace(window_right=None), part.diff() // 2
    if source < place.rank:  # its first chunk lies before both of ours, its second behind both
        return _Call(part, part, None, half, most, most, flags)
    # Its chunks both lie before our second, and behind our first.
    none = torch.zeros_like(half)
    return _Call(_halves(part, part[:-1] + half), _halves(part, part[:-1]), _twice(none, half), None, most, most, flags)


def _gather_calls(lengths: _Lengths, flags: Flags, place: _Place) -> list[_Call]:
    """The two chunks of this rank's queries, each with all keys, in their order, up to its last query."""
    whole, part = lengths.whole, (lengths.whole // place.world).contiguous()
    most, most_k = lengths.max_part, lengths.max_part * place.world
    if flags.window_right is None:
        return [_Call(part, whole, None, None, most, most_k, flags)]
    half = part.diff() // 2
    none = torch.zeros_like(half)
    bounds = _halves(part, part[:-1] + half)
    seen = [(chunk + 1) * half for chunk in (place.rank, 2 * place.world - 1 - place.rank)]
    first = _Call(bounds, _halves(whole, whole[1:]), _twice(half, none), _twice(seen[0], none), most, most_k, flags)
    second = first._replace(
        cu_seqlens_k=_halves(whole, whole[:-1]), seqused_q=_twice(none, half), seqused_k=_twice(none, seen[1])
    )
    return [first, second]


# Messages -------------------------------------------------------------------------------------------------------------


class _Passing:
    """Tensors on their way to the next rank, and those of the rank before on their way here."""

    def __init__(self, tensors: tuple[Tensor, ...], place: _Place) -> None:
        self._sent = tuple(x.contiguous() for x in tensors)
        self._here = tuple(torch.empty_like(x) for x in self._sent)
        to, of = place.peer(place.rank + 1), place.peer(place.rank - 1)
        works = [dist.P2POp(dist.isend, x, to, place.group) for x in self._sent]
        works += [dist.P2POp(dist.irecv, x, of, place.group) for x in self._here]
        self._works = dist.batch_isend_irecv(works)

    def wait(self) -> tuple[Tensor, ...]:
        for work in self._works:
            work.wait()
        return self._here


def _gather(x: Tensor, place: _Place) -> Tensor:
    """The parts of all ranks, one behind the other."""
    x = x.contiguous()
    parts = x.new_empty((place.world * x.shape[0], *x.shape[1:]))
    _all_gather(parts, x, group=place.group)
    return parts


# torch 2.13 gave it this name and warns of the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _sum_of_parts(x: Tensor, place: _Place) -> Tensor:
    """Of what lies for all ranks one behind the other, this rank's part, summed over ranks in their order."""
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x.contiguous(), group=place.group)
    return parts.unflatten(0, (place.world, -1)).sum(0)


# Both directions ------------------------------------------------------------------------------------------------------


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Part(NamedTuple):
    """What one rank holds of a problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    lengths: _Lengths
    flags: Flags
    place: _Place


class _ContextParallel(torch.autograd.Function):
    """Packed q, k, v of this rank to its out and lse."""

    @staticmethod
    def forward(ctx: Any, q, k, v, sink, lengths: _Lengths, flags: Flags, place: _Place, method: str):  # type: ignore[override]
        run = _ring_forward if method == "ring" else _gather_forward
        out, lse = run(_Part(q, k, v, sink, lengths, flags, place))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, q, k, v, sink, lengths.whole)
        ctx.others = lengths.max_part, flags, place, method
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):  # type: ignore[override]
        out, lse, q, k, v, sink, whole = ctx.saved_tensors
        max_part, flags, place, method = ctx.others
        saved = Saved(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        run = _ring_backward if method == "ring" else _gather_backward
        dq, dk, dv, dsink = run(saved, _Part(q, k, v, sink, _Lengths(whole, max_part), flags, place))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None, None, None


def _ring_forward(part: _Part) -> tuple[Tensor, Tensor]:
    q, k, v, sink, lengths, flags, place = part
    states = None
    for step in range(place.world):
        passing = _Passing((k, v), place) if step + 1 < place.world else None
        # The sink is one logit of each row: the first state alone has it.
        out, lse = _ring_call(lengths, flags, place, (place.rank - step) % place.world).forward(
            q, k, v, sink if step == 0 else None
        )
        out = out.to(_accumulator(q))
        states = (out, lse) if states is None else merge_states((states[0], out), (states[1], lse))
        if passing is not None:
            k, v = passing.wait()
    assert states is not None
    return states[0].to(q.dtype), states[1]


def _ring_backward(saved: Saved, part: _Part) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, sink, lengths, flags, place = part
    dtype = _accumulator(q)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dkv: tuple[Tensor, ...] = tuple(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    dsink, of_others = None, None
    for step in range(place.world):
        passing = _Passing((k, v), place) if step + 1 < place.world else None
        with_sink = sink if step == 0 else None
        call = _ring_call(lengths, flags, place, (place.rank - step) % place.world)
        dq_part, *dkv_part, dsink_part = call.backward(saved, q, k, v, with_sink)
        dq += dq_part
        dsink = dsink_part if with_sink is not None else dsink
        if of_others is not None:  # what the ranks before have added to these keys' gradients
            dkv = of_others.wait()
        dkv = tuple(total + part for total, part in zip(dkv, dkv_part))
        of_others = _Passing(dkv, place) if place.world > 1 else None
        if passing is not None:
            k, v = passing.wait()
    if of_others is not None:
        dkv = of_others.wait()
    return dq, dkv[0], dkv[1], dsink


def _gather_forward(part: _Part) -> tuple[Tensor, Tensor]:
    q, k, v, sink, lengths, flags, place = part
    order = _order(lengths.whole, place, place.world * q.shape[0])
    k, v = (_gather(x, place)[order] for x in (k, v))
    states = [call.forward(q, k, v, sink) for call in _gather_calls(lengths, flags, place)]
    if len(states) == 1:
        return states[0]
    # Each row is of one of them, and idle in the other.
    return merge_states(*zip(*states))  # type: ignore[arg-type]


def _gather_backward(saved: Saved, part: _Part) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, sink, lengths, flags, place = part
    order = _order(lengths.whole, place, place.world * q.shape[0])
    k, v = (_gather(x, place)[order] for x in (k, v))
    calls = _gather_calls(lengths, flags, place)
    grads = [call.backward(saved, q, k, v, sink) for call in calls]
    dtype = _accumulator(q)
    dq, dk, dv, dsink = (sum(x[1:], x[0].to(dtype)) for x in zip(*grads))
    back = torch.empty_like(order).scatter_(0, order.long(), torch.arange(len(order), device=order.device).to(order))
    dk, dv = (_sum_of_parts(x[back], place) for x in (dk, dv))
    return dq, dk, dv, None if sink is None else dsink.to(sink.dtype)
