"""Partial results joined: equal to attention over all keys, exact where a state saw nothing, differentiable."""

import itertools

import pytest
import torch

import fa4
from fa4.oracle import cases
from fa4.oracle.cases import Case


def states_of(problem: cases.Problem, cuts: list[int], **leaves) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Attention over the stretches of keys between the cuts; only the first has the sink."""
    i = problem.inputs
    q, k, v = (leaves.get(name, x) for name, x in (("q", i.q), ("k", i.k), ("v", i.v)))
    states = []
    for n, (first, stop) in enumerate(itertools.pairwise(cuts)):
        sink = i.sink if n == 0 else None
        states.append(fa4.flash_attn_func(q, k[:, first:stop], v[:, first:stop], learnable_sink=sink, return_lse=True))
    return states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
def test_parts_give_the_whole(dtype, sink, seed):
    problem = cases.make(Case("whole", batch=2, seqlen_q=9, seqlen_k=50, heads_q=4, dtype=dtype, sink=sink), seed)
    out, lse = fa4.merge_states(*zip(*states_of(problem, [0, 7, 7, 30, 50])))
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")
    assert out.dtype == dtype and lse.dtype == torch.float32


def test_packed_states(seed):
    problem = cases.make(Case("packed", lengths=((3, 9), (0, 5), (4, 0))), seed)
    out, lse = problem.call()
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    merged = fa4.merge_states([out, nothing[0]], [lse, nothing[1]])
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse), f"seed {seed}"


def test_what_saw_nothing_changes_no_bit(seed):
    problem = cases.make(Case("alone", batch=2, seqlen_q=5, seqlen_k=20, dtype=torch.bfloat16), seed)
    out, lse = problem.call()
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    merged, merged_lse = fa4.merge_states([nothing[0], out, nothing[0]], [nothing[1], lse, nothing[1]])
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse), f"seed {seed}"
    merged, merged_lse = fa4.merge_states([nothing[0]] * 2, [nothing[1]] * 2)
    assert (merged == 0).all() and (merged_lse == -torch.inf).all()


def test_gradients_are_those_of_the_whole(seed):
    """Also of rows that a state, or every state, saw no key for."""
    problem = cases.make(Case("grads", seqlen_q=6, seqlen_k=12, dtype=torch.float64, sink=True), seed)
    leaves = {name: x.clone().requires_grad_() for name, x in problem.tensors().items() if name in "qkv"}
    whole = fa4.flash_attn_func(**leaves, learnable_sink=problem.inputs.sink, return_lse=True)
    parts = fa4.merge_states(*zip(*states_of(problem, [0, 5, 5, 12], **leaves)))
    upstream = problem.dout, problem.dlse
    expected, got = (torch.autograd.grad(x, list(leaves.values()), upstream) for x in (whole, parts))
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)

    out, lse = (torch.zeros(1, 2, 1, 4, requires_grad=True), torch.full((1, 1, 2), -torch.inf, requires_grad=True))
    merged, merged_lse = fa4.merge_states([out, out], [lse, lse])
    grads = torch.autograd.grad((merged, merged_lse), (out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    assert all((x == 0).all() for x in grads)


def test_fullgraph(seed):
    torch._dynamo.reset()
    problem = cases.make(Case("compiled", seqlen_q=6, seqlen_k=12, dtype=torch.float32), seed)
    outs, lses = zip(*states_of(problem, [0, 5, 12]))
    compiled = torch.compile(lambda a, b: fa4.merge_states(a, b), fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(list(outs), list(lses)), fa4.merge_states(outs, lses)):
        torch.testing.assert_close(got, expected)


OUT, LSE = torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3)
ERRORS = {
    "no_list": (TypeError, "outs is a Tensor, expected a list", OUT, [LSE]),
    "none": (ValueError, "there are 0 outs and 0 lses", [], []),
    "counts_differ": (ValueError, "there are 2 outs and 1 lses", [OUT, OUT], [LSE]),
    "not_a_tensor": (TypeError, r"lses\[0\] is a float", [OUT], [1.0]),
    "shape": (ValueError, r"outs\[1\] has shape \(2, 3, 4, 4\), expected \(2, 3", [OUT, OUT[..., :4]], [LSE] * 2),
    "lse_shape": (ValueError, r"lses\[0\] has shape \(2, 3, 4\), expected \(2, 4, 3\)", [OUT], [LSE.mT]),
    "lse_dtype": (TypeError, r"lses\[0\] has dtype torch.bfloat16, expected torch.float32", [OUT], [LSE.bfloat16()]),
    "dtype": (TypeError, r"outs\[1\] has dtype torch.float16, expected torch.float32", [OUT, OUT.half()], [LSE] * 2),
    "device": (ValueError, r"lses\[0\] is on meta, expected cpu", [OUT], [LSE.to("meta")]),
    "axes": (ValueError, r"outs\[0\] has shape \(8,\), expected \(batch", [OUT[0, 0, 0]], [LSE]),
}  # fmt: skip


@pytest.mark.parametrize("error, message, outs, lses", ERRORS.values(), ids=ERRORS)
def test_an_error_names_the_argument(error, message, outs, lses):
    with pytest.raises(error, match=message):
        fa4.merge_states(outs, lses)
