"""The road to every backend: tensors as callers have them, and rows that no sequence uses.

Fresh memory is full of NaN in tests, as it may be on a GPU.
"""

import contextlib

import pytest
import torch

import fa4
from fa4 import cases, fallback
from fa4.cases import Case

BACKENDS = ("torch", "sm80", "sm100")


def chip(backend: str, seed: int):
    """CPU tensors live on a chip of the backend inside."""
    if backend == "torch":
        return contextlib.nullcontext()
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    pytest.importorskip("fa4.emulator.machine._core", reason="the emulator has a part in C++")
    from fa4.emulator import emulate

    return emulate({"sm80": "sm_80", "sm100": "sm_100a"}[backend], seed=seed, sms=8)


def padded(problem: cases.Problem, rows: int) -> dict[str, torch.Tensor]:
    """q, k, v with rows behind the last sequence, as in a batch padded to a fixed size."""
    inputs = problem.inputs
    return {name: torch.cat([x, torch.full_like(x[:rows], 7.0)]) for name, x in zip("qkv", inputs[:3])}


PADDED = {
    "sequences": Case("sequences", lengths=((70, 90), (0, 5), (33, 20)), causal=True),
    "seqused_sink": Case(
        "seqused_sink", lengths=((70, 90), (0, 5), (33, 20)), seqused=((50, 90), (0, 5), (33, 0)), sink=True
    ),
    "few_queries": Case("few_queries", lengths=((2, 1100), (1, 700), (0, 9)), heads_q=4, head_dim=32, sink=True),
}


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_the_last_sequence_are_zero(backend, name, seed):
    problem = cases.make(PADDED[name], seed)
    more = padded(problem, 3)
    used = problem.inputs.q.shape[0]
    with chip(backend, seed):
        out, lse = problem.call(**more, backend=backend)
    assert (out[used:] == 0).all() and (lse[:, used:] == -torch.inf).all()
    cases.assert_right(cases.judge_forward(problem, out[:used], lse[:, :used]), f"seed {seed}")


@pytest.mark.parametrize("name", ["sequences", "seqused_sink"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_leaves_the_gradient_of_a_projection_finite(backend, name, seed):
    """q, k, v of the padding come out of a Linear; one NaN in their gradients would be in every weight's."""
    problem = cases.make(PADDED[name], seed)
    more = {name: x.requires_grad_() for name, x in padded(problem, 3).items()}
    weight = torch.eye(64, dtype=torch.bfloat16, requires_grad=True)
    with chip(backend, seed):
        q, k, v = (x @ weight for x in more.values())
        out, lse = problem.call(q=q, k=k, v=v, backend=backend)
        dlse = torch.where(lse == -torch.inf, 0.0, 1.0)
        torch.autograd.backward((out, lse), (torch.ones_like(out), dlse))
    assert weight.grad.isfinite().all()
    for x, inner in zip(more.values(), problem.inputs[:3]):
        rows = inner.shape[0]
        assert (x.grad[rows:] == 0).all() and x.grad[:rows].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_upstream_gradient_of_lse_may_be_expanded_or_strided(backend, seed):
    problem = cases.make(Case("dlse", batch=2, seqlen_q=70, seqlen_k=90, causal=True), seed)
    ones = torch.ones_like(problem.dlse)
    leaves = [x.requires_grad_() for x in problem.tensors().values()]
    with chip(backend, seed):
        _, lse = problem.call(backend=backend)
        layouts = (ones, ones[:1, :1, :1].expand_as(ones), ones.transpose(1, 2).contiguous().transpose(1, 2))
        plain, *others = (torch.autograd.grad(lse, leaves[:2], x, retain_graph=True) for x in layouts)
    for other in others:
        assert all(torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-3) for a, b in zip(plain, other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_may_be_strided_and_of_any_dtype(backend, dtype, seed):
    problem = cases.make(Case("sink", seqlen_q=70, seqlen_k=90, sink=True), seed)
    wide = torch.zeros(4, dtype=dtype)
    wide[::2] = problem.inputs.sink
    with chip(backend, seed):
        out, lse = problem.call(learnable_sink=wide[::2], backend=backend)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


EMPTY = {
    "no_keys": Case("no_keys", batch=2, seqlen_q=9, seqlen_k=0, sink=True),
    "no_keys_packed": Case(
        "no_keys_packed", lengths=((9, 0), (0, 0), (5, 0)), seqused=((8, 0), (0, 0), (5, 0)), sink=True
    ),
    "no_keys_no_sink": Case("no_keys_no_sink", lengths=((9, 0), (5, 0))),
    "no_queries": Case("no_queries", lengths=((0, 9), (0, 5)), sink=True),
    "nothing": Case("nothing", batch=0, sink=True),
}  # fmt: skip


@pytest.mark.parametrize("case", EMPTY.values(), ids=str)
def test_an_empty_problem_is_no_launch_and_reads_no_length(case, monkeypatch, seed):
    problem = cases.make(case, seed)

    def launch(*_):
        raise AssertionError("launched")

    monkeypatch.setattr(fallback.Plan, "forward", launch)
    monkeypatch.setattr(fallback.Plan, "backward", launch)
    out, lse, grads = problem.call_with_gradients()
    judgements = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads)
    cases.assert_right(judgements, f"seed {seed}")


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_that_are_not_positive(backend, scale, seed):
    problem = cases.make(Case("scale", seqlen_q=70, seqlen_k=90, softmax_scale=scale, causal=True), seed)
    with chip(backend, seed):
        out, lse, grads = problem.call_with_gradients(backend=backend)
    judgements = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads)
    cases.assert_right(judgements, f"seed {seed}")
    if scale == 0:
        assert not grads.dq.any() and not grads.dk.any()


def test_explain_sees_the_lengths():
    """Pairs of CTAs are for many queries; a few go to the kernel that splits keys, unless gradients are asked for."""
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    from fa4.device import chip_by_number, emulating

    def explained(rows, **flags):
        q, k = torch.empty(1, rows, 8, 128, dtype=torch.bfloat16), torch.empty(1, 4096, 8, 128, dtype=torch.bfloat16)
        return fa4.explain(q.requires_grad_(flags.pop("trains", False)), k, k, **flags)

    with emulating(chip_by_number(100, emulated=True)):
        many, some, few, trained = explained(512), explained(200), explained(1), explained(1, trains=True)
        named = explained(1, backend="sm100")
    assert many.chosen == "sm100" and "pairs" in many.tiles
    assert some.chosen == "sm100" and "pairs" not in some.tiles
    assert few.chosen == "sm80" and "parts" in few.tiles
    assert trained.chosen == named.chosen == "sm100"
    assert "preferred only for inference with at most 64 query rows" in str(many)
