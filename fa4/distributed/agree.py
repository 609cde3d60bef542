"""Agreement of ranks: either a call is valid on all ranks, or all ranks refuse it before its first message.

If one rank raises while others send, the group gets out of step: the next call receives this call's messages, or waits
forever. So ranks exchange their arguments where the host sends the messages anyway: in groups of gloo or MPI only. In
other groups, such as NCCL, hosts would wait for each other at each call; FA4_CHECK_LENGTHS=1 enables the exchange
there. The decision depends on the group and the environment only, because the tensors of a rank may be wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..torch_ops.checks import checks_lengths

if TYPE_CHECKING:
    from .group_rank import GroupRank


@contextlib.contextmanager
def agreeing(group_rank: GroupRank) -> Iterator[dict[str, Any]]:
    """Context for the checks of a call. Fill the yielded dict with the arguments that must be equal on every rank.

    Raises:
        ValueError: the checks of another rank raised, or an argument differs. This rank's own errors pass through.
    """
    arguments: dict[str, Any] = {}
    try:
        yield arguments
    except Exception as error:
        _exchange(group_rank, f"{type(error).__name__}: {error}", {})
        raise
    refusals, arguments_of_ranks = _exchange(group_rank, None, arguments)
    for rank, refusal in enumerate(refusals):
        if refusal is not None:
            raise ValueError(f"rank {rank} of the group refused the call: {refusal}")
    for rank, other in enumerate(arguments_of_ranks):
        for name, value in arguments.items():
            if other[name] != value:
                raise ValueError(
                    f"{name} is {other[name]} on rank {rank} and {value} on rank {group_rank.rank}, expected the same "
                    "on every rank"
                )


def _exchange(group_rank: GroupRank, refusal: str | None, arguments: dict[str, Any]) -> tuple[list, list]:
    """Return the error text (or None) and the arguments of each rank; two empty lists if ranks do not exchange them."""
    if group_rank.world == 1 or not _should_exchange(dist.get_backend_config(group_rank.group)):
        return [], []
    gathered: list[Any] = [None] * group_rank.world
    dist.all_gather_object(gathered, (refusal, arguments), group=group_rank.group)
    return [refusal for refusal, _ in gathered], [arguments for _, arguments in gathered]


def _should_exchange(config: str) -> bool:
    """Return whether ranks exchange their arguments. config: torch's list of backends, such as "cpu:gloo,cuda:nccl"."""
    backends = {pair.split(":")[-1] for pair in config.split(",")}
    return "fake" not in backends and checks_lengths("cpu" if backends <= {"gloo", "mpi"} else "cuda")
