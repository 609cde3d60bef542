"""Dropout on the chip that is here, by every backend that has it."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from fa4.runtime.spec import Feature
from tests.dropout import DENSE, PACKED, WIDE, WIDE_IN_ORDER, WIDE_KEYS, assert_bits, assert_right_with_dropout
from tests.gpu.offered import needs_gpu, serving

pytestmark = needs_gpu
CASES = serving(DENSE, PACKED, WIDE, WIDE_IN_ORDER, WIDE_KEYS, needs=(Feature.DROPOUT, Feature.BACKWARD))


@pytest.mark.parametrize("backend, case", serving(PACKED, needs=(Feature.DROPOUT, Feature.BACKWARD)))
def test_bits(backend, case, seed):
    assert_bits(seed, backend, "cuda")


@pytest.mark.parametrize("backend, case", CASES)
def test_results(backend, case, seed):
    assert_right_with_dropout(case, seed, backend, "cuda")


def test_a_captured_graph_reads_its_seed_at_each_replay():
    q, k, v = torch.randn(3, 1, 200, 2, 64, device="cuda", dtype=torch.bfloat16).unbind()
    seed = torch.tensor([3, 0], device="cuda")
    expected = [fa4.flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=(3, offset)) for offset in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa4.flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=seed)
        seed[1] += 1
    for wanted in expected:
        graph.replay()
        assert torch.equal(out, wanted)


def test_a_captured_graph_draws_other_seeds_at_each_replay():
    q, k, v = torch.randn(3, 1, 200, 2, 64, device="cuda", dtype=torch.bfloat16).unbind()
    fa4.flash_attn_func(q, k, v, dropout_p=0.5)
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        out = fa4.flash_attn_func(q, k, v, dropout_p=0.5)
    for _ in range(2):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(*results)
