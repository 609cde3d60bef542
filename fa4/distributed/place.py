"""Who holds which rows: the zigzag of chunks over ranks, and tensors cut and joined by it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Place(NamedTuple):
    """This process in its group."""

    rank: int
    world: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Place:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        return Place(dist.get_rank(group), dist.get_world_size(group), group)

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
        ValueError: a length is no multiple of 2 * ranks.
    """
    place = Place.of(group)
    cu_seqlens = _bounds(x, dim, cu_seqlens)
    check_lengths(cu_seqlens, place, x.shape[dim] // place.world)
    return x.index_select(dim, held(cu_seqlens, place, x.shape[dim] // place.world))


def unshard(
    x: Tensor, *, dim: int = 1, group: dist.ProcessGroup | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The whole of what `shard` cut, on every rank; without a gradient."""
    place = Place.of(group)
    parts = Gathering(x.detach().movedim(dim, 0), place).wait()
    whole = _bounds(parts, 0, cu_seqlens)
    return parts[order(whole, place, parts.shape[0])].movedim(0, dim)


def check_lengths(cu_seqlens: Tensor, place: Place, rows: int) -> None:
    """Where looking is free: a GPU would stall."""
    if cu_seqlens.device.type != "cpu":
        return
    check_multiples(cu_seqlens.diff().tolist(), place)
    if int(cu_seqlens[-1]) != rows * place.world:
        raise ValueError(
            f"cu_seqlens ends with {int(cu_seqlens[-1])}, expected {rows * place.world}: rows of all ranks"
        )


def check_multiples(lengths: list[int], place: Place) -> None:
    wrong = [n for n in lengths if n % (2 * place.world)]
    if wrong:
        raise ValueError(f"sequences have lengths {wrong[:4]}, expected multiples of {2 * place.world}: 2 * ranks")


def _bounds(x: Tensor, dim: int, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is not None:
        return cu_seqlens
    return torch.tensor([0, x.shape[dim]], dtype=torch.int32, device=x.device)


def held(cu_seqlens: Tensor, place: Place, rows: int) -> Tensor:
    """(rows,): which rows of the whole this rank holds, in its order."""
    part = cu_seqlens // place.world
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(part, row, right=True) - 1
    chunk = (part.diff() // 2)[sequence]
    at = row - part[sequence]
    late = at >= chunk
    index = torch.where(late, 2 * place.world - 1 - place.rank, place.rank)
    return cu_seqlens[sequence] + index * chunk + at - late * chunk


def order(cu_seqlens: Tensor, place: Place, rows: int) -> Tensor:
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

    def __init__(self, tensors: tuple[Tensor, ...], place: Place) -> None:
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


class Gathering:
    """The parts of all ranks on their way to every rank."""

    def __init__(self, x: Tensor, place: Place) -> None:
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

    def __init__(self, x: Tensor, place: Place) -> None:
        self._sent = x.contiguous()
        self._parts, self._world = torch.empty_like(self._sent), place.world
        self._work = dist.all_to_all_single(self._parts, self._sent, group=place.group, async_op=True)

    def wait(self) -> Tensor:
        """(n, ...) of (ranks * n, ...): this rank's, summed in the order of ranks."""
        self._work.wait()
        return self._parts.unflatten(0, (self._world, -1)).sum(0)
