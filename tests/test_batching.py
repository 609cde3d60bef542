"""torch.func.vmap: the same as one call after another, by one call of the operator where attention allows it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fa4

N = 3
Q, K, V, SINK = (2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8), (4,)
PACKED_Q, PACKED_K, PACKED_V = (9, 4, 16), (9, 2, 16), (9, 2, 8)
BOUNDS = torch.tensor([[0, 3, 3, 8], [0, 1, 2, 9], [0, 4, 8, 9]], dtype=torch.int32)  # a row of padding in the first


def _dense(q, k, v, sink=None, seqused_k=None):
    return fa4.flash_attn_func(q, k, v, learnable_sink=sink, seqused_k=seqused_k, causal=True, return_lse=True)


def _packed(q, k, v, sink=None, bounds=BOUNDS[0]):
    lengths = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    return fa4.flash_attn_varlen_func(q, k, v, learnable_sink=sink, **lengths, causal=True, return_lse=True)


def _drawn(shape, dim, seed):
    """A float64 tensor of this shape, or of N of it along an axis."""
    shape = list(shape)
    if dim is not None:
        shape.insert(dim, N)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# What is mapped, along which axis of each argument, and how many calls of the operator it takes.
MAPPED = {
    "dense": (_dense, (Q, K, V), (0, 0, 0), 1),
    "dense_axes": (_dense, (Q, K, V), (3, None, 1), 1),
    "shared_sink": (_dense, (Q, K, V, SINK), (0, 0, 0, None), 1),
    "sinks": (_dense, (Q, K, V, SINK), (0, None, 3, 1), 1),
    "packed": (_packed, (PACKED_Q, PACKED_K, PACKED_V), (0, 2, None), 1),
    "packed_sinks": (_packed, (PACKED_Q, PACKED_K, PACKED_V, SINK), (0, None, 0, 0), 1),
    "no_rows": (_dense, ((2, 0, 4, 16), K, V), (0, 0, 0), 1),
}
mapped_cases = pytest.mark.parametrize("call, shapes, dims, _", MAPPED.values(), ids=MAPPED)


class Counted(TorchDispatchMode):
    """Counts calls of an operator."""

    def __init__(self, operator):
        super().__init__()
        self.operator, self.count = operator, 0

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        self.count += function is self.operator
        return function(*arguments, **kwargs or {})


def _one_by_one(call, tensors, dims):
    parts = ([x if d is None else x.select(d, i) for x, d in zip(tensors, dims)] for i in range(N))
    return [torch.stack(x) for x in zip(*(call(*part) for part in parts))]


def _assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("call, shapes, dims, calls", MAPPED.values(), ids=MAPPED)
def test_vmap_is_one_call(call, shapes, dims, calls, seed):
    tensors = [_drawn(shape, dim, seed + i) for i, (shape, dim) in enumerate(zip(shapes, dims))]
    with Counted(torch.ops.fa4.forward.default) as counted:
        got = torch.vmap(call, in_dims=dims)(*tensors)
    assert counted.count == calls
    _assert_same(got, _one_by_one(call, tensors, dims))


@mapped_cases
def test_gradients_of_each_call(call, shapes, dims, _, seed):
    """vmap of grad: what is shared gets a gradient of each call, the sink too."""
    tensors = [_drawn(shape, dim, seed + i) for i, (shape, dim) in enumerate(zip(shapes, dims))]

    def gradients(*leaves):
        def loss(*leaves):
            out, lse = call(*leaves)
            return out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()

        return torch.func.grad(loss, argnums=tuple(range(len(leaves))))(*leaves)

    with Counted(torch.ops.fa4.backward.default) as counted:
        got = torch.vmap(gradients, in_dims=dims)(*tensors)
    assert counted.count == 1
    _assert_same(got, _one_by_one(gradients, tensors, dims))


@pytest.mark.parametrize("transform", ["autograd", "grad"])
@mapped_cases
def test_gradients_of_all_calls(call, shapes, dims, _, transform, seed):
    """Outside of vmap: what is shared gets the sum."""
    tensors = [_drawn(shape, dim, seed + i) for i, (shape, dim) in enumerate(zip(shapes, dims))]

    def loss(mapped):
        return lambda *leaves: mapped(*leaves)[0].square().sum()

    leaves = [x.requires_grad_() for x in tensors]
    expected = torch.autograd.grad(loss(lambda *x: _one_by_one(call, x, dims))(*leaves), leaves)
    mapped = loss(torch.vmap(call, in_dims=dims))
    if transform == "autograd":
        got = torch.autograd.grad(mapped(*leaves), leaves)
    else:
        got = torch.func.grad(mapped, argnums=tuple(range(len(leaves))))(*(x.detach() for x in leaves))
    _assert_same(got, expected)


def test_lengths_of_each_call_are_calls(seed):
    used = torch.tensor([[0, 7], [5, 1], [2, 3]], dtype=torch.int32)
    q, k, v, sink = (_drawn(x, 0, seed) for x in (Q, K, V, SINK))
    cases = {
        1: (lambda *x: _dense(*x[:3], seqused_k=x[3]), (q, k, v, used)),
        N: (_dense, (q, k, v, sink, used)),
    }
    for calls, (call, tensors) in cases.items():
        with Counted(torch.ops.fa4.forward.default) as counted:
            got = torch.vmap(call)(*tensors)
        assert counted.count == calls
        _assert_same(got, _one_by_one(call, tensors, (0,) * len(tensors)))
    tensors = [_drawn(x, 0, seed) for x in (PACKED_Q, PACKED_K, PACKED_V)]

    def gradient(q, k, v, bounds):
        return (torch.func.grad(lambda q: _packed(q, k, v, bounds=bounds)[0].square().sum())(q),)

    _assert_same(torch.vmap(gradient)(*tensors, BOUNDS), _one_by_one(gradient, (*tensors, BOUNDS), (0, 0, 0, 0)))


def test_maps_within_maps_and_jacobians(seed):
    k, v = _drawn(K, None, seed), _drawn(V, None, seed + 1)
    q = torch.randn(2, N, *Q, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 2))
    got = torch.vmap(torch.vmap(lambda q: _dense(q, k, v)[0]))(q)
    _assert_same([got], [torch.stack([_dense(x, k, v)[0] for x in q.flatten(0, 1)]).unflatten(0, (2, N))])
    (expected,) = (torch.autograd.functional.jacobian(lambda q: _dense(q, k, v)[0], q[0, 0]),)
    _assert_same([torch.func.jacrev(lambda q: _dense(q, k, v)[0])(q[0, 0])], [expected])


def test_compiled_maps(seed):
    q, k, v = (_drawn(x, 0, seed) for x in (Q, K, V))
    mapped = torch.vmap(lambda *x: _dense(*x)[0])
    compiled = torch.compile(mapped, fullgraph=True, backend="aot_eager")
    _assert_same([compiled(q, k, v)], [mapped(q, k, v)])
