"""The operators as torch sees them: opcheck, torch.compile, checkpointing, FLOP counts."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fa4
from fa4 import reference
from fa4.cases import CASES, Case, make
from fa4.ops import visible_pairs

SMALL = {
    "dense": Case("dense", batch=2, seqlen_q=20, seqlen_k=30, heads_q=4, head_dim=8, causal=True, dtype=torch.float32),
    "sink": Case("sink", seqlen_q=20, seqlen_k=30, head_dim=8, head_dim_v=12, sink=True, dtype=torch.float32),
    "varlen": Case("varlen", lengths=((20, 20), (0, 3), (9, 17)), head_dim=8, causal=True, dtype=torch.float32),
    "seqused": Case(
        "seqused", lengths=((20, 20), (9, 17)), seqused=((13, 20), (9, 5)), head_dim=8, dtype=torch.float32
    ),
}


def operator_arguments(case, seed, requires_grad):
    problem = make(case, seed)
    i, s = problem.inputs, problem.spec
    tensors = [x if x is None else x.requires_grad_(requires_grad and x.is_floating_point()) for x in i[:8]]
    return (
        *tensors,
        *i[8:],
        s.softmax_scale,
        s.window_left,
        s.window_right,
        s.softcap,
        s.deterministic,
        requires_grad,
        "auto",
    )


@pytest.mark.parametrize("case", SMALL.values(), ids=str)
def test_opcheck_forward(case, seed):
    torch.library.opcheck(torch.ops.fa4.forward.default, operator_arguments(case, seed, requires_grad=True))


@pytest.mark.parametrize("case", SMALL.values(), ids=str)
def test_opcheck_backward(case, seed):
    arguments = operator_arguments(case, seed, requires_grad=False)
    problem = make(case, seed)
    out, lse = torch.ops.fa4.forward(*arguments)
    dlse = problem.dlse.masked_fill(lse == -torch.inf, 0.0)
    torch.library.opcheck(
        torch.ops.fa4.backward.default, (problem.dout, dlse, *arguments[:3], out, lse, *arguments[3:])
    )


@pytest.mark.parametrize("case", SMALL.values(), ids=str)
def test_meta_tensors_give_shapes(case):
    real, meta = make(case, 0), make(case, 0, "meta")
    for got, expected in zip(meta.call(), real.call()):
        assert got.is_meta and got.shape == expected.shape and got.dtype == expected.dtype


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


@pytest.mark.parametrize("name", ["q", "v", "learnable_sink"])
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


@pytest.mark.parametrize("name", ["full", "causal_more_keys", "window_both_sides", "window_masks_rows", "one_key"])
def test_visible_pairs_counts_the_mask(name):
    problem = make(CASES[name], 0)
    sizes = CASES[name].seqlen_q, CASES[name].seqlen_k
    expected = int(reference.mask(problem.spec, *sizes).sum())
    assert visible_pairs(*sizes, problem.spec.window_left, problem.spec.window_right) == expected


@pytest.mark.parametrize("case", [SMALL["dense"], SMALL["varlen"]], ids=str)
def test_flop_counter_counts_visible_pairs(case, seed):
    problem = make(case, seed)
    lengths = case.lengths or ((case.seqlen_q, case.seqlen_k),) * case.batch
    pairs = sum(int(reference.mask(problem.spec, *pair).sum()) for pair in lengths)
    with FlopCounterMode(display=False) as counter:
        problem.call_with_gradients()
    forward, backward = 4, 10  # FLOP per pair and unit of head_dim
    assert counter.get_total_flops() == (forward + backward) * pairs * case.heads_q * case.head_dim


def test_a_call_without_gradients_skips_the_dispatcher_unless_watched(monkeypatch, seed):
    q, k, v = (x.detach() for x in make(CASES["full"], seed).tensors().values())
    reached = []
    direct = fa4.ops._forward
    monkeypatch.setattr(fa4.ops, "_forward", lambda *arguments: reached.append(1) or direct(*arguments))
    expected = fa4.flash_attn_func(q, k, v)
    assert len(reached) == 1
    with FlopCounterMode(display=False) as counter:
        fa4.flash_attn_func(q, k, v)
    assert counter.get_total_flops() > 0
    leaf = q.clone().requires_grad_()
    assert torch.equal(fa4.flash_attn_func(leaf, k, v), expected)
    assert len(reached) == 1
