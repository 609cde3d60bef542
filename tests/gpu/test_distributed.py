"""Parallelism on the GPUs at hand, with NCCL: results of all ranks against the oracle of the whole, and lost ranks."""

import itertools
import signal

import pytest
import torch

import fa4.distributed as cp
from fa4.oracle import cases
from fa4.oracle.cases import Case
from tests import ranks
from tests.test_distributed import CASES, WINDOW, attend

pytestmark = pytest.mark.gpu
LONG = dict(heads_q=4, heads_kv=2, head_dim=128, causal=True)
ON_GPUS = [
    *(case for case in CASES if case.dtype == torch.bfloat16 or case.dtype == torch.float16),
    Case("long", batch=2, seqlen_q=2048, seqlen_k=2048, **LONG),
    Case("long_varlen", lengths=((1024, 1024), (256, 256), (512, 512)), **LONG),
]
RUNS = [*itertools.product(ON_GPUS, cp.METHODS), (WINDOW, "all-gather")]


def on_gpus(*numbers):
    """Parameters of tests: numbers of GPUs, each skipped where there are fewer."""
    here = torch.cuda.device_count()
    skips = {n: pytest.mark.skipif(here < n, reason=f"needs {n} CUDA devices") for n in numbers}
    return [pytest.param(n, marks=skip) for n, skip in skips.items()]


def parts_are_the_whole(device, method, seed):
    for case in (case for case, by in RUNS if by == method):
        problem, results = attend(case, seed, method, device)
        again = attend(case, seed, method, device)[1]
        assert all(torch.equal(a, b) for a, b in zip(results, again)), f"{case} by {method} does not repeat"
        out, lse, *grads = results
        if torch.distributed.get_rank() == 0:
            cases.assert_right(cases.judge_forward(problem, out, lse), f"{case} by {method}")
            cases.assert_right(cases.judge_backward(problem, cases.Gradients(*grads)), f"{case} by {method}")


@pytest.mark.parametrize("method", cp.METHODS)
@pytest.mark.parametrize("world", on_gpus(2, 4))
def test_parts_on_gpus_are_the_whole(world, method, seed, tmp_path):
    """Twice, bit for bit."""
    ranks.run(parts_are_the_whole, world, tmp_path, "cuda", method, seed)


@pytest.mark.parametrize("world", on_gpus(4))
def test_sequence_and_heads_are_split_at_once(world, seed, tmp_path):
    ranks.run(ranks.split_both_ways, world, tmp_path, "cuda", seed)


@pytest.mark.parametrize("world", on_gpus(2, 4))
def test_training_resumes_from_a_checkpoint_with_the_same_bits(world, seed, tmp_path):
    ranks.run(ranks.resumes_bitwise, world, tmp_path, "cuda", tmp_path / "checkpoint", seed)


@pytest.mark.parametrize("method", cp.METHODS)
@pytest.mark.parametrize("world", on_gpus(2, 4))
def test_a_lost_rank_ends_the_others(world, method, tmp_path, monkeypatch):
    """NCCL's kernels wait for the lost rank until the watchdog of torch ends the process, at the group's timeout."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "10")  # the watchdog itself waits for kernels that wait
    codes, seconds = ranks.exit_codes_without_a_rank(world, tmp_path, "cuda", method)
    assert codes[-1] == -signal.SIGKILL and 0 not in codes, f"exit codes {codes}"
    assert seconds < ranks.ENDS_WITHIN_S
