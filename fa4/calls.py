"""Calls like an earlier one: their checks have passed and their way to a kernel is known, found by one look.

What calls have in common is their `signature.Signature`, under which the first one leaves what came of it; a call like
the last one needs none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional

from . import autograd, checks, jagged, mod_ops, ops
from .checks import Options
from .mods.record import Mods
from .signature import MOST, CallCache, Signature, routes
from .spec import PACKED, AttentionInputs, Flags
from .torch_internals import modes_need_dispatcher, needs_dispatcher, unwrap_dead_wrappers
from .torch_internals import scaled_dot_product_attention as _sdpa


class Asked(NamedTuple):
    """A call's functions, block mask and dropout, as the caller gave them."""

    score_mod: Any
    mask_mod: Any
    block_mask: Any
    dropout: checks.Dropout

    @property
    def functions(self) -> tuple[Any, Any, Any]:
        """Those that captured something, or None: what came of a call holds while these are what they were."""
        return self.score_mod, self.mask_mod, self.block_mask


class CachedCall:
    """What came of a call's checks, and its way to kernels: of packed sequences one for each extent that plans are made
    for, whatever rows, sequences and bounds of lengths a call has.

    mods: of a call that has some; its functions fit problems within `limits`. A seed of dropout is each call's own.
    """

    def __init__(
        self, flags: Flags, inputs: AttentionInputs, mods: Mods | None = None, limits: mod_ops.Limits | None = None
    ) -> None:
        self.flags, self.packed, self.max_seqlens = flags, inputs.varlen, inputs.max_seqlens
        self.may_vary = inputs.varlen and min(inputs.q.shape[0], inputs.k.shape[0]) > 1
        self.first = ops.route(inputs, flags, mods)
        self.mods = None if mods is None else mods._replace(dropout_seed=None)
        self._limits = limits
        self._routes: dict[tuple, ops.Route] = {}
        is_alone = not (flags.needs_backward or inputs.varlen or inputs.seqused_k is not None or mods is not None)
        self.alone = self.first.forward.of_tensors if is_alone else None  # where there is nothing beside it

    def inputs(self, arguments: tuple) -> AttentionInputs | None:
        """The inputs of a call like this; None where sizes of packed sequences do not fit one another or the mods."""
        if not self.packed:
            return _record(AttentionInputs, arguments[:8] + self.max_seqlens)
        sizes = packed_sizes(arguments)
        if sizes is None or self.may_vary is not sizes[2]:
            return None
        inputs = _record(AttentionInputs, arguments[:8] + sizes[:2])
        return inputs if self._limits is None else self._limits.within(inputs, arguments[8:])

    def filled(self, dropout: checks.Dropout, inputs: AttentionInputs) -> Mods:
        """The mods of a call like this."""
        assert self.mods is not None
        return self.mods._replace(dropout_seed=dropout.checked(inputs.q.device)[1]) if dropout.p else self.mods

    def route(self, inputs: AttentionInputs, mods: Mods | None = None) -> ops.Route:
        if not self.packed:
            return self.first
        sizes = inputs.cu_seqlens_q.shape, inputs.max_seqlen_q, inputs.max_seqlen_k  # type: ignore[union-attr]
        found = self._routes.get(sizes)
        if found is None:
            extent = inputs.extent.rounded()
            if len(self._routes) >= MOST:
                self._routes.clear()
            found = self._routes.get(extent)
            if found is None:
                found = self._routes[extent] = ops.route(inputs, self.flags, mods)
            self._routes[sizes] = found
        return found


_dense: CallCache[CachedCall] = CallCache(routes)
_packed: CallCache[CachedCall] = CallCache(routes)
_record: Any = tuple.__new__  # what AttentionInputs._make does after a check of the length


def signature_of(packed: bool, arguments: tuple, options: tuple, kind: str | None = None) -> Signature | None:
    """What tells a call from those with other flags or another way; None where that is more than can be told."""
    if packed:
        return (
            None if packed_sizes(arguments) is None else Signature.of(kind or "packed", arguments[:8], options, PACKED)
        )
    return Signature.of(kind or "dense", arguments[:8], options)


def attend(packed: bool, arguments: tuple, options: tuple, asked: Asked | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call of a public function; raises what is wrong with its arguments.

    Args:
        packed: sequences are packed, with cu_seqlens.
        arguments: the fields of `AttentionInputs`, and `options` those of `Options`, as the caller gave them.
        asked: of a call with functions, a block mask or dropout.
    """
    if functional.scaled_dot_product_attention is not _sdpa:
        _refuse_parts_of_sequences()
    tensors, told = arguments[:8], options if asked is None else (packed, asked.dropout.p, *options)
    cache: CallCache[CachedCall] | None
    if modes_need_dispatcher():  # compiled code would hold for what is known now alone
        cache = None
    elif asked is None:
        cache = _packed if packed else _dense
    else:
        cache = mod_ops.known(*asked.functions)
    known = None if cache is None else cache.last.find(tensors, told)
    if known is not None and known.alone is not None:
        return known.alone(tensors)
    inputs, mods = None if known is None else known.inputs(arguments), None
    if known is None or inputs is None:
        watched = needs_dispatcher(arguments)
        if watched and not packed and jagged.is_jagged(arguments):
            return _attend_jagged(arguments, options, asked)
        signature = None
        if not watched:
            arguments = unwrap_dead_wrappers(arguments)
            signature = signature_of(packed, arguments, told)
        known = None if cache is None else cache.routes.find(signature)
        inputs = None if known is None else known.inputs(arguments)
        if known is None or inputs is None:
            inputs, flags = checks.call(packed, AttentionInputs(*arguments), Options(*options))
            if asked is not None:
                inputs, flags, mods = _with_mods(packed, inputs, flags, arguments[8:], asked)
            if watched or inputs.q.is_meta:  # (and lengths may have no values)
                return autograd.forward(inputs, flags) if mods is None else mod_ops.forward(inputs, mods, flags)
            limits = (
                mod_ops.Limits.of(mods, asked.block_mask) if packed and asked is not None and mods is not None else None
            )
            known = CachedCall(flags, inputs, mods, limits)
            if cache is None and asked is not None and signature is not None:
                cache = mod_ops.keep(*asked.functions)
            if cache is not None:
                cache.routes.keep(signature, known)
        if cache is not None and signature is not None:
            cache.last.keep(arguments[:8], told, known, free=PACKED if known.may_vary else ())
    if packed or inputs.seqused_k is not None:
        checks.lengths(inputs)
    if mods is None and asked is not None:
        mods = known.filled(asked.dropout, inputs)
    route = known.route(inputs, mods)
    if known.flags.needs_backward:
        return autograd.attend(route, known.flags, inputs, mods)
    # Past torch's dispatcher, whose passage takes longer than a short kernel: nobody watches, and no gradient is asked.
    return route.forward(inputs) if mods is None else route.forward(inputs, mods)


def _with_mods(
    packed: bool, inputs: AttentionInputs, flags: Flags, lengths: tuple, asked: Asked
) -> tuple[AttentionInputs, Flags, Mods]:
    """The inputs of a call with mods, its flags, and the mods.

    lengths: bounds as the caller gave them."""
    block_mask = asked.block_mask
    if packed and block_mask is not None:
        inputs = mod_ops.bounded(block_mask, inputs, lengths)
    random = asked.dropout.checked(inputs.q.device)
    mods, flags = mod_ops.prepare(inputs, flags, *asked.functions, random)
    return inputs, flags, mods


def _attend_jagged(arguments: tuple, options: tuple, asked: Asked | None) -> tuple[Tensor, Tensor]:
    """The same of nested tensors, as packed sequences."""
    if asked is not None:
        asked = Asked(*jagged.packed_mods(arguments, asked.functions), asked.dropout)
    return jagged.nested(*attend(True, jagged.packed(arguments), options, asked), arguments[0])


def packed_sizes(arguments: tuple) -> tuple[int, int, bool] | None:
    """max_seqlen_q and max_seqlen_k of packed sequences, whatever their rows and their number, and whether q and k both
    have more than one row: of one the stride says nothing. None where sizes do not fit one another, or a bound is no
    int."""
    q, k, v, _, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k = arguments
    try:
        rows, keys, entries = q.shape[0], k.shape[0], cu_seqlens_q.shape[0]
        fit = (v is k or v.shape[0] == keys) and (cu_seqlens_k is cu_seqlens_q or cu_seqlens_k.shape[0] == entries)
        for x in (seqused_q, seqused_k):
            if x is not None and x.shape[0] != entries - 1:
                return None
    except (AttributeError, IndexError):  # to be refused
        return None
    if max_seqlen_q is None:
        max_seqlen_q = rows
    if max_seqlen_k is None:
        max_seqlen_k = keys
    if not fit or entries < 1 or type(max_seqlen_q) is not int or type(max_seqlen_k) is not int:
        return None
    return None if max_seqlen_q < 0 or max_seqlen_k < 0 else (max_seqlen_q, max_seqlen_k, rows > 1 and keys > 1)


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
