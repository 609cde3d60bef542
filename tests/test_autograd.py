"""Gradients by torch's roads: autograd, torch.func, checkpointing; what has none is refused."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fa4.oracle import reference
from fa4.oracle.cases import make
from tests.small import SMALL


@pytest.mark.parametrize("case", [SMALL["sink"], SMALL["varlen"]], ids=str)
def test_torch_func_takes_gradients(case, seed):
    """torch.func sees only its own kind of autograd function."""
    problem = make(case, seed)
    named = problem.tensors()
    expected = [g for g in problem.call_with_gradients()[2] if g is not None]

    def call(*leaves):
        return problem.call(**dict(zip(named, leaves)))

    (_, lse), pull_back = torch.func.vjp(call, *named.values())
    got = pull_back((problem.dout, problem.dlse.masked_fill(lse == -torch.inf, 0.0)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    by_grad = torch.func.grad(lambda q: (call(q, *list(named.values())[1:])[0] * problem.dout).sum())(named["q"])
    leaf = named["q"].clone().requires_grad_()
    assert torch.equal(by_grad, torch.autograd.grad(problem.call(q=leaf)[0], leaf, problem.dout)[0])
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.func.grad(lambda q: torch.func.grad(lambda x: call(x, *list(named.values())[1:])[0].sum())(q).sum())(
            named["q"]
        )


def test_gradients_reach_only_what_asks_for_them(seed):
    problem = make(SMALL["dense"], seed)
    q = problem.inputs.q.clone().requires_grad_()
    out, _ = problem.call(q=q)
    out.backward(problem.dout)
    expected = reference.backward(problem.inputs, problem.spec, problem.dout).dq
    torch.testing.assert_close(q.grad.double(), expected, rtol=1e-4, atol=1e-5)


def test_lse_alone_is_differentiable(seed):
    problem = make(SMALL["sink"], seed)
    leaves = {name: x.clone().requires_grad_() for name, x in problem.tensors().items()}
    _, lse = problem.call(**leaves)
    grads = torch.autograd.grad(lse, list(leaves.values()), problem.dlse)
    zero = torch.zeros_like(problem.dout)
    for got, expected in zip(grads, reference.backward(problem.inputs, problem.spec, zero, problem.dlse)):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_second_derivative_is_refused(seed):
    problem = make(SMALL["dense"], seed)
    q = problem.inputs.q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(problem.call(q=q)[0].square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        dq.sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v", "learnable_sink"])
def test_forward_mode_is_refused(name, seed):
    """torch would drop the tangent without a word."""
    problem = make(SMALL["sink"], seed)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(problem.tensors()[name], torch.ones_like(problem.tensors()[name]))
        with pytest.raises(NotImplementedError, match=f"{name} carries a tangent"):
            problem.call(**{name: x})
        problem.call()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant, seed):
    problem = make(SMALL["dense"], seed)
    expected = problem.call_with_gradients()[2]
    leaves = [x.clone().requires_grad_() for x in problem.tensors().values()]
    out, lse = checkpoint(lambda q, k, v: problem.call(q=q, k=k, v=v), *leaves, use_reentrant=use_reentrant)
    torch.autograd.backward((out, lse), (problem.dout, problem.dlse))
    assert all(torch.equal(x.grad, g) for x, g in zip(leaves, expected))
