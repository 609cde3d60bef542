"""Tensor and data parallelism: how fa4's operators run on DTensors, by batch or by heads, without any message."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..spec import AttentionInputs, Saved


def register_dtensor() -> None:
    """Let `flash_attn_func` and `flash_attn_varlen_func` take DTensors that are sharded by heads, or, padded, by batch.

    q, k and v are to be sharded alike, and results are sharded as they are: no rank needs what another one has. One
    key/value head is replicated where query heads are sharded, and its gradients are partial sums. A sink is sharded
    with the heads, or replicated beside a batch. Other placements are first redistributed by DTensor, as for any
    operator. Key/value heads that the ranks do not divide are refused at the call.

    Raises:
        ImportError: this torch has no torch.distributed.tensor.experimental.register_sharding.
    """
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.fa4.forward.default)(_forward)
    register_sharding(torch.ops.fa4.backward.default)(_backward)


_Placements = list[Any]
_TENSORS = ("q", "k", "v", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_GRADIENTS = ("dq", "dk", "dv", "dsink")


def _ways(inputs: AttentionInputs) -> list[dict[str, Any]]:
    """The placements that need no message, by the names of tensors. There is one on all meshes: replicated.

    Raises:
        ValueError: q, k and v are sharded by heads, and a rank would get a part of a group.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    dense = inputs.cu_seqlens_q is None
    lead = 1 if dense else 0  # the axis of lse that is heads; of q it is one further
    everything = (*_TENSORS, "out", "lse", *_GRADIENTS)
    replicated: dict[str, Any] = dict.fromkeys(everything, Replicate())
    heads = replicated | dict.fromkeys(("q", "k", "v", "out", "dq", "dk", "dv"), Shard(lead + 1))
    heads |= {"lse": Shard(lead), "sink": Shard(0), "dsink": Shard(0)}
    ways = [replicated, heads]
    if inputs.k.shape[lead + 1] == 1:  # each rank's query heads share it
        ways.append({**heads, **dict.fromkeys(("k", "v"), Replicate()), **dict.fromkeys(("dk", "dv"), Partial())})
    if dense:
        of_batch = ("q", "k", "v", "out", "lse", "seqused_q", "seqused_k", "dq", "dk", "dv")
        ways.append({**replicated, **dict.fromkeys(of_batch, Shard(0)), "dsink": Partial()})
    if inputs.sink is None:  # then dsink is empty
        ways = [way | {"dsink": Replicate()} for way in ways]
    _check_heads(inputs, lead + 1)
    return ways


def _check_heads(inputs: AttentionInputs, axis: int) -> None:
    """A rank's key/value heads must be those of its query heads, also where only q is sharded: DTensor would shard k
    and v along with it."""
    specs: Any = inputs[:3]
    heads = specs[1].shape[axis]
    for name, spec in zip("qkv", specs):
        ranks = math.prod(n for n, placed in zip(spec.mesh.shape, spec.placements) if placed.is_shard(axis))
        if heads % ranks and (name, heads) != ("q", 1):
            placed = f"{name} is sharded by heads over {ranks} ranks"
            raise ValueError(f"{placed}, and k has {heads} heads, expected a multiple of {ranks}")


def _arguments(way: dict[str, Any], inputs: AttentionInputs, others: int) -> _Placements:
    """Placements of the operator's arguments, tensors and `others`: None for what is no tensor."""
    placed = [way[name] if getattr(inputs, name) is not None else None for name in _TENSORS]
    return [*placed, *[None] * (len(inputs) - len(_TENSORS) + others)]


def _forward(*arguments: Any) -> list[tuple[_Placements, _Placements]]:
    count = len(AttentionInputs._fields)
    inputs, others = AttentionInputs(*arguments[:count]), len(arguments) - count
    return [([way["out"], way["lse"]], _arguments(way, inputs, others)) for way in _ways(inputs)]


def _backward(*arguments: Any) -> list[tuple[_Placements, _Placements]]:
    first, count = len(Saved._fields), len(AttentionInputs._fields)
    saved, inputs = Saved(*arguments[:first]), AttentionInputs(*arguments[first : first + count])
    placements = []
    for way in _ways(inputs):
        before = [way["out"], way["lse"], way["out"], None if saved.dlse is None else way["lse"]]
        after = [way[name] for name in _GRADIENTS]
        placements.append((after, before + _arguments(way, inputs, len(arguments) - first - count)))
    return placements
