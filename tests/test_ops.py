"""The operators as torch sees them: schema, opcheck, shapes of tensors without data, tracing, FLOP counts."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import fa4
from fa4.oracle import reference
from fa4.oracle.cases import CASES, make
from fa4.runtime.spec import AttentionInputs, Flags, Gradients, Saved
from fa4.torch_ops.flops import unmasked_pairs
from tests.small import SMALL


def operator_arguments(case, seed, requires_grad):
    problem = make(case, seed)
    tensors = [
        x if x is None else x.requires_grad_(requires_grad and x.is_floating_point()) for x in problem.inputs[:8]
    ]
    s = problem.spec
    flags = Flags(s.softmax_scale, s.window_left, s.window_right, s.softcap, s.deterministic, requires_grad)
    return (*tensors, *problem.inputs[8:], *flags)


def test_the_schema_is_the_records():
    names = [argument.name for argument in torch.ops.fa4.forward.default._schema.arguments]
    assert names == [*AttentionInputs._fields, *Flags._fields]
    backward = torch.ops.fa4.backward.default._schema
    assert [argument.name for argument in backward.arguments] == [*Saved._fields, *names]
    assert [result.name for result in backward.returns] == list(Gradients._fields)


@pytest.mark.parametrize("case", SMALL.values(), ids=str)
def test_opcheck_forward(case, seed):
    torch.library.opcheck(torch.ops.fa4.forward.default, operator_arguments(case, seed, requires_grad=True))


def test_opcheck_of_scales_in_a_tensor(seed):
    *arguments, none = operator_arguments(SMALL["sink"], seed, requires_grad=True)
    scales = torch.tensor([0.3, 0.0], dtype=torch.float64)
    torch.library.opcheck(torch.ops.fa4.forward.default, (*arguments, scales))
    assert none is None


@pytest.mark.parametrize("case", SMALL.values(), ids=str)
def test_opcheck_backward(case, seed):
    arguments = operator_arguments(case, seed, requires_grad=False)
    problem = make(case, seed)
    out, lse = torch.ops.fa4.forward(*arguments)
    dlse = problem.dlse.masked_fill(lse == -torch.inf, 0.0)
    torch.library.opcheck(torch.ops.fa4.backward.default, (*Saved(out, lse, problem.dout, dlse), *arguments))


@pytest.mark.parametrize("case", SMALL.values(), ids=str)
def test_meta_tensors_give_shapes(case):
    real, meta = make(case, 0), make(case, 0, "meta")
    for got, expected in zip(meta.call(), real.call()):
        assert got.is_meta and got.shape == expected.shape and got.dtype == expected.dtype


@pytest.mark.parametrize("mode", ["fake", "symbolic", "real"])
def test_packed_calls_are_traced_without_their_lengths(mode, seed):
    problem = make(SMALL["varlen"], seed)
    i = problem.inputs

    def call(q, k, v, cu_seqlens_q, cu_seqlens_k):
        lengths = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=20, max_seqlen_k=20)
        return fa4.flash_attn_varlen_func(q, k, v, causal=True, **lengths)

    arguments = (i.q, i.k, i.v, i.cu_seqlens_q, i.cu_seqlens_k)
    graph = make_fx(call, tracing_mode=mode)(*arguments)
    assert torch.equal(graph(*arguments), call(*arguments))
    assert sum(node.target is torch.ops.fa4.forward.default for node in graph.graph.nodes) == 1


def test_fake_tensors_give_shapes_of_packed_calls():
    problem = make(SMALL["varlen"], 0)
    with FakeTensorMode() as mode:
        fakes = {f: None if x is None else mode.from_tensor(x) for f, x in zip("qkv", problem.inputs)}
        cu_seqlens = mode.from_tensor(problem.inputs.cu_seqlens_q)
        out = fa4.flash_attn_varlen_func(**fakes, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    assert out.shape == problem.inputs.q.shape


@pytest.mark.parametrize("name", ["full", "causal_more_keys", "window_both_sides", "window_masks_rows", "one_key"])
def test_visible_pairs_counts_the_mask(name):
    problem = make(CASES[name], 0)
    sizes = CASES[name].seqlen_q, CASES[name].seqlen_k
    expected = int(reference.mask(problem.spec, *sizes).sum())
    assert unmasked_pairs(*sizes, problem.spec.window_left, problem.spec.window_right) == expected


@pytest.mark.parametrize("case", [SMALL["dense"], SMALL["varlen"], SMALL["sink"]], ids=str)
def test_flop_counter_counts_visible_pairs(case, seed):
    """The sink case has head_dim_v != head_dim: of the forward's products one is over each, of the backward's five,
    S, dQ and dK are over head_dim."""
    problem = make(case, seed)
    lengths = case.lengths or ((case.seqlen_q, case.seqlen_k),) * case.batch
    pairs = sum(int(reference.mask(problem.spec, *pair).sum()) for pair in lengths)
    with FlopCounterMode(display=False) as counter:
        problem.call_with_gradients()
    d, dv = case.head_dim, case.head_dim_v or case.head_dim
    forward, backward = 2 * (d + dv), 2 * (3 * d + 2 * dv)
    assert counter.get_total_flops() == (forward + backward) * pairs * case.heads_q


@pytest.mark.parametrize("known_as", ["meta", "fake"])
def test_flops_of_lengths_that_are_not_known_are_an_upper_bound(known_as):
    """Every sequence counts as the longest."""
    i = make(SMALL["varlen"], 0).inputs
    mode = FakeTensorMode()
    unknown = (lambda x: x.to("meta")) if known_as == "meta" else mode.from_tensor
    q, k, v, *lengths = map(unknown, (i.q, i.k, i.v, i.cu_seqlens_q, i.cu_seqlens_k))
    with mode if known_as == "fake" else nullcontext(), FlopCounterMode(display=False) as counter:
        flags = Flags(0.3, window_left=4)
        torch.ops.fa4.forward(q, k, v, None, *lengths, None, None, 21, 33, *flags)
    pairs = i.batch * unmasked_pairs(21, 33, 4, None)
    assert counter.get_total_flops() == 4 * pairs * i.q.shape[1] * i.q.shape[2]
