"""Traced scores and masks, and block masks, on the chip that is here, by every backend that takes them."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from fa4.mods.ir.tensors import add_where
from fa4.runtime import dispatch
from fa4.runtime.spec import Feature
from tests.gpu.offered import needs_gpu, offered
from tests.mods import packed
from tests.mods.kernels import problems
from tests.mods.oracle import assert_kernel_is_right, results_of
from tests.mods.packed import assert_packed_is_right, packed_problems

pytestmark = needs_gpu


def taking_mods() -> list[str]:
    rows = [row for row in dispatch.BACKENDS if row.name in offered() and Feature.BLOCK_MASK in row.features]
    return list(dict.fromkeys(row.name for row in rows if Feature.BACKWARD in row.features))


@pytest.mark.parametrize("name", [name for name in problems() if name != "packed_and_split"])
@pytest.mark.parametrize("backend", taking_mods())
def test_forward_and_gradients(backend, name, seed):
    problem = problems("cuda")[name]
    assert_kernel_is_right(problem, seed, backend, device="cuda")


@pytest.mark.parametrize("backend", taking_mods())
def test_forward_of_packed_heads_and_split_keys(backend, seed):
    assert_kernel_is_right(problems("cuda")["packed_and_split"], seed, backend, gradients=False, device="cuda")


@pytest.mark.parametrize("name", [name for name, problem in problems().items() if problem.call.get("deterministic")])
@pytest.mark.parametrize("backend", taking_mods())
def test_deterministic_results_repeat_bit_for_bit(backend, name, seed):
    """Of captured tensors too."""
    problem = problems("cuda")[name]
    first, *others = (results_of(problem, seed, backend, device="cuda") for _ in range(20))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other)), f"seed {seed}"


@pytest.mark.parametrize("name", packed_problems())
@pytest.mark.parametrize("backend", taking_mods())
def test_packed_sequences(backend, name, seed):
    assert_packed_is_right(packed_problems("cuda")[name], seed, backend, device="cuda")


@pytest.mark.parametrize("name", [name for name, of in packed_problems().items() if of.call.get("deterministic")])
@pytest.mark.parametrize("backend", taking_mods())
def test_deterministic_results_of_packed_sequences_repeat(backend, name, seed):
    problem = packed_problems("cuda")[name]
    first, *others = (packed.results_of(problem, seed, backend, device="cuda") for _ in range(20))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other)), f"seed {seed}"


def test_a_captured_graph_takes_other_lengths_and_lists(seed):
    """No length and no list is read on the host."""
    problem = packed_problems("cuda")["documents"]
    (q, k, v), _ = problem.make(seed, "cuda")
    options = problem.options("cuda") | dict(block_mask=problem.block_mask, max_seqlen_q=300, max_seqlen_k=400)
    fa4.flash_attn_varlen_func(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa4.flash_attn_varlen_func(q, k, v, **options)
    lengths = options["cu_seqlens_q"], options["cu_seqlens_k"]
    for x, values in zip(lengths, ((0, 100, 130, 400, 500, 501), (0, 90, 190, 200, 600, 650))):
        x.copy_(torch.tensor(values))
    graph.replay()
    replayed = out.clone()
    assert torch.equal(replayed, fa4.flash_attn_varlen_func(q, k, v, **options)), f"seed {seed}"


def test_additions_to_one_element_repeat_bit_for_bit(seed):
    """Without torch.use_deterministic_algorithms: torch sorts what it accumulates."""
    generator = torch.Generator("cuda").manual_seed(seed)
    value = torch.randn(2000, 3000, device="cuda", generator=generator)
    indices = [torch.randint(0, n, value.shape, device="cuda", generator=generator) for n in (3, 5)]
    sums = []
    for _ in range(20):
        sums.append(torch.zeros(3, 5, device="cuda"))
        add_where(sums[-1], indices, value)
    assert all(torch.equal(sums[0], other) for other in sums[1:]), f"seed {seed}"
    assert not torch.are_deterministic_algorithms_enabled()


def test_products_of_tiled_torch_are_not_rounded_to_tf32(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    q = torch.randn(1, 200, 2, 64, device="cuda", generator=generator).requires_grad_()
    results = []
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        try:
            out = fa4.flash_attn_func(q, q, q, softmax_scale=1.0, backend="torch")
            results.append((out, *torch.autograd.grad(out.sum(), q)))
        finally:
            torch.set_float32_matmul_precision("highest")
    assert all((a - b).abs().max() <= 1e-4 * a.abs().max() for a, b in zip(*results)), f"seed {seed}"
