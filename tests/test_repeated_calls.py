"""A call that comes again goes past torch's dispatcher, unless somebody watches or torch's state says otherwise."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fa4
from fa4 import fallback
from fa4.oracle.cases import CASES, Case, make
from fa4.runtime.device import chip_by_number, emulating
from tests.small import SMALL


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
    assert torch.func.vmap(fa4.flash_attn_func)(q[None], k[None], v[None]).shape == (1, *q.shape)


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

    monkeypatch.setattr(fa4.torch_ops.checks, "call", unexpected)
    monkeypatch.setattr(fa4.torch_ops.ops, "route", unexpected)
    assert torch.equal(fa4.flash_attn_func(q, k, v), expected)


def test_a_call_like_those_before_gets_its_gradients(seed):
    q, k, v = make(SMALL["dense"], seed).tensors().values()
    leaf = q.detach().requires_grad_()
    grads = [torch.autograd.grad(fa4.flash_attn_func(leaf, k, v).sum(), leaf)[0] for _ in range(4)]
    assert grads[0].any() and all(torch.equal(dq, grads[0]) for dq in grads)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_lengths_of_a_call_like_those_before_are_looked_at(packed, seed):
    i = make(SMALL["varlen" if packed else "dense"], seed).inputs
    used = torch.full((i.batch,), 1, dtype=torch.int32)
    lengths = dict(cu_seqlens_q=i.cu_seqlens_q, cu_seqlens_k=i.cu_seqlens_k) if packed else dict(seqused_k=used)
    function = fa4.flash_attn_varlen_func if packed else fa4.flash_attn_func
    for _ in range(4):
        function(i.q, i.k, i.v, **lengths)
    lengths["cu_seqlens_k" if packed else "seqused_k"][-1] = 10_000
    with pytest.raises(ValueError, match="cu_seqlens_k" if packed else "seqused_k"):
        function(i.q, i.k, i.v, **lengths)


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn])
@pytest.mark.parametrize("name", ["q", "v", "learnable_sink"])
def test_another_torch_layout_is_refused_after_calls_of_the_same_strides(name, convert):
    """torch gives a sparse tensor the strides of an expanded one."""
    given = dict(q=torch.randn(2, 5, 4, 8), k=torch.randn(2, 7, 4, 8), v=torch.randn(2, 7, 4, 8))
    given |= dict(learnable_sink=torch.randn(4))
    sink = torch.randn(1).expand(4)
    for changed in ({}, {"learnable_sink": sink}):
        for _ in range(3):
            fa4.flash_attn_func(**given | changed)
    with pytest.raises(TypeError, match=f"{name} has layout {convert(given[name]).layout}, expected torch.strided"):
        fa4.flash_attn_func(**given | {name: convert(given[name])})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_after_calls_on_plain_ones():
    """torch's comparison of tensors aborts the process at nested ones."""
    q, k, v, used = (
        torch.randn(2, 5, 4, 8),
        torch.randn(2, 7, 4, 8),
        torch.randn(2, 7, 4, 8),
        torch.tensor([3, 4]).int(),
    )
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    dense = dict(q=q, k=k, v=v, learnable_sink=torch.randn(4), seqused_k=used)
    packed = dict(
        q=q[0], k=k[0], v=v[0], learnable_sink=torch.randn(4), cu_seqlens_q=bounds, cu_seqlens_k=bounds.clone()
    )
    cache = dict(q=q, k_cache=torch.randn(13, 4, 4, 8), v_cache=torch.randn(13, 4, 4, 8), learnable_sink=torch.randn(4))
    cache |= dict(cache_seqlens=used + 5, page_table=torch.arange(12).int().view(2, 6), cache_leftpad=used - 2)
    cache |= dict(k=k[:, :2], v=v[:, :2], rotary_cos=torch.randn(30, 3), rotary_sin=torch.randn(30, 3))
    for function, given in (
        (fa4.flash_attn_func, dense),
        (fa4.flash_attn_varlen_func, packed | dict(seqused_q=used - 2, seqused_k=used - 2)),
        (fa4.flash_attn_with_kvcache, cache | dict(rotary_seqlens=used)),
    ):
        for name, x in given.items():
            for _ in range(3):
                function(**given)
            with pytest.raises(TypeError, match=f"^{name} "):
                function(**given | {name: torch.nested.nested_tensor(list(x))})


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
                extent = told.extent.planned(told.spec)
                assert (plans[-1].spec, plans[-1].extent) == (told.spec, extent), (name, dtype, trains)
    chips = [chip_by_number(number, sms=sms, emulated=True) for number, sms in ((80, 2), (80, 3), (90, 3), (80, 2))]
    for chip in chips:
        with emulating(chip):
            fa4.flash_attn_func(*(torch.randn(1, 3, 2, 8) for _ in range(3)), backend="torch")
        assert plans[-1].chip == chip
