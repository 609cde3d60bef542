"""Traced scores and masks, and block masks, on the chip that is here, by every backend that takes them."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from fa4 import dispatch
from fa4.spec import Feature
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
