"""Calls like an earlier one: their checks have passed and their way to a kernel is known, found by one look.

Checks, flags, the choice of backend and tiles and the shapes of results follow from a call's shapes, strides, dtypes,
devices and options. So all of that is a key, under which the first call leaves what came of it; one like the call
before needs none (see `remembered.Repeats`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.nn import functional

from . import autograd, checks, eager, jagged, mod_ops, ops
from .checks import Options
from .mods.record import Mods
from .remembered import Remembered, Repeats
from .spec import AttentionInputs, Flags


class _Known(NamedTuple):
    """What came of a call's checks, and its way."""

    flags: Flags
    route: ops.Route
    max_seqlens: tuple[int, int]
    alone: Callable[[tuple], tuple[Tensor, Tensor]] | None  # the forward of tensors, where there is nothing beside it


class _WithMods(NamedTuple):
    """What came of the checks of a call with mods."""

    flags: Flags
    mods: Mods
    max_seqlens: tuple[int, int]


_known: Remembered[_Known] = Remembered()

_dense: Repeats[_Known] = Repeats()
_packed: Repeats[_Known] = Repeats()
_record: Any = tuple.__new__  # what AttentionInputs._make does after a check of the length


def attend(packed: bool, arguments: tuple, options: tuple) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call of a public function; raises what is wrong with its arguments.

    Args:
        packed: sequences are packed, with cu_seqlens.
        arguments: the fields of `AttentionInputs`, and `options` those of `Options`, as the caller gave them.
    """
    if functional.scaled_dot_product_attention is not _sdpa:
        _refuse_parts_of_sequences()
    repeats, said = (_packed, options + arguments[8:]) if packed else (_dense, options)
    tensors = arguments[:8]
    known = None if ops.watched_beside_tensors() else repeats.find(tensors, said)
    if known is not None:
        if known.alone is not None:
            return known.alone(tensors)
        inputs = _record(AttentionInputs, tensors + known.max_seqlens)
    else:
        watched = ops.watched(arguments)
        if watched and not packed and jagged.is_jagged(arguments):
            return jagged.nested(*attend(True, jagged.packed(arguments), options), arguments[0])
        key = None
        if not watched:
            arguments, key = asked(packed, arguments, options)
            tensors = arguments[:8]
        known = None if key is None else _known.find(key)
        if known is None:
            inputs, flags = checks.call(packed, AttentionInputs(*arguments), Options(*options))
            if watched or inputs.q.is_meta:  # (and lengths may have no values)
                return autograd.forward(inputs, flags)
            route = ops.route(inputs, flags)
            is_alone = not (flags.needs_backward or packed or inputs.seqused_k is not None)
            known = _Known(flags, route, inputs[8:], route.forward.of_tensors if is_alone else None)
            if key is not None:
                _known.keep(key, known)
        else:
            inputs = AttentionInputs._make(tensors + known.max_seqlens)
        if key is not None:
            repeats.keep(tensors, said, known)
    if packed or inputs.seqused_k is not None:
        checks.lengths(inputs)
    if known.flags.needs_backward:
        return eager.attend(known.route, known.flags, inputs)
    # Past torch's dispatcher, whose passage takes longer than a short kernel: nobody watches, and no gradient is asked.
    return known.route.forward(inputs)


def attend_with_mods(
    packed: bool, arguments: tuple, options: tuple, mods: tuple[Any, Any, Any], dropout: checks.Dropout
) -> tuple[Tensor, Tensor]:
    """The same of a call with a score_mod, mask_mod or block_mask (these three, or None) or with dropout. What came of
    earlier calls holds as long as the three and what they captured are the same; each call has its own seed."""
    if functional.scaled_dot_product_attention is not _sdpa:
        _refuse_parts_of_sequences()
    watched = ops.watched(arguments)
    if watched and not packed and jagged.is_jagged(arguments):
        made = jagged.packed(arguments)
        mods = jagged.packed_mods(arguments, mods)
        return jagged.nested(*attend_with_mods(True, made, options, mods, dropout), arguments[0])
    key = None
    if not watched:
        arguments, key = asked(packed, arguments, options)
    before = None if key is None else mod_ops.known(*mods)
    key = key, torch.is_grad_enabled(), dropout.p
    way = None if before is None else before.way(key)
    if way is None:
        inputs, flags = checks.call(packed, AttentionInputs(*arguments), Options(*options))
        if packed and mods[2] is not None:
            inputs = mod_ops.bounded(mods[2], inputs, arguments[8:])
        random = dropout.checked(inputs.q.device)
        gathered, flags = mod_ops.prepare(inputs, flags, *mods, random)
        if watched or inputs.q.is_meta:
            return mod_ops.forward(True, inputs, gathered, flags)
        way = _WithMods(flags, gathered, inputs[8:])
        before = before or mod_ops.keep(*mods)
        if before is not None and key[0] is not None:
            before.keep(key, way._replace(mods=gathered._replace(dropout_seed=None)))
    else:
        inputs = AttentionInputs._make(arguments[:8] + way.max_seqlens)
        _, seed = dropout.checked(inputs.q.device)
        way = way._replace(mods=way.mods._replace(dropout_seed=seed))
    if packed or inputs.seqused_k is not None:
        checks.lengths(inputs)
    return mod_ops.forward(False, inputs, way.mods, way.flags)


_sdpa = torch._C._nn.scaled_dot_product_attention


def _refuse_parts_of_sequences() -> None:
    """Inside torch's context_parallel a tensor is one rank's part of a sequence, and looks like any other: attention
    over it alone would be wrong without a sign. What stands in the place of scaled_dot_product_attention gives it away.
    """
    replaced_by = getattr(functional.scaled_dot_product_attention, "__module__", None) or ""
    if replaced_by.startswith("torch.distributed"):
        raise RuntimeError(
            "fa4 was called inside torch's context_parallel, where tensors are this rank's parts of sequences: call "
            "fa4.distributed.context_parallel_attention(q, k, v, group=mesh.get_group()), for parts that lie alike, or "
            "scaled_dot_product_attention after fa4.register_sdpa(activate=True)"
        )


def asked(packed: bool, arguments: tuple, options: tuple) -> tuple[tuple, tuple | None]:
    """The arguments of a call that nobody watches, as they are beneath wrappers that outlived a transform of
    torch.func, and the call's key."""
    arguments = unwrap_dead_wrappers(arguments)
    return arguments, key_of(packed, arguments, options)


def key_of(packed: bool, arguments: tuple, options: tuple) -> tuple | None:
    """What tells this call from those with other flags or another way; None where that is more than can be told."""
    q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k = arguments
    softmax_scale, causal, window_size, softcap, deterministic, backend = options
    needs_backward = torch.is_grad_enabled() and checks.needs_backward(q, k, v, sink)
    if needs_backward and deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if forward_ad._current_level >= 0:  # there may be tangents, to be refused
        return None
    try:
        key = (
            packed, q.shape, k.shape, v.shape, q.is_contiguous() or q.stride(), k.is_contiguous() or k.stride(),
            v.is_contiguous() or v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            None if sink is None else _layout(sink),
            softmax_scale, causal, window_size, softcap, deterministic, needs_backward, backend,
            # True equals 1, and is none
            type(softmax_scale), type(causal), type(softcap), type(deterministic), *map(type, window_size),
        )  # fmt: skip
        if not packed:
            return key if seqused_k is None else (*key, _layout(seqused_k))
        if not _NUMBERS.issuperset((type(max_seqlen_q), type(max_seqlen_k))):  # a tensor has no fixed value
            return None
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        return (*key, *[None if x is None else _layout(x) for x in lengths], max_seqlen_q, max_seqlen_k)
    except (RuntimeError, TypeError):  # a tensor without strides or a window that is no pair, to be refused
        return None


_NUMBERS = frozenset((int, type(None)))


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device
