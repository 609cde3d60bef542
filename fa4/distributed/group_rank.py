"""Who holds which rows: the zigzag of chunks over ranks, and tensors cut and joined by it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks
from .agree import agreeing


class GroupRank(NamedTuple):
    """This process in its group."""

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
    """This rank's part of what every rank has whole: tokens, positions, or q, k, v, along the axis of positions.

    Args:
        dim: that axis; of packed sequences, with `cu_seqlens`, that of all rows.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: there is no such axis, or a length is no multiple of 2 * ranks.
    """
    place = GroupRank.of(group)
    _check_axis(x, dim)
    rows, many = x.shape[dim], 2 * place.world
    if cu_seqlens is None:
        if rows % many:
            raise ValueError(f"x has {rows} entries on axis {dim}, expected multiples of {many}: 2 * ranks")
        cu_seqlens = _one_sequence(rows, x.device)
    else:
        check_lengths(cu_seqlens, place, rows, x, "x")
    return x.index_select(dim, held(cu_seqlens, place, rows // place.world))


def unshard(
    x: Tensor, *, dim: int = 1, group: dist.ProcessGroup | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The whole of what `shard` cut, on every rank; without a gradient.

    Raises:
        TypeError, ValueError: as `shard`.
    """
    place = GroupRank.of(group)
    with agreeing(place) as said:
        _check_axis(x, dim)
        rows = x.shape[dim]
        if cu_seqlens is not None:
            check_lengths(cu_seqlens, place, rows * place.world, x, "x")
        elif rows % 2:
            raise ValueError(f"x has {rows} entries on axis {dim}, expected multiples of 2: chunks of a sequence")
        said |= {"x": (tuple(x.shape), x.dtype, x.device.type), "dim": dim % x.ndim, "cu_seqlens": values(cu_seqlens)}
    whole = _one_sequence(rows * place.world, x.device) if cu_seqlens is None else cu_seqlens
    parts = Gathering(x.detach().movedim(dim, 0), place).wait()
    return parts[order(whole, place, parts.shape[0])].movedim(0, dim)


def _check_axis(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}, expected a torch.Tensor")
    if x.is_nested or x.layout is not torch.strided:
        came = "is a nested tensor" if x.is_nested else f"has layout {x.layout}"
        raise TypeError(f"x {came}, expected a plain one")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim is a {type(dim).__name__}, expected an int")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim is {dim}, expected an axis of x, which has shape {checks.shown(x)}")


def check_lengths(cu_seqlens: Tensor | None, place: GroupRank, rows: int, like: Tensor, name: str) -> Tensor:
    """cu_seqlens of whole sequences that have `rows` rows on all ranks, once it is known to be right; its values are
    looked at where that is free or asked for. like, name: the tensor whose device it has to be on."""
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.device != like.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, expected {like.device} like {name}")
    checks.check_int32("cu_seqlens", cu_seqlens, like, None)
    assert cu_seqlens is not None
    if not checks.checks_lengths(cu_seqlens.device.type):
        return cu_seqlens
    bounds, many = cu_seqlens.tolist(), 2 * place.world
    if bounds[0] != 0 or bounds[-1] != rows or sorted(bounds) != bounds:
        raise ValueError(
            f"cu_seqlens is {bounds}, expected 0 first, non-decreasing, and {rows} at the end: rows of all ranks"
        )
    wrong = [n for n in cu_seqlens.diff().tolist() if n % many]
    if wrong:
        raise ValueError(f"cu_seqlens has sequences of {wrong[:4]} rows, expected multiples of {many}: 2 * ranks")
    return cu_seqlens


def values(cu_seqlens: Tensor | None) -> list[int] | None:
    """Where they may be looked at."""
    looks = cu_seqlens is not None and checks.checks_lengths(cu_seqlens.device.type)
    return cu_seqlens.tolist() if cu_seqlens is not None and looks else None


def _one_sequence(rows: int, device: torch.device) -> Tensor:
    return torch.tensor([0, rows], dtype=torch.int32, device=device)


def held(cu_seqlens: Tensor, place: GroupRank, rows: int) -> Tensor:
    """(rows,): which rows of the whole this rank holds, in its order."""
    part = cu_seqlens // place.world
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(part, row, right=True) - 1
    chunk = (part.diff() // 2)[sequence]
    at = row - part[sequence]
    late = at >= chunk
    index = torch.where(late, 2 * place.world - 1 - place.rank, place.rank)
    return cu_seqlens[sequence] + index * chunk + at - late * chunk


def order(cu_seqlens: Tensor, place: GroupRank, rows: int) -> Tensor:
    """(rows,): where each row of the whole lies among the parts of all ranks, one behind the other."""
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    chunk = (cu_seqlens.diff() // (2 * place.world))[sequence]
    at = row - cu_seqlens[sequence]
    index = at // chunk
    late = index >= place.world
    rank = torch.where(late, 2 * place.world - 1 - index, index)
    return rank * (rows // place.world) + (cu_seqlens // place.world)[sequence] + late * chunk + at % chunk


# Messages -------------------------------------------------------------------------------------------------------------


class Passing:
    """Tensors on their way to the next rank, and those of the rank before on their way here."""

    def __init__(self, tensors: tuple[Tensor, ...], place: GroupRank) -> None:
        self._sent = tuple(x.contiguous() for x in tensors)
        self._here = tuple(torch.empty_like(x) for x in self._sent)
        to, of = place.peer(place.rank + 1), place.peer(place.rank - 1)
        works = [dist.P2POp(dist.isend, x, to, place.group) for x in self._sent]
        works += [dist.P2POp(dist.irecv, x, of, place.group) for x in self._here]
        self._works = dist.batch_isend_irecv(works)

    @property
    def under_way(self) -> bool:
        """Whether nobody has waited for them."""
        return bool(self._works)

    def wait(self) -> tuple[Tensor, ...]:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return self._here


class Gathering:
    """The parts of all ranks on their way to every rank."""

    def __init__(self, x: Tensor, place: GroupRank) -> None:
        self._sent = x.contiguous()
        self._parts = x.new_empty((place.world * x.shape[0], *x.shape[1:]))
        self._work = _all_gather(self._parts, self._sent, group=place.group, async_op=True)

    def wait(self) -> Tensor:
        """(ranks * n, ...) of (n, ...): one behind the other."""
        self._work.wait()
        return self._parts


# torch 2.13 gave it this name and warns of the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Summing:
    """What every rank has for every rank, one behind the other, on its way to those whom it is for."""

    def __init__(self, x: Tensor, place: GroupRank) -> None:
        self._sent = x.contiguous()
        self._parts, self._world = torch.empty_like(self._sent), place.world
        self._work = dist.all_to_all_single(self._parts, self._sent, group=place.group, async_op=True)

    def wait(self) -> Tensor:
        """(n, ...) of (ranks * n, ...): this rank's, summed in the order of ranks."""
        self._work.wait()
        return self._parts.unflatten(0, (self._world, -1)).sum(0)
