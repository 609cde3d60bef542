"""Results of somebody else's function that runs on fa4, against the oracle: no lse comes back, and none gets a
gradient."""

from collections.abc import Sequence

from torch import Tensor

from fa4.oracle import reference
from fa4.oracle.cases import Problem, assert_right, judge_by_draws, other_draws, roundings


def leaves(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as tensors that gradients are asked of."""
    q, k, v = (x.detach().clone().requires_grad_() for x in problem.inputs[:3])
    return q, k, v


def assert_attention(problem: Problem, out: Tensor, *gradients: Tensor) -> None:
    """out, and dq, dk, dv for `problem.dout`, err at most twice as much as the same-precision reference."""

    def references(of: Problem, precise: bool) -> Sequence[Tensor | None]:
        options = dict(precise=precise, **of.rounding)
        out = reference.forward(of.inputs, of.spec, **options)[0]
        return out, *(reference.backward(of.inputs, of.spec, of.dout, **options)[:3] if gradients else ())

    results = {name: x.detach() for name, x in zip(("out", "dq", "dk", "dv"), (out, *gradients))}
    draws = other_draws(problem), roundings(problem)
    assert_right(judge_by_draws(results, references, problem, *draws), problem.case.name)
