"""Results of somebody else's function that runs on fa4, against the oracle: no lse comes back, and none gets a
gradient."""

import torch
from torch import Tensor

from fa4 import reference
from fa4.cases import Problem, assert_right, judge


def leaves(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as tensors that gradients are asked of."""
    q, k, v = (x.detach().clone().requires_grad_() for x in problem.inputs[:3])
    return q, k, v


def assert_attention(problem: Problem, out: Tensor, *gradients: Tensor) -> None:
    """out, and dq, dk, dv for `problem.dout`, err at most twice as much as the same-precision reference."""
    i, spec = problem.inputs, problem.spec
    assert i.q.dtype in (torch.float16, torch.bfloat16) and min(x.numel() for x in i[:3]) >= 256  # see fa4.cases
    exact, low = (reference.forward(i, spec, precise=precise)[:1] for precise in (True, False))
    if gradients:
        exact, low = (
            (*o, *reference.backward(i, spec, problem.dout, precise=p)) for o, p in ((exact, True), (low, False))
        )
    got = zip(("out", "dq", "dk", "dv"), (out, *gradients), exact, low)
    assert_right([judge(name, x.detach(), a, b) for name, x, a, b in got], problem.case.name)
