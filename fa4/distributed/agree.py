"""A call on several ranks is right on all of them, or refused on all of them before its first message.

A rank that raises where others send leaves the group out of step: the next call takes the messages of this one, or
waits for ever. So ranks tell each other what they were asked, where hosts send the messages anyway: in a group of gloo
or MPI alone. In others, NCCL among them, hosts would wait for each other at each call; FA4_CHECK_LENGTHS=1 asks for it.
Whether ranks talk depends on the group and the environment alone: tensors may be wrong on one rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..checks import checks_lengths

if TYPE_CHECKING:
    from .group_rank import GroupRank


@contextlib.contextmanager
def agreeing(place: GroupRank) -> Iterator[dict[str, Any]]:
    """A context for the checks of a call. It yields a dict to be filled with what has to be the same on every rank, by
    arguments' names.

    Raises:
        ValueError: the checks of another rank raised, or an argument differs. What the checks here raise stays.
    """
    said: dict[str, Any] = {}
    try:
        yield said
    except Exception as error:
        _tell(place, f"{type(error).__name__}: {error}", {})
        raise
    refusals, of_ranks = _tell(place, None, said)
    for rank, refusal in enumerate(refusals):
        if refusal is not None:
            raise ValueError(f"rank {rank} of the group refused the call: {refusal}")
    for rank, other in enumerate(of_ranks):
        for name, value in said.items():
            if other[name] != value:
                raise ValueError(
                    f"{name} is {other[name]} on rank {rank} and {value} on rank {place.rank}, expected the same on "
                    "every rank"
                )


def _tell(place: GroupRank, refusal: str | None, said: dict[str, Any]) -> tuple[list, list]:
    """What each rank's checks raised, as text, and what each was asked; nothing where ranks do not talk about it."""
    if place.world == 1 or not _talks(dist.get_backend_config(place.group)):
        return [], []
    told: list[Any] = [None] * place.world
    dist.all_gather_object(told, (refusal, said), group=place.group)
    return [refusal for refusal, _ in told], [said for _, said in told]


def _talks(config: str) -> bool:
    """Of a group with a backend for each kind of device, as torch shows them: "cpu:gloo,cuda:nccl"."""
    backends = {pair.split(":")[-1] for pair in config.split(",")}
    return "fake" not in backends and checks_lengths("cpu" if backends <= {"gloo", "mpi"} else "cuda")
