"""torch operators of calls with a cache: `fa4::append_to_cache`, which modifies it, and `fa4::forward_with_cache`.

A dense cache in batch order whose rows are all in use is an ordinary batch, and uses `fa4::forward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..mods.ir.record import Mods
from ..runtime.spec import AttentionInputs, Cache, CacheSpec, Flags
from ..torch_ops import ops, run
from .append import Append
from .record import AppendArguments
from .values import check_append, check_attention

FORWARD_WITH_CACHE: ops.Records = {"inputs": AttentionInputs, "cache": Cache, "mods": Mods, "flags": Flags}
NO_MODS = Mods.without_functions()


def is_plain(inputs: AttentionInputs, cache: Cache) -> bool:
    """Whether the cache is an ordinary batch. Lengths exclude that: only cache code clamps them to the capacity."""
    return cache.spec(inputs) == CacheSpec() and not inputs.varlen and inputs.seqused_k is None


def forward(inputs: AttentionInputs, cache: Cache, mods: Mods | None, flags: Flags) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a call on a cache, by the operators."""
    if is_plain(inputs, cache):
        return ops.forward(inputs, mods, flags)
    return torch.ops.fa4.forward_with_cache(*inputs, *cache, *(NO_MODS if mods is None else mods), *flags)


def append_by_operator(appended: AppendArguments) -> tuple[Tensor, Tensor]:
    """Append, and return q (rotated if requested) and the rows of each sequence then in the cache."""
    try:
        q, seqlens = torch.ops.fa4.append_to_cache(*appended)
    except RuntimeError as error:
        if "alias annotations" not in str(error):
            raise
        message = "k and v are given inside torch.func.functionalize, which does not let fa4 write k_cache and v_cache"
        raise NotImplementedError(message) from error
    return (appended.q if appended.cos is None else q), seqlens


def _run(inputs: AttentionInputs, cache: Cache, mods: Mods, flags: Flags) -> tuple[Tensor, Tensor]:
    check_attention(inputs, cache)
    used_mods = mods if mods.score or mods.mask or mods.blocks else None
    return run.forward(inputs, *ops.spec_and_plan(inputs, flags, used_mods, cache), used_mods, cache)


def _append(appended: AppendArguments) -> tuple[Tensor, Tensor]:
    check_append(appended)
    rotated, seqlens = Append(appended)(appended)
    return appended.q.new_empty(0) if rotated is None else rotated, seqlens


def _append_fake(appended: AppendArguments) -> tuple[Tensor, Tensor]:
    q, seqlens = appended.q, appended.cache_seqlens
    return q.new_empty(0 if appended.cos is None else q.shape), seqlens.new_empty(seqlens.shape)


ops.define(
    "append_to_cache", {"appended": AppendArguments}, "Tensor q, Tensor seqlens", _append, _append_fake,
    writes=("k_cache", "v_cache", "k_scales", "v_scales"),
)  # fmt: skip
ops.define("forward_with_cache", FORWARD_WITH_CACHE, "Tensor out, Tensor lse", _run, ops.fake_forward)
