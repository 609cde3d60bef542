"""Cached calls: a call with a known `signature.Signature` skips the checks and goes directly to its kernels.

The first call with a signature stores a `CachedCall` under it. A call equal to the last one needs no signature.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..mods.frontend import trace_cache
from ..mods.ir.record import Mods
from ..runtime.spec import PACKED, AttentionInputs, Flags
from ..runtime.torch_internals import modes_need_dispatcher, needs_dispatcher, unwrap_dead_wrappers
from ..runtime.torch_internals import scaled_dot_product_attention as _sdpa
from . import autograd, checks, jagged, mod_ops, ops
from .checks import Options
from .growing import GrowingCalls
from .signature import MAX_ENTRIES, CallCache, Signature, routes


class CallExtras(NamedTuple):
    """A call's functions, block mask and dropout, as the caller passed them."""

    score_mod: Any
    mask_mod: Any
    block_mask: Any
    dropout: checks.Dropout

    @property
    def functions(self) -> tuple[Any, Any, Any]:
        """Return what may capture something (or None); a `CachedCall` is valid while these are unchanged."""
        return self.score_mod, self.mask_mod, self.block_mask


class CachedCall:
    """Results of a call's checks, and its route to the kernels; for packed calls, one route per rounded extent.

    mods: the call's mods, or None; the functions are valid for problems within `limits`. Dropout seeds are per call.
    """

    def __init__(
        self, flags: Flags, inputs: AttentionInputs, mods: Mods | None = None, limits: mod_ops.Limits | None = None
    ) -> None:
        self.flags, self.packed, self.max_seqlens = flags, inputs.varlen, inputs.max_seqlens
        self.may_vary = inputs.varlen and min(inputs.q.shape[0], inputs.k.shape[0]) > 1
        self.first = ops.route(inputs, flags, mods)
        self.mods = None if mods is None else mods._replace(dropout_seed=None)
        self._limits = limits
        self._routes: dict[tuple, ops.AnyRoute] = {}
        is_plain = not (flags.needs_backward or inputs.varlen or inputs.seqused_k is not None or mods is not None)
        self.plain_forward = self.first.forward.call_with_tensors if is_plain else None  # q, k, v and options only

    def inputs(self, tensors: tuple, lengths: tuple) -> AttentionInputs | None:
        """Return the inputs of an equal call; None if sizes of packed sequences do not match each other or the mods."""
        if not self.packed:
            return _record(AttentionInputs, tensors + self.max_seqlens)
        sizes = packed_sizes(tensors, lengths)
        if sizes is None or self.may_vary is not sizes[2]:
            return None
        inputs = _record(AttentionInputs, tensors + sizes[:2])
        return inputs if self._limits is None else self._limits.within(inputs, lengths)

    def filled(self, dropout: checks.Dropout, inputs: AttentionInputs) -> Mods:
        """Return the mods of an equal call, with its own dropout seed."""
        assert self.mods is not None
        return self.mods._replace(dropout_seed=dropout.checked(inputs.q.device)[1]) if dropout.p else self.mods

    def route(self, inputs: AttentionInputs, mods: Mods | None = None) -> ops.AnyRoute:
        if not self.packed:
            return self.first
        sizes = inputs.cu_seqlens_q.shape, inputs.max_seqlen_q, inputs.max_seqlen_k  # type: ignore[union-attr]
        route = self._routes.get(sizes)
        if route is None:
            extent = inputs.extent.rounded()
            if len(self._routes) >= MAX_ENTRIES:
                self._routes.clear()
            route = self._routes.get(extent)
            if route is None:
                route = self._routes[extent] = ops.route(inputs, self.flags, mods)
            self._routes[sizes] = route
        return route


_dense: CallCache[CachedCall] = CallCache(routes)
_packed: CallCache[CachedCall] = CallCache(routes)
_growing = GrowingCalls()
_record: Any = tuple.__new__  # AttentionInputs._make without its length check


def signature_of(kind: str, packed: bool, tensors: tuple, lengths: tuple, options: tuple) -> Signature | None:
    """Return the signature that determines flags and route of a call; None if the call cannot be identified."""
    if packed and packed_sizes(tensors, lengths) is None:
        return None
    return Signature.of(kind, tensors, options, PACKED if packed else ())


def attend(
    packed: bool, tensors: tuple, lengths: tuple, options: tuple, extras: CallExtras | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a call of a public function; raise for wrong arguments.

    Args:
        packed: whether the sequences are packed.
        tensors, lengths: the fields of `AttentionInputs`, and `options` those of `Options`, as the caller passed them.
        extras: functions, block mask and dropout; None if the call has none.
    """
    if functional.scaled_dot_product_attention is not _sdpa:
        refuse_parts_of_sequences()
    key_options = options if extras is None else (packed, extras.dropout.p, *options)
    cache: CallCache[CachedCall] | None
    if modes_need_dispatcher():  # compiled code would be valid for this cached state only
        cache = None
    elif extras is None:
        cache = _packed if packed else _dense
    else:
        cache = trace_cache.known(*extras.functions)
    cached = None if cache is None else cache.last.find(tensors, key_options)
    if cached is not None and cached.plain_forward is not None:
        return cached.plain_forward(tensors)
    if cached is None and cache is _dense:
        forward = _growing.find(tensors, key_options)
        if forward is not None:
            return forward(tensors)
    inputs, mods = None if cached is None else cached.inputs(tensors, lengths), None
    if cached is None or inputs is None:
        checks.refuse_nested(*tensors[:3])
        signature = None
        by_dispatcher = needs_dispatcher(tensors + lengths)
        if by_dispatcher and not packed and jagged.is_jagged(tensors):
            return _attend_jagged(tensors, options, extras)
        if not by_dispatcher:
            tensors, lengths = unwrap_dead_wrappers(tensors), unwrap_dead_wrappers(lengths)
            signature = signature_of("packed" if packed else "dense", packed, tensors, lengths, key_options)
        cached = None if cache is None else cache.routes.find(signature)
        inputs = None if cached is None else cached.inputs(tensors, lengths)
        if cached is None or inputs is None:
            inputs, mods, flags = checked(packed, tensors, lengths, options, extras)
            if by_dispatcher or inputs.q.is_meta:  # (also: lengths may have no values)
                return autograd.forward(inputs, mods, flags)
            limits = None if mods is None or not packed else mod_ops.Limits.of(mods, extras and extras.block_mask)
            cached = CachedCall(flags, inputs, mods, limits)
            if cache is None and extras is not None and signature is not None:
                cache = mod_ops.keep(*extras.functions)
            if cache is not None:
                cache.routes.keep(signature, cached)
        if cache is _dense and cached.plain_forward is not None and cached.first.forward.takes_any_keys:
            _growing.keep(tensors, key_options, cached.plain_forward)
        if cache is not None and signature is not None:
            cache.last.keep(tensors, key_options, cached, free=PACKED if cached.may_vary else ())
    if packed or inputs.seqused_k is not None:
        checks.lengths(inputs)
    if mods is None and extras is not None:
        mods = cached.filled(extras.dropout, inputs)
    route = cached.route(inputs, mods)
    if cached.flags.needs_backward:
        return autograd.attend(route, cached.flags, inputs, mods)
    # Bypass torch's dispatcher, which costs more host time than a short kernel takes on the GPU: no mode is active, and
    # no gradient is needed.
    return route.forward(inputs, mods)


def checked(
    packed: bool,
    tensors: tuple,
    lengths: tuple,
    options: tuple,
    extras: CallExtras | None,
    dtypes: tuple[torch.dtype, ...] = checks.DTYPES,
) -> tuple[AttentionInputs, Mods | None, Flags]:
    """Check a call (arguments: see `attend`) whose q, k and v have one of `dtypes`; return the operator's arguments."""
    inputs, flags = checks.call(packed, AttentionInputs(*tensors, *lengths), Options(*options), dtypes)
    if extras is None:
        return inputs, None, flags
    if packed and extras.block_mask is not None:
        inputs = mod_ops.bounded(extras.block_mask, inputs, lengths)
    random = extras.dropout.checked(inputs.q.device)
    return inputs, *mod_ops.prepare(inputs, flags, *extras.functions, random)


def _attend_jagged(tensors: tuple, options: tuple, extras: CallExtras | None) -> tuple[Tensor, Tensor]:
    """Run `attend` on nested tensors as packed sequences."""
    arguments = jagged.packed(tensors)
    if extras is not None:
        extras = CallExtras(*jagged.packed_mods(tensors, extras.functions), extras.dropout)
    return jagged.nested(*attend(True, *arguments, options, extras), tensors[0])


def packed_sizes(tensors: tuple, lengths: tuple) -> tuple[int, int, bool] | None:
    """Return max_seqlen_q, max_seqlen_k, and whether q and k both have several rows (of one row the stride means
    nothing). None if sizes do not match each other, or a bound is no int."""
    q, k, v, _, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = tensors
    max_seqlen_q, max_seqlen_k = lengths
    try:
        rows, keys, entries = q.shape[0], k.shape[0], cu_seqlens_q.shape[0]
        fit = (v is k or v.shape[0] == keys) and (cu_seqlens_k is cu_seqlens_q or cu_seqlens_k.shape[0] == entries)
        for x in (seqused_q, seqused_k):
            if x is not None and x.shape[0] != entries - 1:
                return None
    except (AttributeError, IndexError, RuntimeError):  # invalid, RuntimeError: nested; the checks report them
        return None
    if max_seqlen_q is None:
        max_seqlen_q = rows
    if max_seqlen_k is None:
        max_seqlen_k = keys
    if not fit or entries < 1 or type(max_seqlen_q) is not int or type(max_seqlen_k) is not int:
        return None
    return None if max_seqlen_q < 0 or max_seqlen_k < 0 else (max_seqlen_q, max_seqlen_k, rows > 1 and keys > 1)


def refuse_parts_of_sequences() -> None:
    """Raise inside torch's context_parallel: a tensor is one rank's part of a sequence there, so attention over it
    alone would be silently wrong. The replaced scaled_dot_product_attention identifies the context."""
    replaced_by = getattr(functional.scaled_dot_product_attention, "__module__", None) or ""
    if replaced_by.startswith("torch.distributed"):
        raise RuntimeError(
            "fa4 was called inside torch's context_parallel, where tensors are this rank's parts of sequences: call "
            "fa4.distributed.context_parallel_attention(q, k, v, group=mesh.get_group()), for parts that lie alike, or "
            "scaled_dot_product_attention after fa4.register_sdpa(activate=True)"
        )
