"""Rows of each rank (the zigzag of chunks over ranks), `shard` and `unshard`, and messages between ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_ops import checks
from .agree import agreeing


class GroupRank(NamedTuple):
    """Rank of this process in its group."""

    rank: int
    world: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> GroupRank:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"group is a {type(group).__name__}, expected a torch.distributed.ProcessGroup or None")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("group does not have this process, expected one that has it")
        return GroupRank(rank, dist.get_world_size(group), group)

    def peer(self, rank: int) -> int:
        rank %= self.world
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def shard(
    x: Tensor, *, dim: int = 1, group: dist.ProcessGroup | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return this rank's part of a tensor that every rank has whole: tokens, positions, or q, k, v.

    Args:
        dim: the axis of positions; of packed sequences, with `cu_seqlens`, the axis of all rows.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: x has no axis dim, or a length is not a multiple of 2 * ranks.
    """
    group_rank = GroupRank.of(group)
    _check_axis(x, dim)
    rows, multiple = x.shape[dim], 2 * group_rank.world
    if cu_seqlens is None:
        if rows % multiple:
            raise ValueError(f"x has {rows} entries on axis {dim}, expected multiples of {multiple}: 2 * ranks")
        cu_seqlens = _one_sequence(rows, x.device)
    else:
        check_lengths(cu_seqlens, group_rank, rows, x, "x")
    return x.index_select(dim, rows_of_rank(cu_seqlens, group_rank, rows // group_rank.world))


def unshard(
    x: Tensor, *, dim: int = 1, group: dist.ProcessGroup | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return the whole tensor on every rank: the inverse of `shard`, without a gradient.

    Raises:
        TypeError, ValueError: as `shard`.
    """
    group_rank = GroupRank.of(group)
    with agreeing(group_rank) as arguments:
        _check_axis(x, dim)
        rows = x.shape[dim]
        if cu_seqlens is not None:
            check_lengths(cu_seqlens, group_rank, rows * group_rank.world, x, "x")
        elif rows % 2:
            raise ValueError(f"x has {rows} entries on axis {dim}, expected multiples of 2: chunks of a sequence")
        arguments |= {
            "x": (tuple(x.shape), x.dtype, x.device.type),
            "dim": dim % x.ndim,
            "cu_seqlens": host_values(cu_seqlens),
        }
    whole = _one_sequence(rows * group_rank.world, x.device) if cu_seqlens is None else cu_seqlens
    parts = AllGather(x.detach().movedim(dim, 0), group_rank).wait()
    return parts[order(whole, group_rank, parts.shape[0])].movedim(0, dim)


def _check_axis(x: Tensor, dim: int) -> None:
    checks.check_plain("x", x, x)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim is a {type(dim).__name__}, expected an int")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim is {dim}, expected an axis of x, which has shape {checks.shown(x)}")


def check_lengths(cu_seqlens: Tensor | None, group_rank: GroupRank, rows: int, like: Tensor, name: str) -> Tensor:
    """Check and return cu_seqlens of whole sequences with `rows` rows on all ranks. like, name: the tensor whose device
    is required. Values are checked only if reading them is free or enabled."""
    checks.check_int32("cu_seqlens", cu_seqlens, like, None, name)
    assert cu_seqlens is not None
    if not checks.checks_lengths(cu_seqlens.device.type):
        return cu_seqlens
    bounds, multiple = cu_seqlens.tolist(), 2 * group_rank.world
    if bounds[0] != 0 or bounds[-1] != rows or sorted(bounds) != bounds:
        raise ValueError(
            f"cu_seqlens is {bounds}, expected 0 first, non-decreasing, and {rows} at the end: rows of all ranks"
        )
    wrong = [n for n in cu_seqlens.diff().tolist() if n % multiple]
    if wrong:
        raise ValueError(f"cu_seqlens has sequences of {wrong[:4]} rows, expected multiples of {multiple}: 2 * ranks")
    return cu_seqlens


def host_values(cu_seqlens: Tensor | None) -> list[int] | None:
    """Return the values as a list; None if the host does not read them."""
    readable = cu_seqlens is not None and checks.checks_lengths(cu_seqlens.device.type)
    return cu_seqlens.tolist() if cu_seqlens is not None and readable else None


def _one_sequence(rows: int, device: torch.device) -> Tensor:
    return torch.tensor([0, rows], dtype=torch.int32, device=device)


def rows_of_rank(cu_seqlens: Tensor, group_rank: GroupRank, rows: int) -> Tensor:
    """Return (rows,): the indices in the whole tensor of this rank's rows."""
    part = cu_seqlens // group_rank.world
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(part, row, right=True) - 1
    chunk = (part.diff() // 2)[sequence]
    offset = row - part[sequence]
    late = offset >= chunk
    chunk_index = torch.where(late, 2 * group_rank.world - 1 - group_rank.rank, group_rank.rank)
    return cu_seqlens[sequence] + chunk_index * chunk + offset - late * chunk


def order(cu_seqlens: Tensor, group_rank: GroupRank, rows: int) -> Tensor:
    """Return (rows,): the index of each row of the whole tensor in the concatenated parts of all ranks."""
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    chunk = (cu_seqlens.diff() // (2 * group_rank.world))[sequence]
    offset = row - cu_seqlens[sequence]
    chunk_index = offset // chunk
    late = chunk_index >= group_rank.world
    rank = torch.where(late, 2 * group_rank.world - 1 - chunk_index, chunk_index)
    return (
        rank * (rows // group_rank.world) + (cu_seqlens // group_rank.world)[sequence] + late * chunk + offset % chunk
    )


# Messages -------------------------------------------------------------------------------------------------------------


class RingExchange:
    """Pending exchange: tensors sent to the next rank, and those received from the previous rank."""

    def __init__(self, tensors: tuple[Tensor, ...], group_rank: GroupRank) -> None:
        self._sent = tuple(x.contiguous() for x in tensors)
        self._received = tuple(torch.empty_like(x) for x in self._sent)
        destination, source = group_rank.peer(group_rank.rank + 1), group_rank.peer(group_rank.rank - 1)
        works = [dist.P2POp(dist.isend, x, destination, group_rank.group) for x in self._sent]
        works += [dist.P2POp(dist.irecv, x, source, group_rank.group) for x in self._received]
        self._works = dist.batch_isend_irecv(works)

    @property
    def is_pending(self) -> bool:
        """True until `wait` is called."""
        return bool(self._works)

    def wait(self) -> tuple[Tensor, ...]:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return self._received


class AllGather:
    """Pending all-gather of the parts of all ranks."""

    def __init__(self, x: Tensor, group_rank: GroupRank) -> None:
        self._sent = x.contiguous()
        self._parts = x.new_empty((group_rank.world * x.shape[0], *x.shape[1:]))
        self._work = _all_gather(self._parts, self._sent, group=group_rank.group, async_op=True)

    def wait(self) -> Tensor:
        """Return the concatenated parts: (ranks * n, ...) for parts of (n, ...)."""
        self._work.wait()
        return self._parts


# torch 2.13 warns about the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AllToAllSum:
    """Pending all-to-all: every rank sends one part to each rank (concatenated), and sums the parts it gets."""

    def __init__(self, x: Tensor, group_rank: GroupRank) -> None:
        self._sent = x.contiguous()
        self._parts, self._world = torch.empty_like(self._sent), group_rank.world
        self._work = dist.all_to_all_single(self._parts, self._sent, group=group_rank.group, async_op=True)

    def wait(self) -> Tensor:
        """Return this rank's parts, summed in the order of ranks: (n, ...) for (ranks * n, ...)."""
        self._work.wait()
        return self._parts.unflatten(0, (self._world, -1)).sum(0)
