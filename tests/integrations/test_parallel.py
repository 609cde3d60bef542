"""fa4 beneath torch's own parallelism, on two processes with gloo: context_parallel, FSDP2, DDP, tensor parallelism."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fa4
import fa4.distributed as cp
from fa4.integrations import sdpa
from fa4.integrations.dtensor import register_dtensor
from fa4.integrations.megatron import CoreAttention
from fa4.oracle.cases import Case, make
from tests.integrations.oracle import assert_attention
from tests.integrations.test_megatron import LENGTH, Mask, config, module, rows_of

WORLD = 2


def flash_attention_of_cuda(query, key, value, is_causal=False):
    """What scaled_dot_product_attention calls for CUDA tensors: for those of a CPU torch has no context parallelism."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]


flash_attention_of_cuda.__name__ = F.scaled_dot_product_attention.__name__  # by which torch replaces it


def in_torchs_context_parallel(mesh, seed):
    """Each of the ring's parts is fa4's, forward and backward, and the whole is right; so is fa4's own ring there."""
    served = []
    operators = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
    for name in operators:
        sdpa.OPERATORS[name] = counted(served, name, sdpa.OPERATORS[name])
    fa4.register_sdpa(devices=("cpu",), activate=True)
    plain, F.scaled_dot_product_attention = F.scaled_dot_product_attention, flash_attention_of_cuda
    try:
        for rotate_method in ("allgather", "alltoall"):
            set_rotate_method(rotate_method)
            served.clear()
            problem = make(Case("context_parallel", batch=2, seqlen_q=32, seqlen_k=32, causal=True), seed)
            heads_first = [x.transpose(1, 2).contiguous() for x in problem.inputs[:3]]
            results = of_ring(mesh, heads_first, problem.dout.transpose(1, 2).contiguous())
            assert_attention(problem, *(x.transpose(1, 2) for x in results))
            # The causal part of its own keys, and another one's keys.
            assert sorted(served) == sorted(operators * WORLD)
    finally:
        F.scaled_dot_product_attention = plain
        torch.nn.attention.restore_flash_attention_impl()
    local, dout = [x.clone() for x in problem.inputs[:3]], problem.dout.clone()
    with context_parallel(mesh, buffers=[*local, dout], buffer_seq_dims=[1] * 4, no_restore_buffers={*local, dout}):
        for call in (fa4.flash_attn_func, fa4.flash_attn_func, lambda *x: fa4.flash_attn_func(*x, mask_mod=any_pair)):
            with pytest.raises(RuntimeError, match=r"inside torch's context_parallel.*context_parallel_attention"):
                call(*local)
        leaves = [x.requires_grad_() for x in local]
        out = cp.context_parallel_attention(*leaves, causal=True, group=mesh.get_group())
        parts = [out, *torch.autograd.grad(out, leaves, dout)]
        assert_attention(problem, *context_parallel_unshard(mesh, [x.detach() for x in parts], [1] * 4))
    fa4.flash_attn_func(*problem.inputs[:3])


def any_pair(b, h, q_idx, kv_idx):
    return q_idx >= 0


def of_ring(mesh, tensors, dout):
    """out, dq, dk and dv of the whole."""
    *local, dout = (x.clone() for x in (*tensors, dout))
    with context_parallel(mesh, buffers=[*local, dout], buffer_seq_dims=[2] * 4, no_restore_buffers={*local, dout}):
        leaves = [x.requires_grad_() for x in local]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        parts = [out, *torch.autograd.grad(out, leaves, dout)]
        return context_parallel_unshard(mesh, [x.detach() for x in parts], [2] * 4)


def counted(names, name, function):
    def call(*args, **kwargs):
        names.append(name)
        return function(*args, **kwargs)

    return call


class Attention(nn.Module):
    """Two layers of causal attention, as many key/value heads as asked for."""

    def __init__(self, heads_kv, width=32, head_dim=8):
        super().__init__()
        self.head_dim = head_dim
        shape = dict(bias=False, dtype=torch.float64)
        self.q = nn.Linear(width, width, **shape)
        self.k, self.v = (nn.Linear(width, heads_kv * head_dim, **shape) for _ in range(2))
        self.o = nn.Linear(width, width, **shape)

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        return x + self.o(fa4.flash_attn_func(q, k, v, causal=True).flatten(-2))


def trained(model, *batches):
    """The parameters after a step for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def assert_same(got, expected):
    for name, x in got.items():
        x = x.full_tensor() if isinstance(x, DTensor) else x
        assert (x - expected[name]).abs().max() < 1e-12, name


def fully_sharded(mesh, seed):
    """FSDP2: each rank has its own rows of the batch, and the steps are those of one process with all rows."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(Attention(heads_kv=2) for _ in range(2)))
    batches = torch.randn(3, 2 * WORLD, 12, 32, dtype=torch.float64)
    expected = trained(copy.deepcopy(model), *batches)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = batches.chunk(WORLD, 1)[mesh.get_local_rank()]
    assert_same(trained(model, *own), expected)


class Biased(Attention):
    """With a learned bias, whose gradient comes from attention itself."""

    def __init__(self):
        super().__init__(heads_kv=2)
        self.table = nn.Parameter(torch.randn(4, 9, dtype=torch.float64))

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        biased = fa4.scores.relative_bias(self.table)
        return x + self.o(fa4.flash_attn_func(q, k, v, causal=True, score_mod=biased).flatten(-2))


def data_parallel(mesh, seed):
    """DDP: likewise, and with gradients of a captured tensor, which wait for those of the other process too."""
    torch.manual_seed(seed)
    model = nn.Sequential(Attention(heads_kv=1), Biased())
    batches = torch.randn(3, 2 * WORLD, 12, 32, dtype=torch.float64)
    expected = trained(copy.deepcopy(model), *batches)
    assert any((x - y).abs().max() > 1e-6 for x, y in zip(model.parameters(), expected.values()))
    trained(DistributedDataParallel(model), *batches.chunk(WORLD, 1)[mesh.get_local_rank()])
    assert_same(dict(model.named_parameters()), expected)


def tensor_parallel(mesh, seed, heads_kv, local):
    """Projections sharded by heads. As DTensors, for which fa4 is registered, or each rank's own heads."""
    torch.manual_seed(seed)
    model = Attention(heads_kv)
    batches = torch.randn(2, 2, 12, 32, dtype=torch.float64)
    expected = trained(copy.deepcopy(model), *batches)
    plan = dict.fromkeys("qkv", ColwiseParallel(use_local_output=local)) | {"o": RowwiseParallel()}
    if heads_kv == 1:  # one head has no parts: every rank keeps it
        del plan["k"], plan["v"]
    model = parallelize_module(model, mesh, plan)
    if heads_kv == 1:
        for layer in (model.k, model.v):
            replicate(layer, mesh)
    assert_same(trained(model, *batches), expected)


def replicate(layer, mesh):
    """The weights as replicated DTensors, and results too."""
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh))
    layer.register_forward_pre_hook(lambda _, args: (DTensor.from_local(args[0], mesh, run_check=False),))


def uneven_heads(mesh, seed):
    """A rank would get a part of a group, even if DTensor could cut k and v to fit."""
    register_dtensor()
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 3, 8)
    q = distribute_tensor(q, mesh, [Shard(2)])
    for placement in (Shard(2), Replicate()):
        kv = distribute_tensor(k, mesh, [placement])
        with pytest.raises(RuntimeError, match="q is sharded by heads over 2 ranks, and k has 3 heads, expected a mul"):
            fa4.flash_attn_func(q, kv, kv)


def megatrons_context_parallel(mesh, seed):
    """Padded and packed, by either way of communication, on parts as Megatron cuts them."""
    groups, whole = SimpleNamespace(cp=mesh.get_group()), module()
    q, k, v = rows_of(seed, LENGTH, 2)
    bounds = torch.tensor([0, 4, LENGTH], dtype=torch.int32)
    packed = SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=8, max_seqlen_kv=8)
    packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = None
    for way in ("p2p", "all_gather"):
        core = CoreAttention(
            config(context_parallel_size=WORLD), 1, Mask.causal, "self", cp_comm_type=way, pg_collection=groups
        )
        part = core(*(cp.shard(x, dim=0) for x in (q, k, v)), None)
        assert (part - cp.shard(whole(q, k, v, None), dim=0)).abs().max() < 1e-12
        one = [x[:, 0] for x in (q, k, v)]
        part = core(*(cp.shard(x, dim=0, cu_seqlens=bounds) for x in one), None, packed_seq_params=packed)
        expected = whole(*one, None, packed_seq_params=packed)
        assert (part - cp.shard(expected, dim=0, cu_seqlens=bounds)).abs().max() < 1e-12


def on_every_rank(rank, file, seed):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        if hasattr(torch.nn.attention, "restore_flash_attention_impl"):  # torch 2.11 and newer
            in_torchs_context_parallel(mesh, seed)
        fully_sharded(mesh, seed)
        data_parallel(mesh, seed)
        megatrons_context_parallel(mesh, seed)
        tensor_parallel(mesh, seed, heads_kv=2, local=True)
        uneven_heads(mesh, seed)
        tensor_parallel(mesh, seed, heads_kv=2, local=False)
        tensor_parallel(mesh, seed, heads_kv=1, local=False)
    finally:
        dist.destroy_process_group()


def test_on_two_processes(seed, tmp_path):
    """Everything above, for a process takes longer to start than all of it."""
    mp.get_context("forkserver").set_forkserver_preload(["fa4.distributed", "fa4.oracle.cases", __name__])
    mp.start_processes(on_every_rank, (tmp_path / "store", seed), WORLD, start_method="forkserver")
