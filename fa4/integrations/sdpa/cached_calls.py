"""Cached calls of torch's operators: one lookup gives the route to a kernel of fa4, or the reason of a refusal."""

from __future__ import annotations

from ...runtime import dispatch
from ...runtime.device import chip_of
from ...runtime.spec import AttentionInputs, AttentionSpec
from ...torch_ops import checks
from ...torch_ops.calls import CachedCall, signature_of
from ...torch_ops.checks import Options
from ...torch_ops.signature import routes


class Refusal(Exception):
    """fa4 does not support the call; the message is the reason."""


def with_lengths(cached: CachedCall, inputs: AttentionInputs) -> AttentionInputs:
    """Return the operators' inputs of a call equal to the cached one.

    Raises:
        Refusal: lengths are invalid.
    """
    found = cached.inputs(inputs.tensors, inputs.max_seqlens)
    if found is None:
        raise Refusal("numbers of packed rows, lengths and sequences do not fit one another")
    if found.varlen:
        try:
            checks.lengths(found)
        except ValueError as error:
            raise Refusal(str(error)) from None
    return found


def cached_call(inputs: AttentionInputs, options: Options) -> CachedCall:
    """Return the cached call: the same object for equal signatures.

    Raises:
        Refusal: fa4 does not support the call.
    """
    signature = signature_of("torch", inputs.varlen, inputs.tensors, inputs.max_seqlens, options)
    cached: CachedCall | str | None = routes.find(signature)  # a str is the reason of a refusal
    if cached is None:
        try:
            cached = _build(inputs, options)
        except (Refusal, TypeError, ValueError) as error:
            cached = str(error)
        routes.keep(signature, cached)
    if isinstance(cached, str):
        raise Refusal(cached)
    return cached


def _build(inputs: AttentionInputs, options: Options) -> CachedCall:
    if inputs.v.shape[-1] != inputs.q.shape[-1]:
        raise Refusal("the head_dim of value is not that of query")
    inputs, flags = checks.call(inputs.varlen, inputs, options)
    chip = chip_of(inputs.q.device)
    if chip.device_type == "cuda" and not chip.emulated:
        spec = AttentionSpec.of(inputs, flags)
        if not dispatch.select(spec, chip).requires:  # torch's own kernels are faster than tiled torch
            refused = dispatch.explain(spec, inputs.extent, chip).refused
            raise Refusal(f"fa4 has no kernel: {dispatch.text_of(refused)}")
    return CachedCall(flags, inputs)
