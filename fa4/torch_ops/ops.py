"""torch operators `fa4::forward` and `fa4::backward`, and `fa4::{forward,backward}_with_mods` of calls with mods.

One pair serves dense and varlen calls. Arguments are plain: those of a call's `Mods` are graphs as strings, which hold
all that shapes code, and the tensors and numbers they read. So torch.compile, export, activation checkpointing and the
FLOP counter handle them as ordinary operators. The backend is chosen inside, from shapes and flags alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

from ..mods.ir.record import Mods
from ..runtime import background, dispatch, nvfp4
from ..runtime.device import chip_of
from ..runtime.plan import Plan
from ..runtime.spec import PACKED, AttentionInputs, AttentionSpec, Cache, Flags, Gradients, Saved, compute_dtype
from ..runtime.torch_internals import is_constant
from . import batching, checks, flops, run
from .run.allocate import shapes
from .signature import Signature, routes

InputAndCapturedGrads = tuple[Gradients, list[Tensor | None]]
"""Gradients of q, k, v and the sink, and of captured tensors (None for those without gradient)."""

# The operators' arguments are the fields of these records, in order; nothing else defines them.
Records = dict[str, type]
FORWARD: Records = {"inputs": AttentionInputs, "flags": Flags}
FORWARD_WITH_MODS: Records = {"inputs": AttentionInputs, "mods": Mods, "flags": Flags}
_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", int | None: "SymInt?", float: "float", bool: "bool",
    str: "str", list[Tensor]: "Tensor[]", list[float]: "float[]", list[int]: "int[]",
}  # fmt: skip


def backward_of(forward: Records) -> Records:
    """Return the arguments of a forward operator's backward."""
    return {"saved": Saved, **forward}


def names(records: Records) -> list[str]:
    return [name for record in records.values() for name in record._fields]  # type: ignore[attr-defined]


def split(arguments: tuple, records: Records) -> dict[str, Any]:
    """Split an operator's arguments into the records whose fields they are."""
    values = iter(arguments)
    return {name: record(*[next(values) for _ in record._fields]) for name, record in records.items()}  # type: ignore[attr-defined]


library = torch.library.Library("fa4", "DEF")


def define(
    name: str, records: Records, results: str, kernel: Callable, fake: Callable, writes: tuple[str, ...] = ()
) -> None:
    """Define the operator `fa4::{name}`. kernel, fake: functions of the records, by name; fake returns results without
    values. writes: arguments that the kernel modifies."""
    hints = {field: hint for record in records.values() for field, hint in get_type_hints(record).items()}
    types = {field: _SCHEMA_TYPES[hint] for field, hint in hints.items()}
    types |= {field: f"Tensor({alias}!){types[field].removeprefix('Tensor')}" for field, alias in zip(writes, "abcd")}
    library.define(f"{name}({', '.join(f'{kind} {field}' for field, kind in types.items())}) -> ({results})")
    library.impl(name, lambda *arguments: kernel(**split(arguments, records)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fa4::{name}", lambda *arguments: fake(**split(arguments, records)), lib=library)


class Route:
    """Cached route of an operator call: spec, plan, and the objects that execute it."""

    def __init__(self, inputs: AttentionInputs, spec: AttentionSpec, plan: Plan) -> None:
        self.spec, self.plan = spec, plan
        self.forward = run.ForwardExecutor(inputs, spec, plan)
        self._backward: run.BackwardExecutor | None = None

    def backward(self, inputs: AttentionInputs, saved: Saved, mods: Mods | None = None) -> InputAndCapturedGrads:
        """Compute gradients by `run.BackwardExecutor`, which is created on first use."""
        if self._backward is None:
            self._backward = run.BackwardExecutor(inputs, self.spec, self.plan)
        if mods is None:
            return self._backward(inputs, saved), []
        captured = [
            torch.zeros(x.shape, dtype=compute_dtype(self.spec.dtype), device=x.device) if i in mods.trained else None
            for i, x in enumerate(mods.tensors)
        ]
        grads = self._backward(inputs, saved, mods, captured)
        return grads, [None if dx is None else dx.to(x.dtype) for x, dx in zip(mods.tensors, captured)]


class InterimRoute:
    """Route of a call whose kernels another process compiles: until that is done, other kernels serve it, see
    `runtime.background`."""

    def __init__(self, final: Route, interim: Route, jobs: tuple[background.Job, ...]) -> None:
        self.spec, self.plan = final.spec, final.plan
        self._final, self._interim, self._jobs = final, interim, jobs

    @property
    def _current(self) -> Route:
        if self._jobs:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                for job in self._jobs:
                    job.wait()  # a graph keeps what it captures
            if not all(job.is_done() for job in self._jobs):
                return self._interim
            self._jobs = ()
        return self._final

    @property
    def forward(self) -> run.ForwardExecutor:
        return self._current.forward

    def backward(self, inputs: AttentionInputs, saved: Saved, mods: Mods | None = None) -> InputAndCapturedGrads:
        return self._current.backward(inputs, saved, mods)


AnyRoute = Route | InterimRoute


def spec_and_plan(
    inputs: AttentionInputs, flags: Flags, mods: Mods | None, cache: Cache | None = None
) -> tuple[AttentionSpec, Plan]:
    """Return the spec of a call and its plan."""
    chip, spec = chip_of(inputs.q.device), AttentionSpec.of(inputs, flags, mods, cache)
    dispatch.warn_of_tiled_torch(spec, chip, flags.backend)
    return spec, dispatch.plan(spec, inputs.extent, chip, flags.backend)


def route(inputs: AttentionInputs, flags: Flags, mods: Mods | None = None) -> AnyRoute:
    """Return the cached route of a call: building it takes as long as several launches."""
    flags = flags.resolved()
    packed, extent = inputs.varlen, inputs.extent
    signature = Signature.of(
        "operator", inputs.tensors, (flags, extent.rounded() if packed else extent, mods and mods.spec_key()),
        PACKED if packed else (),
    )  # fmt: skip
    found = routes.find(signature)
    if found is None:
        spec, plan = spec_and_plan(inputs, flags, mods)
        found = Route(inputs, spec, plan)
        meanwhile = background.meanwhile(spec, plan, found.forward.requests_beside_plan)
        if meanwhile is not None:
            found = InterimRoute(found, Route(inputs, spec, meanwhile.plan), meanwhile.jobs)
        routes.keep(signature, found)
    return found


def forward(inputs: AttentionInputs, mods: Mods | None, flags: Flags) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by the operator."""
    flags = with_scales(flags)
    if mods is None:
        return torch.ops.fa4.forward(*inputs, *flags)
    return torch.ops.fa4.forward_with_mods(*inputs, *mods, *flags)


def backward(saved: Saved, inputs: AttentionInputs, mods: Mods | None, flags: Flags) -> InputAndCapturedGrads:
    """Compute gradients by the operator."""
    captured: list[Tensor | None] = []
    if mods is None:
        dq, dk, dv, dsink = torch.ops.fa4.backward(*saved, *inputs, *flags)
    else:
        dq, dk, dv, dsink, captured = torch.ops.fa4.backward_with_mods(*saved, *inputs, *mods, *flags)
        captured = [dx if i in mods.trained else None for i, dx in enumerate(captured)]
    return Gradients(dq, dk, dv, None if inputs.sink is None else dsink), captured


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
    _, left, right, softcap, deterministic, needs_backward, backend, num_splits, batch_invariant, v_in_k, _ = flags
    return Flags(
        1.0, left, right, 1.0 if softcap > 0 else 0.0, deterministic, needs_backward, backend, num_splits,
        batch_invariant, v_in_k, scales,
    )  # fmt: skip


def _forward(inputs: AttentionInputs, flags: Flags, mods: Mods | None = None) -> tuple[Tensor, Tensor]:
    """Check lengths, then run. Compiled code has no other check of values; calls past the dispatcher check before."""
    checks.lengths(inputs)
    return route(inputs, flags, mods).forward(inputs, mods)


def _backward(saved: Saved, inputs: AttentionInputs, flags: Flags, mods: Mods | None = None) -> tuple:
    (dq, dk, dv, dsink), dcaptured = route(inputs, flags, mods).backward(inputs, saved, mods)
    results = dq, dk, dv, inputs.q.new_empty(0) if dsink is None else dsink
    if mods is None:
        return results
    return *results, [x.new_empty(0) if dx is None else dx for x, dx in zip(mods.tensors, dcaptured)]


def fake_forward(inputs: AttentionInputs, **_: Any) -> tuple[Tensor, Tensor]:
    """Return out and lse in shape and dtype."""
    out, lse = shapes(inputs.q.shape, nvfp4.columns_of(inputs.v))
    return inputs.q.new_empty(out), inputs.q.new_empty(lse, dtype=compute_dtype(inputs.q.dtype))


def _fake_backward(saved: Saved, inputs: AttentionInputs, flags: Flags, mods: Mods | None = None) -> tuple:
    q, k, v, sink = inputs[:4]
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    results = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink
    if mods is None:
        return results
    return *results, [x.new_empty(x.shape if i in mods.trained else 0) for i, x in enumerate(mods.tensors)]


def register_flops(name: str, records: Records, formula: Callable[..., int]) -> None:
    """Register the FLOP formula of an operator, a function of its records by name."""

    def count(*arguments, out_val=None, **_) -> int:
        return formula(**split(arguments, records))

    flops.register(getattr(torch.ops.fa4, name), count)


_GRADIENTS = "Tensor dq, Tensor dk, Tensor dv, Tensor dsink"
for _suffix, _records, _gradients in (
    ("", FORWARD, _GRADIENTS),
    ("_with_mods", FORWARD_WITH_MODS, f"{_GRADIENTS}, Tensor[] captured"),
):
    define(f"forward{_suffix}", _records, "Tensor out, Tensor lse", _forward, fake_forward)
    define(f"backward{_suffix}", backward_of(_records), _gradients, _backward, _fake_backward)
    register_flops(f"forward{_suffix}", _records, flops.forward)
    register_flops(f"backward{_suffix}", backward_of(_records), flops.backward)
for _name, _records in (("forward", FORWARD), ("backward", backward_of(FORWARD))):
    _rule = batching.rule(getattr(torch.ops.fa4, _name), names(_records))
    torch.library.register_vmap(f"fa4::{_name}", _rule, lib=library)
