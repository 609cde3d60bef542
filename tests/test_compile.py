"""torch.compile: one graph, forward and backward, that serves other lengths, scales and windows."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fa4
from fa4.oracle.cases import make
from tests.small import SMALL


@pytest.mark.parametrize("case", SMALL.values(), ids=str)
def test_fullgraph_compile_forward_and_backward(case, seed):
    problem = make(case, seed)
    torch._dynamo.reset()
    eager = problem.call_with_gradients()

    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.tensors().items()}
    compiled = torch.compile(lambda leaves: problem.call(**leaves), fullgraph=True, backend="aot_eager")
    out, lse = compiled(leaves)
    dlse = problem.dlse.masked_fill(lse.detach() == -torch.inf, 0.0)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (problem.dout, dlse))
    assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
    for got, expected in zip(grads, [g for g in eager[2] if g is not None]):
        torch.testing.assert_close(got, expected)


def test_new_lengths_do_not_recompile(seed):
    """The first new length makes the graph dynamic; from then on any length runs what is there."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: fa4.flash_attn_func(q, k, v, causal=True), fullgraph=True, backend=counter)
    counts = []
    for seqlen in (17, 33, 65, 130):
        q, k, v = (torch.randn(3, seqlen, 2, 8) for _ in range(3))
        assert torch.equal(compiled(q, k, v), fa4.flash_attn_func(q, k, v, causal=True))
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 3


@pytest.mark.parametrize(
    ("asked", "mod"),
    [
        (dict(softmax_scale=0.3), None),
        (dict(softcap=5.0), None),
        (dict(softmax_scale=0.3, softcap=5.0), None),
        (dict(softmax_scale=0.3), lambda score, b, h, q, k: score - 0.1 * (q - k)),
    ],
    ids=["scale", "softcap", "both", "score_mod"],
)
def test_new_scales_do_not_recompile(asked, mod, seed):
    """The first new number becomes an input of the graph, to the last bit, also for gradients."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    leaves = [torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(seed + i)) for i in range(3)]

    def attend(*numbers):
        return fa4.flash_attn_func(*leaves, causal=True, score_mod=mod, **dict(zip(asked, numbers)))

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for x in leaves:
        x.requires_grad_()
    counts = []
    for factor in (1.0, 1.5, 0.7, 3.1):
        numbers = [factor * number for number in asked.values()]
        of_graph, expected = (
            (out.detach(), *torch.autograd.grad(out.sin().sum(), leaves))
            for out in (compiled(*numbers), attend(*numbers))
        )
        assert all(torch.equal(a, b) for a, b in zip(of_graph, expected))
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 3


def test_new_windows_do_not_recompile(seed):
    """The first new width makes it a symbol of the graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))

    def attend(left, right):
        return fa4.flash_attn_func(q, k, v, window_size=(left, right))

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    counts = []
    for left, right in ((3, 4), (5, 6), (7, 9), (20, 2)):
        assert torch.equal(compiled(left, right), attend(left, right))
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 3
