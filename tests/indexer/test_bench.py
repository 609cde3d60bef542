"""What `bench.indexer` compares and checks, on small problems without a GPU."""

import pytest
import torch

import fa4
from bench import indexer as bench
from fa4.indexer import arguments, run


def staged(case, seed):
    tensors = case.tensors(torch.device("cpu"), seed)
    given = dict(tensors)
    q, k, weights, causal = (given.pop(name) for name in ("q", "k", "weights", "causal"))
    problem = arguments.problem(q, k, weights, causal, arguments.Lengths(), **given)
    return tensors, bench.Stages(problem, case.topk, "torch")


@pytest.mark.parametrize("dtype", [bench.E4M3, torch.bfloat16])
def test_the_check_finds_wrong_keys_and_wrong_scores(dtype, seed, monkeypatch):
    monkeypatch.setattr(run, "CHUNK_BYTES", 4 * 40 * 16)
    case = bench.Case(40, dtype, heads=4, head_dim=32, topk=8)
    tensors, stages = staged(case, seed)
    assert len(stages.chunks) == 3
    (indices,) = fa4.indexer_topk(**tensors, topk=8)
    # Sums of torch's float32 products stand in for those of a tensor core, which err more.
    assert bench.check(stages, indices, seed) < 1e-5
    indices[39, 3] += 1
    with pytest.raises(AssertionError, match="row 39 has other keys"):
        bench.check(stages, indices, seed)
    compute = stages.compute
    stages.compute = lambda out, rows: (compute(out, rows), out.mul_(1.01))
    indices[39, 3] -= 1
    with pytest.raises(AssertionError, match="scores err by"):
        bench.check(stages, indices, seed)


def test_torch_chooses_the_same_keys(seed, monkeypatch):
    """Of distinct scores that bfloat16 holds."""
    monkeypatch.setattr(bench, "TORCH_PRODUCTS", 2 * 48 * 7)
    k = torch.zeros(48, 16)
    k[:, 0] = torch.randperm(48, generator=torch.Generator().manual_seed(seed)) + 1.0
    q, weights = torch.zeros(48, 2, 16), torch.ones(48, 2)
    q[:, 0, 0] = 1.0
    indices = bench.by_torch(q.bfloat16(), k.bfloat16(), weights, 5)
    expected = fa4.indexer_topk(q[None], k[None], weights[None], 5, causal=True)[0]
    for t in range(48):
        assert set(indices[t, : t + 1].tolist()) == {i for i in expected[t].tolist() if i >= 0}, f"row {t}, seed {seed}"


def test_flops_are_those_of_visible_pairs():
    assert bench.Case(3, bench.E4M3, heads=2, head_dim=8).flops == 2 * 2 * 8 * 6
