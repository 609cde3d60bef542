"""How launches fit into PyTorch, on every backend of the chip that is here: streams, graphs, torch.compile, threads,
a second device, grids and offsets beyond 16 and 32 bits."""

import threading

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from tests.gpu.offered import needs_gpu, offered

pytestmark = [*needs_gpu, pytest.mark.parametrize("backend", offered())]


def _qkv(*shape: int, requires_grad: bool = False, device: str = "cuda") -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=requires_grad) for _ in range(3)]


def _needs_memory(gib: float) -> None:
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def test_runs_on_the_callers_stream(backend):
    q, k, v = _qkv(2, 300, 4, 64)
    expected = fa4.flash_attn_func(q, k, v, causal=True, backend=backend)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on any other stream would read q before it is doubled
        doubled = q * 2
        out = fa4.flash_attn_func(doubled, k, v, causal=True, softmax_scale=0.5 * 64**-0.5, backend=backend)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_captured_graph_replays_forward_and_backward(backend):
    q, k, v = _qkv(1, 200, 2, 64, requires_grad=True)
    dout = torch.randn_like(q)

    def step():
        out = fa4.flash_attn_func(q, k, v, causal=True, deterministic=True, backend=backend)
        return torch.autograd.grad(out, (q, k, v), dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # for the tensors above
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


@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
def test_each_of_a_chain_of_launches_sees_the_one_before(backend, captured):
    """Kernels may be launched before the one in front of them ends, and must wait for its results."""
    q, k, v = _qkv(2, 1500, 4, 128)

    def chain():
        x = q
        for _ in range(3):
            x = fa4.flash_attn_func(x, k, v, backend=backend)
        return x

    expected = q
    for _ in range(3):
        expected = fa4.flash_attn_func(expected, k, v, backend=backend)
        torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        out.zero_()
    for _ in range(20):
        if captured:
            graph.replay()
        else:
            out = chain()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_torch_compile_makes_one_graph(backend):
    q, k, v = _qkv(1, 130, 2, 64, requires_grad=True)

    def loss(q, k, v):
        return fa4.flash_attn_func(q, k, v, causal=True, backend=backend).float().square().sum()

    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(q, k, v), (q, k, v))
    for a, b in zip(got, expected):
        assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2)  # dQ's sum is unordered


def test_threads_launch_on_streams_of_their_own(backend):
    """First calls of several threads at once: one compilation, each on its thread's stream."""
    q, k, v = _qkv(2, 200, 2, 72)
    outs: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs[index] = fa4.flash_attn_func(q, k, v, causal=True, backend=backend)
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = fa4.flash_attn_func(q, k, v, causal=True, backend=backend)
    assert len(outs) == 4 and all(torch.equal(out, expected) for out in outs.values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_tensors_of_another_device_than_the_current_one(backend):
    q, k, v = _qkv(1, 300, 2, 64, requires_grad=True)
    there = [x.detach().to("cuda:1").requires_grad_() for x in (q, k, v)]
    results = []
    for tensors in ((q, k, v), there):  # cuda:0 is current throughout
        out = fa4.flash_attn_func(*tensors, causal=True, deterministic=True, backend=backend)
        results.append([out, *torch.autograd.grad(out, tensors, torch.ones_like(out))])
    assert all(torch.equal(a, b.to(a.device)) for a, b in zip(*results))


def test_more_batches_than_a_grid_axis_holds(backend):
    batch = 66_000
    q, k, v = _qkv(batch, 3, 2, 32, requires_grad=True)
    out = fa4.flash_attn_func(q, k, v, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    pick = slice(batch - 10, batch)
    few = [x[pick].detach().requires_grad_() for x in (q, k, v)]
    expected = fa4.flash_attn_func(*few, backend=backend)
    assert torch.equal(out[pick], expected)
    expected_grads = torch.autograd.grad(expected, few, torch.ones_like(expected))
    assert all(torch.equal(a[pick], b) for a, b in zip(grads, expected_grads))


def test_strides_beyond_32_bits(backend):
    _needs_memory(12)
    step, rows = 2**25, 130  # the last row starts beyond 2**32 elements
    memory = torch.zeros(step * (rows - 1) + 64, device="cuda", dtype=torch.bfloat16)
    far = memory.as_strided((1, rows, 1, 64), (step * rows, step, 64, 1))
    q, k, v = _qkv(1, rows, 1, 64)
    expected = fa4.flash_attn_func(q, k, v, backend=backend)
    for place, tensors in enumerate(([far, k, v], [q, far, v], [q, k, far])):
        far.copy_((q, k, v)[place])
        assert torch.equal(fa4.flash_attn_func(*tensors, backend=backend), expected)


def test_more_elements_than_32_bits_count(backend):
    """Offsets of out, of dq and of its float32 workspace: the last sequence lies beyond 2**31 elements."""
    _needs_memory(40)
    batch, seqlen, heads, head_dim = 2100, 1024, 16, 64
    q = torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (x.expand(batch, -1, -1, -1) for x in _qkv(1, 64, heads, head_dim)[:2])
    with torch.no_grad():
        out = fa4.flash_attn_func(q, k, v, backend=backend)
        expected = fa4.flash_attn_func(q[-2:], k[-2:], v[-2:], backend=backend)
    assert torch.equal(out[-2:], expected)
    del out
    q.requires_grad_()
    out = fa4.flash_attn_func(q, k, v, deterministic=True, backend=backend)
    (dq,) = torch.autograd.grad(out, q, out.detach())
    few = q[-2:].detach().requires_grad_()
    out = fa4.flash_attn_func(few, k[-2:], v[-2:], deterministic=True, backend=backend)
    (expected,) = torch.autograd.grad(out, few, out.detach())
    assert torch.equal(dq[-2:], expected)
