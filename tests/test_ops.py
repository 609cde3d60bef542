"""The operators as torch sees them: opcheck, torch.compile, checkpointing, FLOP counts."""

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fa4
from fa4 import fallback, reference
from fa4.cases import CASES, Case, make
from fa4.device import chip_by_number, emulating
from fa4.ops import visible_pairs
from fa4.spec import AttentionInputs, Flags, Gradients, Saved

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


@pytest.mark.parametrize("name", ["full", "causal_more_keys", "window_both_sides", "window_masks_rows", "one_key"])
def test_visible_pairs_counts_the_mask(name):
    problem = make(CASES[name], 0)
    sizes = CASES[name].seqlen_q, CASES[name].seqlen_k
    expected = int(reference.mask(problem.spec, *sizes).sum())
    assert visible_pairs(*sizes, problem.spec.window_left, problem.spec.window_right) == expected


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
    pairs = i.batch * visible_pairs(21, 33, 4, None)
    assert counter.get_total_flops() == 4 * pairs * i.q.shape[1] * i.q.shape[2]


class Noting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, arguments=(), kwargs=None):
        self.seen.append(function)
        return function(*arguments, **(kwargs or {}))


def _in_a_dispatch_mode(call, *tensors):
    with FlopCounterMode(display=False) as counter:
        call(*tensors)
    return counter.get_total_flops() > 0


def _in_a_function_mode(call, *tensors):
    with Noting() as mode:
        call(*tensors)
    return torch.ops.fa4.forward in mode.seen


def _in_a_profile(call, *tensors):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(*tensors)
    return any(event.key == "fa4::forward" for event in profile.key_averages())


def _by_make_fx(call, *tensors):
    graph = make_fx(call)(*tensors).graph
    return any(node.target is torch.ops.fa4.forward.default for node in graph.nodes)


def _by_dynamo(call, *tensors):
    seen = []

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=backend)(*tensors)
    return torch.ops.fa4.forward in seen or torch.ops.fa4.forward.default in seen


def _by_jit(call, *tensors):
    return "fa4::forward" in str(torch.jit.trace(call, tensors).graph)


def _by_export(call, *tensors):
    class Attention(torch.nn.Module):
        def forward(self, *tensors):
            return call(*tensors)

    graph = torch.export.export(Attention(), tensors).graph
    return any(node.target is torch.ops.fa4.forward.default for node in graph.nodes)


WATCHERS = {
    "dispatch_mode": _in_a_dispatch_mode,
    "function_mode": _in_a_function_mode,
    "profiler": _in_a_profile,
    "make_fx": _by_make_fx,
    "dynamo": _by_dynamo,
    "jit_trace": _by_jit,
    "export": _by_export,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", WATCHERS)
def test_whoever_watches_sees_the_operator_of_a_repeated_call(name, packed, seed):
    """A call without gradients goes past torch's dispatcher, from the second on by one look into a dictionary; but not
    where it is watched, nor because it was not watched before."""
    problem = make(SMALL["varlen" if packed else "dense"], seed)
    i = problem.inputs
    lengths = dict(cu_seqlens_q=i.cu_seqlens_q, cu_seqlens_k=i.cu_seqlens_k, max_seqlen_q=20, max_seqlen_k=20)

    def call(q, k, v):
        return fa4.flash_attn_varlen_func(q, k, v, **lengths) if packed else fa4.flash_attn_func(q, k, v)

    expected = call(i.q, i.k, i.v)
    assert WATCHERS[name](call, i.q, i.k, i.v)
    assert torch.equal(call(i.q, i.k, i.v), expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "learnable_sink", "cu_seqlens_q", "seqused_k"])
def test_a_tensor_subclass_anywhere_sees_the_operator(name, seed):
    problem = make(Case("all", lengths=((9, 17),), seqused=((9, 5),), sink=True, head_dim=8), seed)
    seen = []

    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, arguments, kwargs or {})

    i = problem.inputs
    arguments = dict(
        q=i.q, k=i.k, v=i.v, learnable_sink=i.sink, cu_seqlens_q=i.cu_seqlens_q, cu_seqlens_k=i.cu_seqlens_k,
        seqused_q=i.seqused_q, seqused_k=i.seqused_k,
    )  # fmt: skip
    expected = fa4.flash_attn_varlen_func(**arguments)
    arguments[name] = arguments[name].as_subclass(Seeing)
    out = fa4.flash_attn_varlen_func(**arguments)
    assert torch.ops.fa4.forward in seen or torch.ops.fa4.forward.default in seen
    assert torch.equal(out.as_subclass(torch.Tensor), expected)


def _vmapped(q, k, v):
    with pytest.raises(RuntimeError, match="vmap"):  # there is no batching rule; and no wrong result
        torch.func.vmap(fa4.flash_attn_func)(q[None], k[None], v[None])


def _graded(q, k, v):
    assert torch.func.grad(lambda q: fa4.flash_attn_func(q, k, v).sum())(q).any()


def _faked(q, k, v):
    with FakeTensorMode() as mode:
        assert isinstance(fa4.flash_attn_func(*map(mode.from_tensor, (q, k, v))), FakeTensor)


def _in_autocast(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        assert fa4.flash_attn_func(q, k, v).dtype == torch.bfloat16


def _in_inference_mode(q, k, v):
    with torch.inference_mode():
        assert fa4.flash_attn_func(q, k, v).is_inference()


def _trained(q, k, v):
    (dq,) = torch.autograd.grad(fa4.flash_attn_func(leaf := q.clone().requires_grad_(), k, v).sum(), leaf)
    assert dq.any()


def _trained_without_gradients(q, k, v):
    with torch.no_grad():
        assert not fa4.flash_attn_func(q.clone().requires_grad_(), k, v).requires_grad


def _with_tangents(q, k, v):
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="q carries a tangent"):
        fa4.flash_attn_func(forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize(
    "state",
    [_vmapped, _graded, _faked, _in_autocast, _in_inference_mode, _trained, _trained_without_gradients, _with_tangents],
    ids=lambda f: f.__name__[1:],
)
def test_a_repeated_call_heeds_the_state_of_torch(state, seed):
    """The same tensors, before, in and after the state."""
    q, k, v = (x.detach() for x in make(SMALL["dense"], seed).tensors().values())
    expected = fa4.flash_attn_func(q, k, v)
    state(q, k, v)
    again = fa4.flash_attn_func(q, k, v)
    assert torch.equal(again, expected) and not again.is_inference()


def test_a_repeated_call_looks_once_and_passes_the_dispatcher_by(monkeypatch, seed):
    q, k, v = (x.detach() for x in make(CASES["full"], seed).tensors().values())
    expected = fa4.flash_attn_func(q, k, v)

    def unexpected(*_):
        raise AssertionError("looked again")

    monkeypatch.setattr(fa4.checks, "call", unexpected)
    monkeypatch.setattr(fa4.ops, "route", unexpected)
    assert torch.equal(fa4.flash_attn_func(q, k, v), expected)


_PACKED = dict(cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32), cu_seqlens_k=torch.tensor([0, 3, 7]).int())
_TWO = torch.tensor([2, 3], dtype=torch.int32)
# Shapes of q, k and v, and other arguments; each differs from the first dense or the first packed one in one thing.
CALLS = {
    "dense": ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), {}),
    "batch": ((3, 5, 4, 8), (3, 7, 2, 8), (3, 7, 2, 8), {}),
    "seqlen_q": ((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), {}),
    "seqlen_k": ((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), {}),
    "heads_q": ((2, 5, 6, 8), (2, 7, 2, 8), (2, 7, 2, 8), {}),
    "heads_kv": ((2, 5, 4, 8), (2, 7, 1, 8), (2, 7, 1, 8), {}),
    "head_dim": ((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8), dict(softmax_scale=8**-0.5)),
    "head_dim_v": ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 16), {}),
    "causal": ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), dict(causal=True)),
    "left": ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), dict(window_size=(3, None))),
    "right": ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), dict(window_size=(None, 3))),
    "softcap": ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), dict(softcap=3.0)),
    "scale": ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), dict(softmax_scale=3.0)),
    "sink": ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), dict(learnable_sink=torch.zeros(4))),
    "deterministic": ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), dict(deterministic=True)),
    "packed": ((7, 4, 8), (9, 2, 8), (9, 2, 8), _PACKED),
    "packed_rows": ((5, 4, 8), (7, 2, 8), (7, 2, 8), _PACKED),
    "max_seqlen_q": ((7, 4, 8), (9, 2, 8), (9, 2, 8), _PACKED | dict(max_seqlen_q=3)),
    "max_seqlen_k": ((7, 4, 8), (9, 2, 8), (9, 2, 8), _PACKED | dict(max_seqlen_k=4)),
    "seqused_q": ((7, 4, 8), (9, 2, 8), (9, 2, 8), _PACKED | dict(seqused_q=_TWO)),
    "seqused_k": ((7, 4, 8), (9, 2, 8), (9, 2, 8), _PACKED | dict(seqused_k=_TWO)),
}  # fmt: skip


def test_calls_that_differ_in_one_thing_share_no_plan(monkeypatch):
    """What a call is remembered by must hold all that its plan depends on; what the plan is for is `explain`'s."""
    plans = []
    monkeypatch.setattr(fallback.Plan, "forward", lambda plan, *_: plans.append(plan))
    for dtype in (torch.float32, torch.float64):
        for name, (*shapes, flags) in CALLS.items():
            tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
            function = fa4.flash_attn_varlen_func if len(shapes[0]) == 3 else fa4.flash_attn_func
            for trains in (False, True, False):
                function(tensors[0].requires_grad_(trains), *tensors[1:], **flags)
                told = fa4.explain(*tensors, **flags)
                assert (plans[-1].spec, plans[-1].extent) == (told.spec, told.extent), (name, dtype, trains)
    chips = [chip_by_number(number, sms=sms, emulated=True) for number, sms in ((80, 2), (80, 3), (90, 3), (80, 2))]
    for chip in chips:
        with emulating(chip):
            fa4.flash_attn_func(*(torch.randn(1, 3, 2, 8) for _ in range(3)), backend="torch")
        assert plans[-1].chip == chip
