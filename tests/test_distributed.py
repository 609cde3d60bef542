"""Context parallelism on processes of this machine, with gloo: results of all ranks against the oracle of the whole."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fa4
import fa4.distributed as cp
from fa4.core.program import ProgramRef
from fa4.distributed import agree, group_rank, parts, ring
from fa4.emulator import emulate
from fa4.integrations.dtensor import register_dtensor
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_of, device_context, sharing
from fa4.torch_ops import ops
from fa4.torch_ops.signature import routes
from tests import ranks

CASES = [
    Case("full", seqlen_q=32, seqlen_k=32, head_dim=16),
    Case("causal", batch=2, seqlen_q=48, seqlen_k=48, heads_q=4, head_dim=16, causal=True),
    Case("causal_float32", seqlen_q=32, seqlen_k=32, head_dim=16, causal=True, dtype=torch.float32),
    Case("sink_softcap", seqlen_q=32, seqlen_k=32, head_dim=16, causal=True, sink=True, softcap=3.0),
    Case("varlen", lengths=((32, 32), (8, 8), (16, 16)), heads_q=4, head_dim=16, causal=True),
    Case("varlen_full", lengths=((16, 16), (24, 24)), head_dim=16),
]
WINDOW = Case("window", seqlen_q=48, seqlen_k=48, head_dim=16, causal=True, window_size=(9, None))
RUNS = [*itertools.product(CASES, cp.METHODS), (WINDOW, "all-gather")]
FOUR_RANKS = [run for run in RUNS if run[0].name in ("causal", "varlen", "window")]  # where who holds what matters


def attend(case, seed, method, device="cpu"):
    """(out, lse, gradients) of the whole, gathered from every rank."""
    problem = cases.make(case, seed, device)
    i = problem.inputs
    packed = dict(cu_seqlens=i.cu_seqlens_q)
    axis = 1 if case.lengths is None else 0
    cut = functools.partial(cp.shard, **packed)
    join = functools.partial(cp.unshard, **packed)
    leaves = [cut(x, dim=axis).requires_grad_() for x in i[:3]]
    sink = None if i.sink is None else i.sink.clone().requires_grad_()
    flags = case.flags() | {"deterministic": True}
    if case.lengths is not None:
        flags |= packed
    out, lse = cp.context_parallel_attention(*leaves, method=method, learnable_sink=sink, return_lse=True, **flags)
    upstream = cut(problem.dout, dim=axis), cut(problem.dlse, dim=axis + 1)
    grads = list(torch.autograd.grad((out, lse), [*leaves, *([] if sink is None else [sink])], upstream))
    whole = [join(out, dim=axis), join(lse, dim=axis + 1), *(join(x, dim=axis) for x in grads[:3])]
    if sink is not None:
        dist.all_reduce(grads[3])
        whole.append(grads[3])
    return problem, whole


def on_every_rank(rank, world, file, seed):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        for case, method in RUNS if world == 2 else FOUR_RANKS:
            case = dataclasses.replace(case, name=f"{case.name} by {method} on {world} ranks")
            problem, (out, lse, *grads) = attend(case, seed, method)
            if rank == 0:
                cases.assert_right(cases.judge_forward(problem, out, lse), case.name)
                cases.assert_right(cases.judge_backward(problem, cases.Gradients(*grads)), case.name)
            if case.lengths is not None and case.causal:
                again = attend(case, seed, method)[1]
                assert all(torch.equal(a, b) for a, b in zip((out, lse, *grads), again)), f"{case.name} does not repeat"
        refusals(rank, world)
        refused_before_the_first_message(rank, world)
        if world == 2:
            dtensors(seed)
    finally:
        dist.destroy_process_group()


def dtensors(seed):
    """Sharded by heads or by batch, results are those of the whole, and lie as q, k and v do."""
    register_dtensor()
    mesh = init_device_mesh("cpu", (2,))
    case = Case("sharded", batch=2, seqlen_q=8, seqlen_k=8, heads_q=4, head_dim=8, dtype=torch.float64, sink=True)
    inputs = cases.make(case, seed).inputs

    def results(*tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = fa4.flash_attn_func(*leaves[:3], causal=True, learnable_sink=leaves[3], return_lse=True)
        return out, lse, *torch.autograd.grad((out * out).sum() + lse.sum(), leaves)

    whole = results(*inputs[:4])
    for axis, of_sink, of_dsink in ((2, Shard(0), Shard(0)), (0, Replicate(), Partial())):
        placements = [Shard(axis)] * 3 + [of_sink]
        got = results(*(distribute_tensor(x, mesh, [p]) for x, p in zip(inputs[:4], placements)))
        assert [x.placements[0] for x in got] == [Shard(axis), Shard(axis and 1), *[Shard(axis)] * 3, of_dsink]
        for a, b in zip(got, whole):
            assert (a.full_tensor() - b).abs().max() < 1e-12 * max(1, b.abs().max())
    packed = cases.make(CASES[4], seed).inputs
    lengths = dict(cu_seqlens_q=packed.cu_seqlens_q, cu_seqlens_k=packed.cu_seqlens_k)
    replicated = {name: distribute_tensor(x, mesh, [Replicate()]) for name, x in lengths.items()}
    out = fa4.flash_attn_varlen_func(*(distribute_tensor(x, mesh, [Shard(1)]) for x in packed[:3]), **replicated)
    assert out.placements == (Shard(1),)
    assert torch.equal(out.full_tensor(), fa4.flash_attn_varlen_func(*packed[:3], **lengths))
    uneven = [distribute_tensor(x[:, :, :1], mesh, [Shard(2)]) for x in inputs[:3]]
    with pytest.raises(RuntimeError, match="k is sharded by heads over 2 ranks, and k has 1 heads, expected"):
        fa4.flash_attn_func(*uneven)


def refusals(rank, world):
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=f"expected multiples of {2 * world}"):
        cp.shard(torch.zeros(1, 2 * world + 1))
    with pytest.raises(ValueError, match="method is 'tree', expected one of"):
        cp.context_parallel_attention(x, x, x, method="tree")
    with pytest.raises(NotImplementedError, match='expected method="all-gather"'):
        cp.context_parallel_attention(x, x, x, causal=True, window_size=(3, None))
    with pytest.raises(NotImplementedError, match=r"expected \(left, None\) with causal=True"):
        cp.context_parallel_attention(x, x, x, window_size=(3, 3), method="all-gather")
    with pytest.raises(ValueError, match="k has rows"):
        cp.context_parallel_attention(x, x[:, :2], x[:, :2])
    with pytest.raises(ValueError, match="cu_seqlens is None"):
        cp.context_parallel_attention(x[0], x[0], x[0])
    with pytest.raises(ValueError, match="cu_seqlens is given with padded"):
        cp.context_parallel_attention(x, x, x, cu_seqlens=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="max_seqlen is given with padded"):
        cp.context_parallel_attention(x, x, x, max_seqlen=4)
    with pytest.raises(ValueError, match=r"q has shape \(1, 3, 2, 8\), expected an even number of rows"):
        cp.context_parallel_attention(*[x[:, :3]] * 3)
    whole = torch.zeros(1, 2 * world)
    for cut in (cp.shard, cp.unshard):
        for error, message, given in (
            (ValueError, r"dim is 5, expected an axis of x, which has shape \(1, ", dict(dim=5)),
            (TypeError, "dim is a float, expected an int", dict(dim=1.0)),
            (TypeError, "x is a int, expected a torch.Tensor", dict(x=3)),
            (TypeError, "cu_seqlens has dtype torch.int64", dict(cu_seqlens=torch.tensor([0, 2 * world]))),
            (TypeError, "cu_seqlens is a list", dict(cu_seqlens=[0, 2 * world])),
            (ValueError, r"cu_seqlens is \[0, 1\], expected", dict(cu_seqlens=torch.tensor([0, 1], dtype=torch.int32))),
        ):
            with pytest.raises(error, match=message):
                cut(**dict(x=whole) | given)
    with pytest.raises(ValueError, match="x has 3 entries on axis 0, expected multiples of 2"):
        cp.unshard(torch.zeros(3), dim=0)


CUMULATIVE = torch.tensor([0, 8, 16], dtype=torch.int32)
# Of packed sequences of 8 rows on each of two ranks.
REFUSED = {
    "max_seqlen is a float, expected an int": dict(max_seqlen=1.5),
    "max_seqlen is a str, expected an int": dict(max_seqlen="a"),
    "max_seqlen is a bool": dict(max_seqlen=True),
    "max_seqlen is -1, expected 0 or more": dict(max_seqlen=-1),
    "max_seqlen is 2, expected at least 8, the longest sequence": dict(max_seqlen=2),
    "cu_seqlens has dtype torch.int64, expected torch.int32": dict(cu_seqlens=CUMULATIVE.long()),
    "cu_seqlens has dtype torch.float32, expected torch.int32": dict(cu_seqlens=CUMULATIVE.float()),
    "cu_seqlens is a list, expected an int32 torch.Tensor": dict(cu_seqlens=[0, 8, 16]),
    r"cu_seqlens has shape \(1, 3\)": dict(cu_seqlens=CUMULATIVE[None]),
    "cu_seqlens is on meta, expected cpu like q": dict(cu_seqlens=CUMULATIVE.to("meta")),
    r"cu_seqlens is \[0, 16, 8\], expected 0 first": dict(cu_seqlens=CUMULATIVE[[0, 2, 1]]),
    r"cu_seqlens is \[0, 8, 16\], expected .* 8 at the end: rows of all ranks": dict(half=True),
    r"cu_seqlens has sequences of \[6, 10\] rows, expected multiples of 4": dict(cu_seqlens=CUMULATIVE.clone()),
    "return_lse is a str, expected a bool": dict(return_lse="yes"),
    "no backend can run this on cpu: sm90": dict(backend="sm90"),
    "backend is 'sm91', expected one of": dict(backend="sm91"),
    "group is a str, expected a torch.distributed.ProcessGroup": dict(group="world"),
    "softcap is -1": dict(softcap=-1.0),
    "k has dtype torch.float64, expected torch.float32 like q": dict(k=torch.zeros(8, 2, 8, dtype=torch.float64)),
    "v is a list": dict(v=[1.0]),
    "learnable_sink has shape": dict(learnable_sink=torch.zeros(3)),
}
REFUSED[next(name for name in REFUSED if "6, 10" in name)]["cu_seqlens"][1] = 6


def refused_before_the_first_message(rank, world):
    """A call that is refused leaves the group in step: the right one after it ends, with the right values. On all
    ranks alike, on one alone, and where it fails after messages have been sent."""
    if world == 2:
        z = torch.arange(128.0).reshape(8, 2, 8).sin() + rank
        calls = {method: functools.partial(cp.context_parallel_attention, method=method) for method in cp.METHODS}
        right = {method: call(z, z, z, cu_seqlens=CUMULATIVE) for method, call in calls.items()}
        for (message, wrong), everywhere in itertools.product(REFUSED.items(), (True, False)):
            given = dict(q=z, k=z, v=z, cu_seqlens=CUMULATIVE) | wrong
            if given.pop("half", False):
                given |= dict(q=z[:4], k=z[:4], v=z[:4])
            if not everywhere and rank == 0:
                given = dict(q=z, k=z, v=z, cu_seqlens=CUMULATIVE)
                message = f"rank 1 of the group refused the call: .*{message}"
            for method in cp.METHODS if everywhere else ("ring",):
                if everywhere or "group" not in wrong:
                    with pytest.raises((TypeError, ValueError), match=message):
                        calls[method](**given)
                assert torch.equal(calls[method](z, z, z, cu_seqlens=CUMULATIVE), right[method]), message
    x = torch.ones(1, 4, 2, 8)
    of_last = rank == world - 1
    with pytest.raises(
        ValueError, match=r"q is \(\(1, 6, 2, 8\), torch.float32, 'cpu'\) on rank|on rank .* expected the same"
    ):
        cp.context_parallel_attention(*[torch.ones(1, 6, 2, 8) if of_last else x] * 3)
    # What says whether ranks talk must not be what may be wrong on one.
    with pytest.raises(ValueError, match=r"q is .* on rank .* expected the same"):
        cp.context_parallel_attention(*[x.to("meta") if of_last else x] * 3)
    with pytest.raises(ValueError, match=r"x is .* on rank .* expected the same"):
        cp.unshard(x.to("meta") if of_last else x)
    with pytest.raises(
        ValueError, match=r"requires_grad of q, k, v or learnable_sink is True on rank|and True on rank"
    ):
        cp.context_parallel_attention(x, x.clone().requires_grad_(of_last), x)
    with torch.set_grad_enabled(not of_last), pytest.raises(ValueError, match="requires_grad of q, k, v or learnable_"):
        cp.context_parallel_attention(x, x.clone().requires_grad_(), x)
    with pytest.raises(ValueError, match=r"softmax_scale is .* on rank"):
        cp.context_parallel_attention(x, x, x, softmax_scale=0.5 + of_last)
    with pytest.raises(ValueError, match=r"dim is 4, expected an axis of x|rank .* refused the call: ValueError: dim"):
        cp.unshard(x, dim=4 if of_last else 1)
    for method in cp.METHODS:
        expected = cp.context_parallel_attention(x, x, x + rank, method=method)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts.ChunkCall, "forward", failing)
            with pytest.raises(MemoryError):
                cp.context_parallel_attention(x, x, x + 7, method=method)
        assert torch.equal(cp.context_parallel_attention(x, x, x + rank, method=method), expected)


def failing(*arguments):
    raise MemoryError


@pytest.mark.parametrize("asked", [False, True])
def test_the_group_alone_says_whether_ranks_tell_each_other_what_they_were_asked(asked, monkeypatch):
    """One rank without a tensor would wait for the others in a group of gloo and NCCL, if its tensors said so."""
    monkeypatch.setattr(fa4.torch_ops.checks, "_checks_everywhere", lambda: asked)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    configs = "cpu:gloo", "cpu:gloo,cuda:gloo", "cpu:mpi", "cpu:gloo,cuda:nccl", "cuda:nccl", "cpu:fake,cuda:fake"
    assert [agree._should_exchange(config) for config in configs] == [True, True, True, asked, asked, False]


@pytest.mark.rotates(2)
@pytest.mark.parametrize("world", [2, 4])
def test_parts_on_ranks_are_the_whole(world, seed, tmp_path):
    """Cases by every method: out, lse and gradients; some twice, bit for bit."""
    mp.get_context("forkserver").set_forkserver_preload(["fa4.distributed", "fa4.oracle.cases", __name__])
    started = (world, tmp_path / "store", seed)
    ranks.wait_for(mp.start_processes(on_every_rank, started, world, join=False, start_method="forkserver"))


@pytest.mark.parametrize(
    "dtype, sums, head_dim_v",
    [(torch.bfloat16, torch.bfloat16, 24), (torch.float16, torch.float32, 128)],
    ids=["idle lanes", "sums of more than two"],
)
def test_states_are_joined_in_place_by_one_kernel(dtype, sums, head_dim_v, seed, monkeypatch):
    """The late half of the rows, as beside keys that lie between a rank's chunks; some have seen nothing."""
    pytest.importorskip("cutlass", reason="compiles the kernel")
    draw = torch.Generator().manual_seed(seed)
    out, more = (torch.randn(2, rows, 3, head_dim_v, generator=draw) for rows in (26, 13))
    lse, more_lse = (100 * torch.randn(2, 3, rows, generator=draw) for rows in (26, 13))
    nothing = torch.rand(2, 2, 3, 13, generator=draw) < 0.2
    lse[..., 13:][nothing[0]], more_lse[nothing[1]] = -torch.inf, -torch.inf
    out[:, 13:][nothing[0].transpose(1, 2)], more[nothing[1].transpose(1, 2)] = 0, 0
    out, more = out.to(sums), more.to(dtype)
    exact = fa4.merge_states([out[:, 13:].double(), more.double()], [lse[..., 13:].double(), more_lse.double()])
    by_torch, by_kernel = ((out.clone(), lse.clone()) for _ in range(2))

    def joined(states):
        ring._merge(states[0][:, 13:], states[1][..., 13:], more, more_lse)
        assert torch.equal(states[0][:, :13], out[:, :13]) and torch.equal(states[1][..., :13], lse[..., :13])
        errors = states[0][:, 13:] - exact[0], (states[1][..., 13:] - exact[1]).nan_to_num(nan=0.0)
        return [float(x.abs().max()) for x in errors]

    allowed = joined(by_torch)
    ran, launcher = [], ProgramRef.launcher
    monkeypatch.setattr(ProgramRef, "launcher", lambda *given: ran.append(given) or launcher(*given))
    with emulate("sm_90a", sms=2):
        errors = joined(by_kernel)
    assert [program.name for program, *_ in ran] == ["join_states"]
    assert errors[0] <= 2 * allowed[0] and errors[1] <= 2 * allowed[1] + 1e-6, f"seed {seed}"
    assert torch.equal(by_kernel[1] == -torch.inf, by_torch[1] == -torch.inf)


def test_beside_messages_a_chip_is_shared(monkeypatch):
    """The ring's calls, as long as something travels; a call alone keeps its way, and finds it again."""
    cpu, seen = torch.device("cpu"), []

    class ChunkCall:
        def __init__(self, of):
            self.of = of

        def forward(self, q, k, v, sink=None):
            seen.append((self.of, chip_of(cpu).shared, device_context.get()))
            return q, torch.zeros(1, 1, 2)

        def rows(self, x):
            return x

        statistics = rows

    of_three = SimpleNamespace(
        group_rank=group_rank.GroupRank(0, 3, None),
        own_at_once=lambda: ChunkCall("own"),
        with_keys_of=lambda source: ChunkCall(source),
    )
    monkeypatch.setattr(
        ring, "RingExchange", lambda tensors, group_rank: SimpleNamespace(wait=lambda: tensors, is_pending=False)
    )
    x = torch.zeros(1, 2, 1, 8)
    for _ in range(2):
        ring.forward(x, x, x, None, of_three)
    assert [(of, shared) for of, shared, _ in seen[:3]] == [("own", True), (2, True), (1, False)]
    assert seen[0][2] is seen[3][2] and not chip_of(cpu).shared
    with emulate("sm_90a"):
        with sharing():
            assert chip_of(cpu).shared and chip_of(cpu).number == 90
        assert not chip_of(cpu).shared


def test_without_a_process_group_it_says_so():
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        cp.shard(torch.zeros(1, 4))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_zigzag_parts_hold_each_row_once_and_see_as_many_pairs(world):
    """From the first and last chunk inwards: the sum of positions, so of visible keys, is the same on every rank."""
    lengths = torch.tensor([0, 12, 36], dtype=torch.int32)
    rows_of_rank = [
        group_rank.rows_of_rank(lengths, group_rank.GroupRank(rank, world, None), 36 // world) for rank in range(world)
    ]
    assert sorted(torch.cat(rows_of_rank).tolist()) == list(range(36))
    assert len({int(rows.sum()) for rows in rows_of_rank}) == 1
    order = group_rank.order(lengths, group_rank.GroupRank(0, world, None), 36)
    assert torch.equal(torch.cat(rows_of_rank)[order], torch.arange(36, dtype=torch.int32))


@pytest.mark.parametrize("method", cp.METHODS)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_repeated_call_chooses_no_backend_again(rank, method, monkeypatch):
    """Its parts alternate between a whole chip and one that messages share."""
    chosen = []
    choose = ops.spec_and_plan
    routes.clear()
    monkeypatch.setattr(ops, "spec_and_plan", lambda *given: chosen.append(given) or choose(*given))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        q, k, v = (torch.randn(1, 24, 2, 16).requires_grad_() for _ in range(3))
        counts = []
        for _ in range(2):
            out = cp.context_parallel_attention(q, k, v, causal=True, method=method)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            counts.append(len(chosen))
    finally:
        dist.destroy_process_group()
    assert counts[0] > 0 and counts[1] == counts[0]
