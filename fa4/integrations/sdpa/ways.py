"""From the arguments of torch's operators to a kernel of fa4; calls like an earlier one get there by one look."""

from __future__ import annotations

from typing import NamedTuple

from ... import calls, checks, dispatch, ops
from ...checks import Options
from ...device import chip_of
from ...remembered import Remembered
from ...spec import AttentionInputs, AttentionSpec, Flags


class Refusal(Exception):
    """fa4 does not serve the call; the reason."""


class Way(NamedTuple):
    """What came of the checks of a call, for others like it."""

    flags: Flags
    route: ops.Route
    max_seqlens: tuple[int, int]

    def with_lengths(self, inputs: AttentionInputs) -> AttentionInputs:
        """The operators' arguments of a call that is like the one whose way this is."""
        inputs = AttentionInputs._make((*inputs[:8], *self.max_seqlens))
        if inputs.varlen:
            try:
                checks.lengths(inputs)
            except ValueError as error:
                raise Refusal(str(error)) from None
        return inputs


_ways: Remembered[Way | str] = Remembered()  # a text is the reason of a refusal


def way(inputs: AttentionInputs, options: Options) -> Way:
    """The road to a kernel, if there is one: the same object for the same question.

    Raises:
        Refusal: there is none.
    """
    key = calls.key_of(inputs.varlen, inputs, options)
    known: Way | str | None = None if key is None else _ways.find(key)
    if known is None:
        try:
            known = _find(inputs, options)
        except (Refusal, TypeError, ValueError) as error:
            known = str(error)
        if key is not None:
            _ways.keep(key, known)
    if isinstance(known, str):
        raise Refusal(known)
    return known


def _find(inputs: AttentionInputs, options: Options) -> Way:
    if inputs.v.shape[-1] != inputs.q.shape[-1]:
        raise Refusal("the head_dim of value is not that of query")
    inputs, flags = checks.call(inputs.varlen, inputs, options)
    chip = chip_of(inputs.q.device)
    if chip.device_type == "cuda" and not chip.emulated:
        spec = AttentionSpec.of(inputs, flags)
        if not dispatch.select(spec, inputs.extent, chip).requires:  # torch's own kernels are faster than tiled torch
            refused = dispatch.explain(spec, inputs.extent, chip).refused
            raise Refusal("fa4 has no kernel: " + "; ".join(f"{name} {', '.join(why)}" for name, why in refused))
    return Way(flags, ops.route(inputs, flags), inputs[8:])
