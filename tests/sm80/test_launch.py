"""How launches fit into PyTorch: streams, graphs, torch.compile, grids and offsets beyond 16 and 32 bits."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="launches on a CUDA device"),
]


def _qkv(*shape: int, requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad) for _ in range(3)]


def _attend(q, k, v, **flags):
    return fa4.flash_attn_func(q, k, v, backend="sm80", **flags)


def test_runs_on_the_callers_stream():
    q, k, v = _qkv(2, 300, 4, 64)
    expected = _attend(q, k, v, causal=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on any other stream would read q before it is doubled
        doubled = q * 2
        out = _attend(doubled, k, v, causal=True, softmax_scale=0.5 * 64**-0.5)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_captured_graph_replays_forward_and_backward():
    q, k, v = _qkv(1, 200, 2, 64, requires_grad=True)
    dout = torch.randn_like(q)

    def step():
        return torch.autograd.grad(_attend(q, k, v, causal=True, deterministic=True), (q, k, v), dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compile outside of the capture
        expected = step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    for grad in grads:
        grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(grads, expected))


def test_torch_compile_makes_one_graph():
    q, k, v = _qkv(1, 130, 2, 64, requires_grad=True)
    compiled = torch.compile(lambda *x: _attend(*x, causal=True).float().square().sum(), fullgraph=True)
    expected = torch.autograd.grad(_attend(q, k, v, causal=True).float().square().sum(), (q, k, v))
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    for a, b in zip(got, expected):
        assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2)  # dQ's sum is unordered


def test_more_heads_than_a_grid_axis_holds():
    q, k, v = _qkv(33_000, 3, 2, 32, requires_grad=True)
    out = _attend(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    pick = slice(32_990, 33_000)
    few = [x[pick].detach().requires_grad_() for x in (q, k, v)]
    expected = _attend(*few)
    assert torch.equal(out[pick], expected)
    expected_grads = torch.autograd.grad(expected, few, torch.ones_like(expected))
    assert all(torch.equal(a[pick], b) for a, b in zip(grads, expected_grads))


def test_offsets_beyond_32_bits():
    step, rows = 2**25, 130  # the last row starts beyond 2**32 elements
    memory = torch.empty(step * (rows - 1) + 64, device="cuda", dtype=torch.bfloat16)
    far = memory.as_strided((1, rows, 1, 64), (step * rows, step, 64, 1))
    q, k, v = _qkv(1, rows, 1, 64)
    for place, tensors in enumerate(([far, k, v], [q, far, v], [q, k, far])):
        far.copy_((q, k, v)[place])
        assert torch.equal(_attend(*tensors), _attend(q, k, v))
