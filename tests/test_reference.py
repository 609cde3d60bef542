"""The oracle against torch.autograd, gradcheck and torch's own attention."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fa4.oracle import reference
from fa4.oracle.cases import CASES, Case, make

# Cases whose rows all see a key: autograd through logsumexp of an empty row is undefined.
SMALL = {
    "plain": Case("plain", batch=2, seqlen_q=5, seqlen_k=7, head_dim=4),
    "causal_gqa": Case("causal_gqa", seqlen_q=5, seqlen_k=7, heads_q=4, head_dim=4, causal=True),
    "window": Case("window", seqlen_q=6, seqlen_k=6, head_dim=4, window_size=(2, 1)),
    "softcap": Case("softcap", seqlen_q=5, seqlen_k=6, head_dim=4, softcap=1.5, logits=3.0),
    "sink": Case("sink", seqlen_q=5, seqlen_k=6, head_dim=4, sink=True, causal=True),
    "head_dim_v": Case("head_dim_v", seqlen_q=5, seqlen_k=6, head_dim=4, head_dim_v=3),
    "varlen": Case("varlen", lengths=((3, 4), (5, 5)), head_dim=4, causal=True),
    "seqused": Case("seqused", lengths=((3, 4), (5, 6)), seqused=((2, 3), (5, 4)), head_dim=4),
}


def _differentiable(case, seed):
    problem = make(replace(case, dtype=torch.float64), seed)
    leaves = [x.clone().requires_grad_() for x in problem.tensors().values()]

    def run(q, k, v, sink=None):
        inputs = problem.inputs._replace(q=q, k=k, v=v, sink=sink)
        out, lse = reference.forward(inputs, problem.spec)
        return out, lse[lse.isfinite()]

    return problem, leaves, run


@pytest.mark.parametrize("case", SMALL.values(), ids=str)
def test_gradients_match_autograd(case, seed):
    problem, leaves, run = _differentiable(case, seed)
    out, lse = run(*leaves)
    used = torch.isfinite(reference.forward(problem.inputs, problem.spec)[1])
    expected = torch.autograd.grad((out, lse), leaves, (problem.dout, problem.dlse[used]))
    got = reference.backward(problem.inputs, problem.spec, problem.dout, problem.dlse)
    for name, a, b in zip(got._fields, got, expected):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("case", [SMALL["softcap"], SMALL["sink"], SMALL["causal_gqa"]], ids=str)
def test_forward_passes_gradcheck(case, seed):
    _, leaves, run = _differentiable(case, seed)
    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("name", ["full", "gqa", "causal_d128", "scale"])
def test_forward_matches_torch_sdpa(name, seed):
    case = replace(CASES[name], dtype=torch.float64)
    i, spec = make(case, seed).inputs, make(case, seed).spec
    q, k, v = (x.transpose(1, 2) for x in (i.q, i.k, i.v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, scale=spec.softmax_scale, enable_gqa=True)
    out, _ = reference.forward(i, spec)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-11, atol=1e-12)


def test_mask_is_aligned_bottom_right():
    problem = make(Case("x", seqlen_q=2, seqlen_k=4, causal=True), 0)
    keep = reference.mask(problem.spec, 2, 4)
    assert keep.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_rows_without_keys_give_zero_and_minus_infinity(seed):
    problem = make(CASES["causal_fewer_keys_masks_rows"], seed)
    out, lse = reference.forward(problem.inputs, problem.spec)
    hidden = 200 - 71
    assert (out[:, :hidden] == 0).all() and (lse[:, :, :hidden] == -torch.inf).all()
    assert lse[:, :, hidden:].isfinite().all()
    grads = reference.backward(problem.inputs, problem.spec, problem.dout)
    assert (grads.dq[:, :hidden] == 0).all() and all(g.isfinite().all() for g in grads[:3])


@pytest.mark.parametrize(
    "name", ["window_masks_rows", "causal_fewer_keys_masks_rows", "seqused", "packed_rows_past_the_end", "no_keys"]
)
def test_unreached_rows_are_those_without_a_probability(name, seed):
    problem = make(CASES[name], seed)
    queries, keys = reference.unreached(problem.inputs, problem.spec)
    out, lse = reference.forward(problem.inputs, problem.spec)
    grads = reference.backward(problem.inputs, problem.spec, problem.dout, problem.dlse)
    assert torch.equal((lse == -torch.inf).all(dim=-2), queries) and queries.any()
    for x, rows in ((out, queries), (grads.dq, queries), (grads.dk, keys), (grads.dv, keys)):
        assert torch.equal((x == 0).flatten(rows.ndim).all(dim=-1), rows)


def test_same_precision_reference_has_an_error_of_the_dtypes_size(seed):
    """It must be neither exact (then it allows nothing) nor sloppy (then it allows everything)."""
    problem = make(CASES["full"], seed)
    exact, floor = (reference.forward(problem.inputs, problem.spec, precise=p)[0] for p in (True, False))
    error = (floor.double() - exact).abs().max() / exact.abs().max()
    assert 1e-4 < error < 2**-7


def test_a_backward_in_float32_meets_an_lse_of_other_sums(seed):
    """As in every kernel whose forward and backward multiply by instructions or shapes of their own: the weight of a
    query's only key is 1 in truth, and off by some last bits of its score here."""
    problem = make(replace(CASES["window_of_one"], dtype=torch.float32), seed)
    exact, floor = (reference.backward(problem.inputs, problem.spec, problem.dout, precise=p).dv for p in (True, False))
    error = (floor.double() - exact).abs().max() / exact.abs().max()
    assert 1e-8 < error < 1e-5


def test_sequential_sums_add_their_terms_in_order(seed):
    """2^24 + 1 - 2^24 is 0 in float32 from the left to the right, and 1 in float64: lse of a single key tells."""
    problem = make(Case("one", seqlen_q=1, seqlen_k=1, head_dim=3, dtype=torch.float32), seed)
    q = torch.tensor([2.0**24, 1.0, -(2.0**24)]).view(1, 1, 1, 3).expand(problem.inputs.q.shape)
    inputs = problem.inputs._replace(q=q, k=torch.ones_like(problem.inputs.k))
    spec = replace(problem.spec, softmax_scale=1.0)
    assert not reference.forward(inputs, spec, precise=False, sequential=True)[1].any()
    assert (reference.forward(inputs, spec)[1] == 1).all()
    problem = make(Case("more", seqlen_q=40, seqlen_k=50, head_dim=24, causal=True, dtype=torch.float32), seed)
    arguments = problem.inputs, problem.spec, problem.dout, problem.dlse
    for x, y in zip(
        reference.backward(*arguments, precise=False), reference.backward(*arguments, precise=False, sequential=True)
    ):
        assert x is None or torch.allclose(x, y, rtol=1e-4, atol=1e-5)


def test_an_order_of_keys_gives_other_rounding_errors_of_the_same_size(seed):
    problem = make(CASES["causal"], seed)
    exact = reference.forward(problem.inputs, problem.spec, key_order=1)[0]
    assert torch.equal(exact, reference.forward(problem.inputs, problem.spec)[0])
    orders = (None, 1, 2)
    floors = [reference.forward(problem.inputs, problem.spec, precise=False, key_order=x)[0] for x in orders]
    for x, y in itertools.pairwise(floors):
        assert torch.equal(x[:, 0], y[:, 0])  # one key
        errors = [(floor.double() - exact).flatten() for floor in (x, y)]
        assert 0.9 < errors[0].std() / errors[1].std() < 1.1
        assert torch.corrcoef(torch.stack(errors))[0, 1] < 0.8  # out is rounded alike


def test_most_keys_counts_what_a_query_sees(seed):
    for case, expected in (
        (Case("causal", seqlen_q=3, seqlen_k=7, head_dim=4, causal=True), 7),
        (Case("window", seqlen_q=3, seqlen_k=7, head_dim=4, window_size=(1, 0)), 2),
        (Case("one", seqlen_q=3, seqlen_k=7, head_dim=4, window_size=(0, 0)), 1),
        (Case("varlen", lengths=((3, 4), (5, 6), (2, 0)), head_dim=4), 6),
        (Case("none", lengths=((3, 0),), head_dim=4), 0),
    ):
        problem = make(case, seed)
        assert reference.most_keys(problem.inputs, problem.spec) == expected, case.name
