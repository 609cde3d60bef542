"""Tensor and data parallelism: sharding strategies of fa4's operators on DTensors, by batch or heads, no messages."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..runtime.spec import AttentionInputs, Saved


def register_dtensor() -> None:
    """Let `flash_attn_func` and `flash_attn_varlen_func` take DTensors, sharded by heads or (not packed) by batch.

    q, k and v must have the same sharding, and results get it too: ranks send no messages. If query heads are sharded,
    a single key/value head is replicated, and its gradients are partial sums. A sink is sharded with the heads, or
    replicated if the batch is sharded. DTensor redistributes other placements first, as for any operator. A call raises
    if the number of key/value heads is not a multiple of the ranks.

    Raises:
        ImportError: this torch has no torch.distributed.tensor.experimental.register_sharding.
    """
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.fa4.forward.default)(_forward)
    register_sharding(torch.ops.fa4.backward.default)(_backward)


_Placements = list[Any]
_TENSORS = AttentionInputs._fields[:8]
_GRADIENTS = ("dq", "dk", "dv", "dsink")


def _strategies(inputs: AttentionInputs) -> list[dict[str, Any]]:
    """Return the strategies that need no message: placements by names of tensors. Replicated is one on all meshes.

    Raises:
        ValueError: q, k and v are sharded by heads, and a rank would get part of a group of query heads.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    dense = inputs.cu_seqlens_q is None
    lead = 1 if dense else 0  # the axis of heads in lse; in q it is lead + 1
    everything = (*_TENSORS, "out", "lse", *_GRADIENTS)
    replicated: dict[str, Any] = dict.fromkeys(everything, Replicate())
    heads = replicated | dict.fromkeys(("q", "k", "v", "out", "dq", "dk", "dv"), Shard(lead + 1))
    heads |= {"lse": Shard(lead), "sink": Shard(0), "dsink": Shard(0)}
    strategies = [replicated, heads]
    if inputs.k.shape[lead + 1] == 1:  # all query heads share it
        strategies.append({**heads, **dict.fromkeys(("k", "v"), Replicate()), **dict.fromkeys(("dk", "dv"), Partial())})
    if dense:
        batch_tensors = ("q", "k", "v", "out", "lse", "seqused_q", "seqused_k", "dq", "dk", "dv")
        strategies.append({**replicated, **dict.fromkeys(batch_tensors, Shard(0)), "dsink": Partial()})
    if inputs.sink is None:  # then dsink is empty
        strategies = [strategy | {"dsink": Replicate()} for strategy in strategies]
    _check_heads(inputs, lead + 1)
    return strategies


def _check_heads(inputs: AttentionInputs, axis: int) -> None:
    """Raise unless each rank gets the key/value heads of its query heads, also if only q is sharded, because DTensor
    would shard k and v too."""
    specs: Any = inputs[:3]
    heads = specs[1].shape[axis]
    for name, spec in zip("qkv", specs):
        ranks = math.prod(n for n, placement in zip(spec.mesh.shape, spec.placements) if placement.is_shard(axis))
        if heads % ranks and (name, heads) != ("q", 1):
            sharding = f"{name} is sharded by heads over {ranks} ranks"
            raise ValueError(f"{sharding}, and k has {heads} heads, expected a multiple of {ranks}")


def _arguments(strategy: dict[str, Any], inputs: AttentionInputs, others: int) -> _Placements:
    """Return placements of the operator's arguments, tensors and `others`: None for arguments that are no tensors."""
    placements = [strategy[name] if getattr(inputs, name) is not None else None for name in _TENSORS]
    return [*placements, *[None] * (len(inputs) - len(_TENSORS) + others)]


def _forward(*arguments: Any) -> list[tuple[_Placements, _Placements]]:
    count = len(AttentionInputs._fields)
    inputs, others = AttentionInputs(*arguments[:count]), len(arguments) - count
    return [
        ([strategy["out"], strategy["lse"]], _arguments(strategy, inputs, others)) for strategy in _strategies(inputs)
    ]


def _backward(*arguments: Any) -> list[tuple[_Placements, _Placements]]:
    first, count = len(Saved._fields), len(AttentionInputs._fields)
    saved, inputs = Saved(*arguments[:first]), AttentionInputs(*arguments[first : first + count])
    placements = []
    for strategy in _strategies(inputs):
        before = [strategy["out"], strategy["lse"], strategy["out"], None if saved.dlse is None else strategy["lse"]]
        after = [strategy[name] for name in _GRADIENTS]
        placements.append((after, before + _arguments(strategy, inputs, len(arguments) - first - count)))
    return placements
