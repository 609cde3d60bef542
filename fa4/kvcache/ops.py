"""torch operators of calls with a cache: `fa4::append_to_cache`, which changes it, and `fa4::forward_with_cache`.

A dense cache in its own order whose rows are all in use is an ordinary batch, and goes the way of `fa4::forward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import dispatch, mod_ops, ops, run
from ..device import chip_of
from ..mods.record import Mods
from ..plan import Plan
from ..remembered import Remembered
from ..spec import AttentionInputs, AttentionSpec, Cache, CacheSpec, Flags
from .append import append
from .record import Appended

FORWARD = (AttentionInputs, Cache, Mods, Flags)
NO_MODS = Mods([], [], "", "", [], 0, 0, [])

_APPEND_SCHEMA = ops.schema((Appended,))
for _number, _name in enumerate(("k_cache", "v_cache")):
    _APPEND_SCHEMA = _APPEND_SCHEMA.replace(f"Tensor {_name}", f"Tensor({'ab'[_number]}!) {_name}")
ops.library.define(f"append_to_cache({_APPEND_SCHEMA}) -> (Tensor q, Tensor seqlens)")
ops.library.define(f"forward_with_cache({ops.schema(FORWARD)}) -> (Tensor out, Tensor lse)")


def route(inputs: AttentionInputs, cache: Cache | None, mods: Mods | None, flags: Flags) -> tuple[AttentionSpec, Plan]:
    """The problem and its plan."""
    chip, spec = chip_of(inputs.q.device), AttentionSpec.of(inputs, flags, mods, cache)
    dispatch.warn_of_tiled_torch(spec, inputs.extent, chip, flags.backend)
    return spec, dispatch.plan(spec, inputs.extent, chip, flags.backend)


def is_plain(inputs: AttentionInputs, cache: Cache) -> bool:
    """Whether the cache is no more than a batch of sequences. Lengths are cut to a cache by those that know of one."""
    return cache.spec(inputs) == CacheSpec() and not inputs.varlen and inputs.seqused_k is None


def forward(
    watched: bool, inputs: AttentionInputs, cache: Cache, mods: Mods | None, flags: Flags
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call on a cache."""
    if is_plain(inputs, cache):
        if mods is not None:
            return mod_ops.forward(watched, inputs, mods, flags)
        return torch.ops.fa4.forward(*inputs, *flags) if watched else ops.route(inputs, flags).forward(inputs)
    arguments = inputs, cache, NO_MODS if mods is None else mods, flags
    if watched:
        return torch.ops.fa4.forward_with_cache(*(x for record in arguments for x in record))
    return _run(*arguments)


class Given(NamedTuple):
    """What a call says besides its tensors, as the caller wrote it."""

    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    backend: Any
    num_splits: Any
    batch_invariant: Any
    rotary_interleaved: Any
    max_seqlen_q: Any
    max_seqlen_k: Any


class Known:
    """What came of a call's checks, and its way to a kernel: the same whenever a call of such shapes comes again."""

    def __init__(self, flags: Flags, max_seqlens: tuple[int, int]) -> None:
        self.flags, self.max_seqlens = flags, max_seqlens
        self._forward: run.Forward | None = None
        self._is_plain = False

    def run(self, inputs: AttentionInputs, cache: Cache) -> tuple[Tensor, Tensor]:
        """(out, lse) of a call without mods."""
        if self._forward is None:
            self._is_plain = is_plain(inputs, cache)
            if self._is_plain:
                self._forward = ops.route(inputs, self.flags).forward
            else:
                self._forward = run.Forward(inputs, *route(inputs, cache, None, self.flags))
        return self._forward(inputs) if self._is_plain else self._forward(inputs, None, cache)


calls: Remembered[Known] = Remembered()


def key_of(tensors: tuple, sink: Tensor | None, given: Given) -> tuple | None:
    """What tells a call from those with other flags or another way; None where that is more than can be told."""
    if forward_ad._current_level >= 0 or isinstance(given.max_seqlen_q, Tensor):  # to be refused, or without a value
        return None
    grad = torch.is_grad_enabled()
    try:
        layouts = [
            x
            if x is None or type(x) is int
            else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device, grad and x.requires_grad)
            for x in (*tensors, sink)
        ]
        # True equals 1, and is none.
        return *layouts, *given, *map(type, given), *map(type, given.window_size)
    except (RuntimeError, TypeError, AttributeError):  # no tensor, one without strides, or no window, to be refused
        return None


def append_rows(watched: bool, appended: Appended) -> tuple[Tensor, Tensor]:
    """(q, rotated if that was asked for, and the rows of each sequence then in the cache)."""
    q, seqlens = torch.ops.fa4.append_to_cache(*appended) if watched else append(appended)
    return (appended.q if appended.cos is None else q), seqlens


def _run(inputs: AttentionInputs, cache: Cache, mods: Mods, flags: Flags) -> tuple[Tensor, Tensor]:
    given = mods if mods.score or mods.mask or mods.blocks else None
    return run.forward(inputs, *route(inputs, cache, given, flags), given, cache)


def _forward(*arguments):
    return _run(*ops.split(arguments, FORWARD))


def _forward_fake(*arguments):
    inputs, _, _, flags = ops.split(arguments, FORWARD)
    return ops.fake_outputs(inputs, flags)


def _append(*arguments):
    return append(Appended(*arguments))


def _append_fake(*arguments):
    a = Appended(*arguments)
    q = a.q.new_empty(0 if a.cos is None else a.q.shape)
    return q, a.cache_seqlens.new_empty(a.cache_seqlens.shape)


ops.library.impl("forward_with_cache", _forward, "CompositeExplicitAutograd")
ops.library.impl("append_to_cache", _append, "CompositeExplicitAutograd")
torch.library.register_fake("fa4::forward_with_cache", _forward_fake, lib=ops.library)
torch.library.register_fake("fa4::append_to_cache", _append_fake, lib=ops.library)
