"""Cached calls on a key/value cache: a call with a known signature skips the checks and goes directly to its kernels.

As in `fa4.torch_ops.calls`: a call's result is stored under its signature, and a call equal to the last one with the
same options needs none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..mods.frontend import trace_cache
from ..mods.ir.record import Mods
from ..runtime.spec import MIN_PLANNED_KEYS, AttentionInputs, Cache, Flags, rounded_keys
from ..runtime.torch_internals import modes_need_dispatcher
from ..torch_ops import checks, mod_ops, ops
from ..torch_ops.run import ForwardExecutor
from ..torch_ops.signature import MAX_ENTRIES, CallCache, routes
from .append import Append
from .ops import is_plain
from .record import AppendArguments


class CachedKvCall:
    """Results of a call's checks, and its routes to the kernels, for all calls with these shapes and any max_seqlen_q
    and max_seqlen_k.

    capacity: rows that a sequence has room for. mods: the call's mods, valid for caches within `limits`.
    """

    def __init__(self, flags: Flags, capacity: int) -> None:
        self.flags, self._capacity = flags, capacity
        self.mods: Mods | None = None
        self._limits: mod_ops.Limits | None = None
        self._append: Append | None = None
        self._forwards: dict[tuple[int, int], ForwardExecutor] = {}
        self._is_plain = False
        self.has_run = False  # whether a call has reached its kernel, so a backend serves it

    def max_seqlens(self, q: Tensor, packed: bool, max_seqlen_q: Any, max_seqlen_k: Any) -> tuple[int, int]:
        """Return the length bounds of a call; raise if they are wrong."""
        rows = q.shape[0] if packed else q.shape[1]
        if max_seqlen_q is not None:
            bound = checks.max_seqlen("max_seqlen_q", max_seqlen_q, rows)
            if not packed and bound < rows:
                raise ValueError(f"max_seqlen_q is {bound}, expected at least {rows}, the rows of q")
            rows = bound if packed else rows
        if max_seqlen_k is None:
            return rows, self._capacity
        is_plain = type(max_seqlen_k) is int and max_seqlen_k >= 0
        bound = max_seqlen_k if is_plain else checks.count("max_seqlen_k", max_seqlen_k)
        # With batch_invariant, another bound would split the keys differently.
        return rows, self._capacity if self.flags.batch_invariant else min(bound, self._capacity)

    def planned_keys(self, bound: int) -> int:
        """Return the bound of keys that sizes a launch: rounded up, because it may grow with each call."""
        return min(rounded_keys(bound), self._capacity)

    def with_mods(self, inputs: AttentionInputs, score_mod: Any, mask_mod: Any) -> CachedKvCall:
        """Add the mods of a call; raise if they do not fit it. inputs: with the caller's bounds."""
        if self._limits is None or not self._limits.has(inputs.batch, inputs.max_seqlen_k):
            mods, flags = mod_ops.prepare(inputs, self.flags, score_mod, mask_mod, None)
            if flags.needs_backward and torch.is_grad_enabled():
                raise NotImplementedError(
                    "score_mod captured a tensor that requires grad, and flash_attn_with_kvcache has no gradients: "
                    "call it under torch.no_grad()"
                )
            self.mods = mods._replace(trained=[])
            self._limits = None if torch.compiler.is_compiling() else mod_ops.Limits.of(mods)
        return self

    def append(self, appended: AppendArguments) -> tuple[Tensor, Tensor]:
        """Append, and return q (rotated if requested) and the rows of each sequence then in the cache."""
        if self._append is None:
            self._append = Append(appended)
        rotated, seqlens = self._append(appended)
        return appended.q if rotated is None else rotated, seqlens

    def run(self, inputs: AttentionInputs, cache: Cache, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (out, lse). out: the caller's, to be written, or None for a new one."""
        forward = self._forwards.get(inputs.max_seqlens)
        if forward is None:
            if not self._forwards:
                self._begin(inputs, cache)
            forward = self._forward(inputs, cache)
        return forward(inputs, self.mods, None if self._is_plain else cache, out)

    def _forward(self, inputs: AttentionInputs, cache: Cache) -> ForwardExecutor:
        if self._is_plain:
            forward = ops.route(inputs, self.flags, self.mods).forward
        else:
            forward = ForwardExecutor(inputs, *ops.spec_and_plan(inputs, self.flags, self.mods, cache))
        if len(self._forwards) >= MAX_ENTRIES:
            self._forwards.clear()
        self._forwards[inputs.max_seqlens] = forward
        self.has_run = True
        return forward

    def _begin(self, inputs: AttentionInputs, cache: Cache) -> None:
        """Compile, at the first call, the kernels that longer sequences need (from some length on with split-KV): a
        later compilation would stall all requests of a server."""
        self._is_plain = is_plain(inputs, cache)
        if self.flags.num_splits or inputs.max_seqlen_k >= self._capacity or inputs.q.is_meta:
            return
        keys = MIN_PLANNED_KEYS
        while keys < self._capacity:
            self._forward(inputs._replace(max_seqlen_k=keys), cache).compile()
            keys = rounded_keys(keys + 1)
        self._forward(inputs._replace(max_seqlen_k=self._capacity), cache).compile()


plain_calls: CallCache[CachedKvCall] = CallCache(routes)


def cache_of(score_mod: Any, mask_mod: Any) -> CallCache[CachedKvCall] | None:
    """Return the call cache for these functions; None if nothing is cached for them."""
    if modes_need_dispatcher():
        return None
    return plain_calls if score_mod is None and mask_mod is None else trace_cache.known(score_mod, mask_mod, None)
