"""Programs for the ranks of a process group on a device: sequence and heads split at once, checkpoints, a lost rank.

`run` starts them: with gloo on CPUs (`tests/test_distributed_training.py`), with NCCL on GPUs
(`tests/gpu/test_distributed.py`).
"""

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fa4
import fa4.distributed as cp
from fa4.integrations.dtensor import register_dtensor
from fa4.oracle import cases
from fa4.oracle.cases import Case

GROUP_LIMIT = datetime.timedelta(seconds=60)
LOST_LIMIT_S = {"cpu": 8, "cuda": 12}  # of messages where a rank is lost; on GPUs kernels may be compiled meanwhile
STARTS_WITHIN_S, ENDS_WITHIN_S = 120, 120


def device_of(rank, device_type):
    if device_type == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def join(rank, world, file, device, limit=GROUP_LIMIT):
    backend, options = ("gloo", {}) if device.type == "cpu" else ("nccl", {"device_id": device})
    where = dict(init_method=f"file://{file}", rank=rank, world_size=world)
    dist.init_process_group(backend, timeout=limit, **where, **options)


def on_rank(rank, program, world, file, device_type, arguments):
    device = device_of(rank, device_type)
    join(rank, world, file, device)
    try:
        program(device, *arguments)
    finally:
        dist.destroy_process_group()


def start_method(device_type):
    if device_type == "cpu":
        mp.get_context("forkserver").set_forkserver_preload(["fa4.distributed", "fa4.oracle.cases", __name__])
        return "forkserver"
    return "spawn"


def run(program, world, folder, device_type, *arguments, limit=400):
    """program(device, *arguments) on every rank; an error of one rank, or of time, is this process's."""
    method = start_method(device_type)
    started = (program, world, folder / f"store of {world}", device_type, arguments)
    wait_for(mp.start_processes(on_rank, started, world, join=False, start_method=method), limit)


def wait_for(context, limit=400):
    """Until processes that were started have ended; an error of one of them, or of time, is this process's."""
    ends = time.monotonic() + limit
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < ends, "ranks wait for each other"
    finally:
        for process in context.processes:
            process.kill()


# Sequence and heads split at once ----------------------------------------------------------------


GRID = [
    (Case("equal heads", batch=2, seqlen_q=64, seqlen_k=64, heads_q=4, heads_kv=4, head_dim=64, causal=True), "ring"),
    (Case("grouped heads", seqlen_q=64, seqlen_k=64, heads_q=8, heads_kv=4, head_dim=64, causal=True), "ring"),
    (Case("grouped heads", seqlen_q=64, seqlen_k=64, heads_q=8, heads_kv=4, head_dim=64), "all-gather"),
    (Case("one key head", seqlen_q=64, seqlen_k=64, heads_q=4, heads_kv=1, head_dim=64, causal=True), "all-gather"),
    (Case("packed", lengths=((32, 32), (16, 16)), heads_q=4, heads_kv=2, head_dim=64, causal=True), "ring"),
]


def split_both_ways(device, seed):
    """Two groups of heads, the sequence over the other ranks: all results gathered, against the oracle of the whole."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("heads", "sequence"))
    for case, method in GRID if world == 4 else GRID[1::3]:  # processes share cores
        problem, results = grid_results(case, method, mesh, seed, device)
        again = grid_results(case, method, mesh, seed, device)[1]
        assert all(torch.equal(a, b) for a, b in zip(results, again)), f"{case} by {method} does not repeat"
        if dist.get_rank() == 0:
            out, lse, *grads = results
            name = f"{case} by {method} on 2 x {world // 2} ranks"
            cases.assert_right(cases.judge_forward(problem, out, lse), name)
            cases.assert_right(cases.judge_backward(problem, cases.Gradients(*grads)), name)
    refused_heads(mesh, device)


def grid_results(case, method, mesh, seed, device):
    """The problem, and (out, lse, dq, dk, dv) of the whole from every rank's part. A single key/value head is on all
    ranks, and the gradients of its copies are added."""
    problem = cases.make(case, seed, device)
    sequence, heads = mesh["sequence"].get_group(), mesh["heads"].get_group()
    packed = {} if case.lengths is None else {"cu_seqlens": problem.inputs.cu_seqlens_q}
    axis = 1 if case.lengths is None else 0

    def part(x, rows, of_heads):
        x = cp.shard(x, dim=rows, group=sequence, **packed)
        return x if x.shape[of_heads] == 1 else x.chunk(2, of_heads)[dist.get_rank(heads)]

    def whole(x, rows, of_heads, copies=False):
        x = cp.unshard(x, dim=rows, group=sequence, **packed)
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous(), group=heads)
        return parts[0] + parts[1] if copies else torch.cat(parts, of_heads)

    leaves = [part(x, axis, axis + 1).contiguous().requires_grad_() for x in problem.inputs[:3]]
    out, lse = cp.context_parallel_attention(
        *leaves, group=sequence, method=method, causal=case.causal, deterministic=True, return_lse=True, **packed
    )
    upstream = part(problem.dout, axis, axis + 1), part(problem.dlse, axis + 1, axis)
    grads = torch.autograd.grad((out, lse), leaves, upstream)
    copies = case.heads_kv == 1
    gathered = [whole(x, axis, axis + 1, copies and i > 0) for i, x in enumerate(grads)]
    return problem, [whole(out.detach(), axis, axis + 1), whole(lse.detach(), axis + 1, axis), *gathered]


def refused_heads(mesh, device):
    """Heads that do not divide, heads that differ between ranks, and DTensors; a right call after each ends."""
    group, in_sequence = mesh["sequence"].get_group(), dist.get_rank(mesh["sequence"].get_group())
    half = dict(device=device, dtype=torch.bfloat16)

    def call(q, k):
        return cp.context_parallel_attention(q, k, k, group=group, causal=True)

    def rows(heads):
        return torch.ones(1, 8, heads, 64, **half)

    with pytest.raises(ValueError, match="q has 3 heads, expected a positive multiple of k's 2"):
        call(rows(3), rows(2))
    if device.type == "cpu":  # groups of NCCL compare nothing by default
        with pytest.raises(ValueError, match=r"q is \(\(1, 8, \d, 64\).* expected the same on every rank"):
            call(*[rows(4 if in_sequence else 3)] * 2)
    register_dtensor()
    sharded = distribute_tensor(rows(4), mesh["heads"], [Shard(2)])
    with pytest.raises(TypeError, match="q is a DTensor, expected this rank's plain tensor"):
        call(sharded, sharded)
    uneven = [distribute_tensor(rows(n), mesh["heads"], [Shard(2)]) for n in (6, 3)]
    with pytest.raises(RuntimeError, match="q is sharded by heads over 2 ranks, and k has 3 heads, expected a mul"):
        fa4.flash_attn_func(uneven[0], uneven[1], uneven[1])
    assert call(sharded.to_local(), sharded.to_local()).shape == (1, 8, 2, 64)


# Checkpoint and resume ---------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention over a sequence that all ranks share, with four query and two key/value heads of 64."""

    def __init__(self, device, dtype):
        super().__init__()
        given = dict(bias=False, device=device, dtype=dtype)
        self.qkv, self.project = nn.Linear(64, 8 * 64, **given), nn.Linear(4 * 64, 64, **given)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (8, 64)).split((4, 2, 2), 2)
        out = cp.context_parallel_attention(q, k, v, causal=True, deterministic=True)
        return x + self.project(out.flatten(2))


class Run:
    """A model by FSDP2 over all ranks, and its optimizer. A step's batch depends on its number only."""

    def __init__(self, device, seed):
        torch.manual_seed(seed)
        self.device = device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.model = nn.Sequential(*(Layer(device, self.dtype) for _ in range(2)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def steps(self, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(2, 64 * dist.get_world_size(), 64, generator=generator).to(self.device, self.dtype)
            self.model(cp.shard(x)).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder):
        self.steps(10, 11)  # other weights than those saved, and an optimizer with state
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def bits(self):
        """This rank's parameters, and the optimizer's averages."""
        tensors = [*self.model.parameters(), *(x for of in self.optimizer.state.values() for x in of.values())]
        return [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in tensors]


def resumes_bitwise(device, folder, seed):
    """Two steps, a checkpoint and two more, against two steps from the checkpoint: equal bits."""
    saved = Run(device, seed)
    saved.steps(0, 2)
    dcp.save(saved.state(), checkpoint_id=folder)
    at_checkpoint = saved.bits()
    saved.steps(2, 4)
    resumed = Run(device, seed + 1)
    resumed.load(folder)
    assert all(torch.equal(a, b) for a, b in zip(resumed.bits(), at_checkpoint, strict=True))
    resumed.steps(2, 4)
    assert all(torch.equal(a, b) for a, b in zip(resumed.bits(), saved.bits(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(resumed.bits(), at_checkpoint, strict=True))


# A lost rank -------------------------------------------------------------------------------------


def until_one_is_lost(rank, world, file, device_type, method):
    """Calls without end; the last rank kills itself after the second. Another one that raises exits with 3."""
    device = device_of(rank, device_type)
    join(rank, world, file, device, datetime.timedelta(seconds=LOST_LIMIT_S[device_type]))
    q = torch.ones(1, 64, 4, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    try:
        for i in range(10_000):
            out = cp.context_parallel_attention(q, q, q, causal=True, method=method, deterministic=True)
            torch.autograd.grad(out, q, out.detach())
            if device.type == "cuda":
                torch.cuda.synchronize()
            if i == 1 and rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        os._exit(3)


def exit_codes_without_a_rank(world, folder, device_type, method):
    """Of every rank, and the seconds until the last one has ended.

    Raises:
        AssertionError: a rank waits.
    """
    context = mp.get_context(start_method(device_type))
    given = (world, folder / f"store {method}", device_type, method)
    processes = [context.Process(target=until_one_is_lost, args=(rank, *given)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        processes[-1].join(STARTS_WITHIN_S)
        began = time.monotonic()
        for process in processes:
            process.join(max(0.0, ENDS_WITHIN_S + began - time.monotonic()))
        codes = [process.exitcode for process in processes]
        assert None not in codes, f"a rank waits for one that is lost: exit codes {codes}"
        return codes, time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
