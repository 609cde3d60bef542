"""torch operators `fa4::forward` and `fa4::backward`: schemas, fake kernels, FLOP counts. Imports torch only.

One pair serves dense and varlen calls. Arguments are plain, so torch.compile, export, activation checkpointing and the
FLOP counter handle them as ordinary operators. The backend is chosen inside, from shapes and flags alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..mods.ir.record import Mods
from ..runtime import dispatch
from ..runtime.device import chip_of
from ..runtime.plan import Plan
from ..runtime.spec import PACKED, AttentionInputs, AttentionSpec, Flags, Gradients, Saved
from ..runtime.torch_internals import has_values, is_constant
from . import batching, checks, run
from .run.allocate import rows_dtype
from .signature import Signature, routes

# The operators' arguments are the fields of these records, in order; nothing else defines them.
FORWARD = (AttentionInputs, Flags)
BACKWARD = (Saved, AttentionInputs, Flags)
_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", int | None: "SymInt?", float: "float", bool: "bool",
    str: "str", list[Tensor]: "Tensor[]", list[float]: "float[]", list[int]: "int[]",
}  # fmt: skip


def schema(records: tuple) -> str:
    hints = (item for record in records for item in get_type_hints(record).items())
    return ", ".join(f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in hints)


def names(records: tuple) -> list[str]:
    return [name for record in records for name in record._fields]


def split(arguments: tuple, records: tuple) -> Iterator[Any]:
    """Split an operator's arguments into the records whose fields they are."""
    first = 0
    for record in records:
        yield record(*arguments[first : first + len(record._fields)])
        first += len(record._fields)


library = torch.library.Library("fa4", "DEF")
library.define(f"forward({schema(FORWARD)}) -> (Tensor out, Tensor lse)")
library.define(f"backward({schema(BACKWARD)}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)")


class Route:
    """Cached route of an operator call: spec, plan, and the objects that execute it."""

    def __init__(self, inputs: AttentionInputs, spec: AttentionSpec, plan: Plan) -> None:
        self.spec, self.plan = spec, plan
        self.forward = run.ForwardExecutor(inputs, spec, plan)
        self._backward: run.BackwardExecutor | None = None

    def backward(self, inputs: AttentionInputs, saved: Saved, *extra: Any) -> Gradients:
        """Run `run.BackwardExecutor`, which is created on first use."""
        if self._backward is None:
            self._backward = run.BackwardExecutor(inputs, self.spec, self.plan)
        return self._backward(inputs, saved, *extra)


def route(inputs: AttentionInputs, flags: Flags, mods: Mods | None = None) -> Route:
    """Return the cached route of a call: building it takes as long as several launches."""
    flags = flags.resolved()
    packed, extent = inputs.varlen, inputs.extent
    signature = Signature.of(
        "operator", inputs.tensors, (flags, extent.rounded() if packed else extent, mods and mods.spec_key()),
        PACKED if packed else (),
    )  # fmt: skip
    found = routes.find(signature)
    if found is None:
        spec, chip = AttentionSpec.of(inputs, flags, mods), chip_of(inputs.q.device)
        dispatch.warn_of_tiled_torch(spec, extent, chip, flags.backend)
        found = Route(inputs, spec, dispatch.plan(spec, extent, chip, flags.backend))
        routes.keep(signature, found)
    return found


def _forward(*arguments):
    """Check lengths, then run. Compiled code has no other check of values; calls past the dispatcher check before."""
    inputs, flags = split(arguments, FORWARD)
    checks.lengths(inputs)
    return route(inputs, flags).forward(inputs)


def _backward(*arguments):
    saved, inputs, flags = split(arguments, BACKWARD)
    dq, dk, dv, dsink = route(inputs, flags).backward(inputs, saved)
    return dq, dk, dv, inputs.q.new_empty(0) if dsink is None else dsink


def with_scales(flags: Flags) -> Flags:
    """Return flags for an operator call; in compiled code, a softmax_scale or softcap that may change becomes a tensor.
    torch would specialise on a float argument of an operator, and recompile for the next value."""
    if not torch.compiler.is_compiling():
        return flags
    if is_constant(flags.softmax_scale) and is_constant(flags.softcap):
        return flags
    one = torch.ones((), dtype=torch.float64, device="cpu")
    scales = torch.stack((one * flags.softmax_scale, one * flags.softcap))
    # (No _replace: the compiler of torch 2.8 does not know it.)
    _, left, right, softcap, deterministic, needs_backward, backend, num_splits, batch_invariant, _ = flags
    softcap = 1.0 if softcap > 0 else 0.0
    return Flags(1.0, left, right, softcap, deterministic, needs_backward, backend, num_splits, batch_invariant, scales)


def fake_outputs(inputs: AttentionInputs, flags: Flags) -> tuple[Tensor, Tensor]:
    """Return out and lse in shape and dtype."""
    q, v = inputs.q, inputs.v
    *rows, heads, _ = q.shape
    lse = q.new_empty((*rows[:-1], heads, rows[-1]), dtype=rows_dtype(AttentionSpec.of(inputs, flags)))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _forward_fake(*arguments):
    return fake_outputs(*split(arguments, FORWARD))


def fake_gradients(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    """Return dq, dk, dv and dsink in shape and dtype."""
    q, k, v, sink = inputs[:4]
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _backward_fake(*arguments):
    _, inputs, _ = split(arguments, BACKWARD)
    return fake_gradients(inputs)


library.impl("forward", _forward, "CompositeExplicitAutograd")
library.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fa4::forward", _forward_fake, lib=library)
torch.library.register_fake("fa4::backward", _backward_fake, lib=library)
for _name, _records in (("forward", FORWARD), ("backward", BACKWARD)):
    _rule = batching.rule(getattr(torch.ops.fa4, _name), names(_records))
    torch.library.register_vmap(f"fa4::{_name}", _rule, lib=library)


def unmasked_pairs(seqlen_q: int, seqlen_k: int, window_left: int | None, window_right: int | None) -> int:
    """Count the (query, key) pairs of one sequence that the bottom-right aligned mask keeps."""

    def capped_sum(n: int) -> int:
        """min(1, seqlen_k) + min(2, seqlen_k) + ... + min(n, seqlen_k)."""
        capped = max(0, min(n, seqlen_k))
        return capped * (capped + 1) // 2 + max(0, n - seqlen_k) * seqlen_k

    def at_most(distance: int) -> int:
        """Pairs with key - query <= distance: row i has i + distance + 1 of them, clamped to 0 and seqlen_k."""
        return capped_sum(seqlen_q + distance) - capped_sum(distance)

    shift = seqlen_k - seqlen_q
    upper = seqlen_q * seqlen_k if window_right is None else at_most(shift + window_right)
    return upper - (0 if window_left is None else at_most(shift - window_left - 1))


def flops(inputs: AttentionInputs, flags: Flags, matmuls_qk: int, matmuls_v: int) -> int:
    q, k, v, window = inputs.q, inputs.k, inputs.v, (flags.window_left, flags.window_right)
    lengths = [x for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k) if x is not None]
    if not inputs.varlen:
        pairs = q.shape[0] * unmasked_pairs(q.shape[1], k.shape[1], *window)
    elif not all(map(has_values, lengths)):
        # Lengths without values: count every sequence at its upper bound.
        pairs = inputs.batch * unmasked_pairs(inputs.max_seqlen_q, inputs.max_seqlen_k, *window)
    else:
        per_sequence = zip(*(x.diff().tolist() for x in lengths))
        pairs = sum(unmasked_pairs(seqlen_q, seqlen_k, *window) for seqlen_q, seqlen_k in per_sequence)
    return 2 * q.shape[-2] * pairs * (matmuls_qk * q.shape[-1] + matmuls_v * v.shape[-1])


@register_flop_formula(torch.ops.fa4.forward, get_raw=True)
def _forward_flops(*arguments, out_val=None, **_) -> int:
    """Q K^T and P V over the unmasked pairs: half of a full square when causal."""
    inputs, flags = split(arguments, FORWARD)
    return flops(inputs, flags, matmuls_qk=1, matmuls_v=1)


@register_flop_formula(torch.ops.fa4.backward, get_raw=True)
def _backward_flops(*arguments, out_val=None, **_) -> int:
    """The five products of the backward: S, dQ, dK over head_dim; dP, dV over head_dim_v."""
    _, inputs, flags = split(arguments, BACKWARD)
    return flops(inputs, flags, matmuls_qk=3, matmuls_v=2)
