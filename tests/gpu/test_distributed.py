"""Context parallelism on the GPUs at hand, with NCCL: results of all ranks against the oracle of the whole."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fa4.distributed as cp
from fa4.oracle import cases
from fa4.oracle.cases import Case
from tests.test_distributed import CASES, WINDOW, attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device"),
]
LONG = dict(heads_q=4, heads_kv=2, head_dim=128, causal=True)
ON_GPUS = [
    *(case for case in CASES if case.dtype == torch.bfloat16 or case.dtype == torch.float16),
    Case("long", batch=2, seqlen_q=2048, seqlen_k=2048, **LONG),
    Case("long_varlen", lengths=((1024, 1024), (256, 256), (512, 512)), **LONG),
]
RUNS = {f"{case}-{method}": (case, method) for case, method in itertools.product(ON_GPUS, cp.METHODS)}
RUNS["window-all-gather"] = WINDOW, "all-gather"


def on_every_rank(rank, world, file, name, seed):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=world, device_id=device)
    try:
        case, method = RUNS[name]
        problem, results = attend(case, seed, method, device)
        again = attend(case, seed, method, device)[1]
        assert all(torch.equal(a, b) for a, b in zip(results, again)), f"{name} does not repeat"
        out, lse, *grads = results
        if rank == 0:
            cases.assert_right(cases.judge_forward(problem, out, lse), name)
            cases.assert_right(cases.judge_backward(problem, cases.Gradients(*grads)), name)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", RUNS)
def test_parts_on_gpus_are_the_whole(name, seed, tmp_path):
    """Twice, bit for bit."""
    mp.start_processes(on_every_rank, (2, tmp_path / "store", name, seed), 2, start_method="spawn")
