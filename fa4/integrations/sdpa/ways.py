"""From the arguments of torch's operators to a kernel of fa4; calls like an earlier one get there by one look."""

from __future__ import annotations

from ... import checks, dispatch
from ...calls import CachedCall, signature_of
from ...checks import Options
from ...device import chip_of
from ...signature import routes
from ...spec import AttentionInputs, AttentionSpec


class Refusal(Exception):
    """fa4 does not serve the call; the reason."""


def with_lengths(known: CachedCall, inputs: AttentionInputs) -> AttentionInputs:
    """The operators' arguments of a call like the one that is known.

    Raises:
        Refusal: lengths are wrong.
    """
    found = known.inputs(tuple(inputs))
    if found is None:
        raise Refusal("numbers of packed rows, lengths and sequences do not fit one another")
    if found.varlen:
        try:
            checks.lengths(found)
        except ValueError as error:
            raise Refusal(str(error)) from None
    return found


def way(inputs: AttentionInputs, options: Options) -> CachedCall:
    """The road to a kernel, if there is one: the same object for the same question.

    Raises:
        Refusal: there is none.
    """
    signature = signature_of(inputs.varlen, tuple(inputs), options, "torch")
    known: CachedCall | str | None = routes.find(signature)  # a text is the reason of a refusal
    if known is None:
        try:
            known = _find(inputs, options)
        except (Refusal, TypeError, ValueError) as error:
            known = str(error)
        routes.keep(signature, known)
    if isinstance(known, str):
        raise Refusal(known)
    return known


def _find(inputs: AttentionInputs, options: Options) -> CachedCall:
    if inputs.v.shape[-1] != inputs.q.shape[-1]:
        raise Refusal("the head_dim of value is not that of query")
    inputs, flags = checks.call(inputs.varlen, inputs, options)
    chip = chip_of(inputs.q.device)
    if chip.device_type == "cuda" and not chip.emulated:
        spec = AttentionSpec.of(inputs, flags)
        if not dispatch.select(spec, inputs.extent, chip).requires:  # torch's own kernels are faster than tiled torch
            refused = dispatch.explain(spec, inputs.extent, chip).refused
            raise Refusal("fa4 has no kernel: " + "; ".join(f"{name} {', '.join(why)}" for name, why in refused))
    return CachedCall(flags, inputs)
