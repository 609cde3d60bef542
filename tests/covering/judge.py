"""Results against the oracle, by the judge of `fa4.oracle.cases`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fa4.oracle import cases, reference
from fa4.oracle.cases import Judgement as Judged
from fa4.oracle.reference import Functions

_ROWS = {"out": 0, "dq": 0, "dk": 1, "dv": 1}


def judge(
    problem: cases.Problem,
    results: Mapping[str, Tensor],
    functions: Functions,
    kept: Tensor | None = None,
    has_dlse: bool = True,
    of_backward: Sequence[str] = (),
) -> list[Judged]:
    """Judge out, lse, dq, dk, dv, dsink and captured0, captured1 and so on, of which `results` may lack any.
    of_backward: names in `problem.rounding` that the forward does not take."""
    lse = results["lse"]
    wants_gradients = any(name not in ("out", "lse") for name in results)

    def references(of: cases.Problem, precise: bool) -> Sequence[Tensor | None]:
        options = dict(precise=precise, kept=kept, functions=functions, **of.rounding)
        of_forward = {name: x for name, x in options.items() if name not in of_backward}
        results_of_forward = reference.forward(of.inputs, of.spec, **of_forward)
        found: dict[str, Tensor | None] = dict(zip(("out", "lse"), results_of_forward))
        if wants_gradients:
            dlse = defined(of.dlse, lse) if has_dlse else None
            grads, captured = reference.backward_with_captured(of.inputs, of.spec, of.dout, dlse, **options)
            found |= grads._asdict() | {f"captured{i}": x for i, x in enumerate(captured)}
        return [found[name] for name in results]

    unreached = reference.unreached(problem.inputs, problem.spec, functions)
    results = {**results, "lse": _with_sinks(problem, lse, unreached[0])}
    # The gradients of q and k of a query that sees one key are rounding alone, of which one draw tells little.
    has_one_key = reference.most_keys(problem.inputs, problem.spec, functions) <= 1
    draws = cases.other_draws(problem), cases.roundings(problem)
    verdict = cases.judge_by_draws(results, references, problem, *draws, long_tails=has_one_key)
    return [
        replace(one, stray=_stray(results[one.name], unreached[_ROWS[one.name]])) if one.name in _ROWS else one
        for one in verdict
    ]


def defined(dlse: Tensor, lse: Tensor) -> Tensor:
    """The gradient into lse, with 0 where lse is -inf and its gradient means nothing."""
    return dlse.masked_fill(lse == -torch.inf, 0.0)


def _with_sinks(problem: cases.Problem, lse: Tensor, alone: Tensor) -> Tensor:
    """lse, with the sink itself where a query sees no key and lse is that but for its way to powers of two and back:
    the reference, which takes neither, would allow less than that rounds."""
    if problem.inputs.sink is None:
        return lse
    sink = problem.inputs.sink.to(lse.dtype)[:, None].expand_as(lse)
    is_alone = (alone if alone.ndim == 1 else alone[:, None]) & lse.isfinite()
    is_rounded = (lse - sink).abs() <= torch.finfo(lse.dtype).eps * sink.abs()
    return torch.where(is_alone & is_rounded, sink, lse)


def _stray(x: Tensor, rows: Tensor) -> int:
    """How many of the rows that nothing reaches are not exactly 0."""
    return int((x[rows] != 0).flatten(1).any(dim=1).sum())
