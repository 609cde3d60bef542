"""fa4 as vLLM's backend where keys come in parts that are merged: a common prefix, and ranks that share a context."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from tests.integrations.vllm_requests import (
    HEAD_DIM,
    HEADS,
    HEADS_KV,
    LAYERS,
    PAGE,
    SCALE,
    Requests,
    builder,
    common_of,
    formula,
    joined,
)
from tests.integrations.vllm_stubs import ENGINES, IS_INSTALLED, install, local_lens


@pytest.fixture(params=ENGINES)
def module(request, monkeypatch):
    """fa4's module of the backend."""
    if request.param == "installed" and not IS_INSTALLED:
        pytest.skip("vLLM is not installed")
    return install(request.param, monkeypatch)


@pytest.mark.parametrize("name", ["plain", "softcap", "sink", "window", "alibi"])
def test_a_common_prefix_is_read_once(module, name, monkeypatch, seed):
    """Older versions of vLLM tell of a prefix that all sequences have, here two pages. With a window or slopes it is
    not treated alone, because distances in a part are not those of the whole."""
    options, meaning = LAYERS[name]
    calls, attend = [], module.parts.flash_attn_with_kvcache

    def counted(**call):
        calls.append(call["cache_seqlens"].tolist())
        return attend(**call)

    monkeypatch.setattr(module.parts, "flash_attn_with_kvcache", counted)
    requests = Requests(module.Backend, seed, joined(PAGE), **options)
    for i in (1, 2):
        requests.rows[1][i][: 2 * PAGE] = requests.rows[0][i][: 2 * PAGE]
    assert requests.step((36, 33), **meaning) < 1e-5
    assert requests.step((1, 5), prefix=2 * PAGE, **meaning) < 1e-5
    assert calls == ([] if name in ("window", "alibi") else [[32], [5, 6]])
    with pytest.raises(ValueError, match="common_prefix_len is 5, expected a multiple of the page's 16 rows"):
        module.parts.cascade({}, SimpleNamespace(prefix_len=5), PAGE)
    asks = requests.builder.use_cascade_attention
    assert asks(1024, [1500], 4, 2) and not asks(1008)


class Group:
    """Ranks of decode context parallelism, as threads. Each call is made by all of them."""

    def __init__(self, world_size):
        self.world_size, self.kept, self.barrier = world_size, [None] * world_size, threading.Barrier(world_size)
        self.local = threading.local()

    def exchange(self, x):
        self.barrier.wait(timeout=60)
        self.kept[self.local.rank] = x
        self.barrier.wait(timeout=60)
        return list(self.kept)

    def all_gather(self, x, dim):
        return torch.cat(self.exchange(x), dim)

    def combine(self, out, lse, group, return_lse):
        """What vLLM's functions of ranks do: from results of all ranks' heads to those of this rank's heads."""
        assert group is self and return_lse and out.shape[:2] == lse.shape
        outs, lses = zip(*self.exchange((out, lse)))
        weights = torch.stack(lses).double().softmax(0)
        weights = weights.nan_to_num(0.0)  # no rank has a key
        merged = sum(w[..., None] * x.double() for w, x in zip(weights, outs)).to(out.dtype)
        heads = out.shape[1] // self.world_size
        mine = slice(self.local.rank * heads, (self.local.rank + 1) * heads)
        return merged[:, mine], torch.stack(lses).logsumexp(0)[:, mine]


@pytest.mark.parametrize(("interleave", "world_size"), [(1, 2), (4, 2), (1, 3)])
@pytest.mark.parametrize("name", ["plain", "softcap", "sink"])
def test_ranks_of_a_context(module, name, interleave, world_size, monkeypatch, seed):
    """Each rank has a part of a sequence's rows, and of the query heads; prompts in parts, then tokens."""
    options, meaning = LAYERS[name]
    group = Group(world_size)
    ranks = lambda *_: (world_size, group.local.rank)  # noqa: E731
    sys.modules.setdefault("vllm.distributed", SimpleNamespace())
    parallel = SimpleNamespace(
        get_dcp_group=lambda: group, get_dcp_world_size_and_rank=ranks, get_pcp_group=lambda: None
    )
    backend = module.Backend
    impl = backend.get_impl_cls()
    monkeypatch.setattr(impl, "dcp_world_size", world_size, raising=False)
    monkeypatch.setattr(impl, "__new__", lambda cls, *args, **kw: object.__new__(cls))
    monkeypatch.setattr(module.parts, "combine", lambda: group.combine)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", parallel)
    monkeypatch.setattr(sys.modules["vllm.v1.attention.backends.utils"], "get_dcp_local_seq_lens", local_lens)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=world_size, cp_kv_cache_interleave_size=interleave
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    draw = torch.Generator().manual_seed(seed)
    # Each rank has query heads of its own, and one kv head, the same for all: vLLM shards heads before it shards rows.
    heads = HEADS * world_size
    rows = [[torch.randn(64, h, HEAD_DIM, generator=draw) for h in (heads, 1, 1)] for _ in range(2)]
    errors, addresses = [None] * world_size, [set() for _ in range(world_size)]

    def rank(index):
        group.local.rank = index
        attention = impl(HEADS, HEAD_DIM, SCALE, 1, **options)
        made, cache = builder(backend, config, SimpleNamespace(dcp_sharded=True)), joined(PAGE)[:, :1]
        assert made.supports_draft_decode_metadata_update is False
        table = torch.randperm(8, generator=torch.Generator().manual_seed(seed + index)).view(2, 4).int()
        layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
        done, worst = [0, 0], 0.0
        for new in ((9, 1), (1, 30), (1, 1), (4, 2)):
            before, done = done, [a + b for a, b in zip(done, new)]
            slots = []
            for b in range(2):
                for p in range(before[b], done[b]):
                    mine = p // interleave % world_size == index
                    local = p // interleave // world_size * interleave + p % interleave
                    slots.append(int(table[b, local // PAGE]) * PAGE + local % PAGE if mine else -1)
            metadata = made.build(0, common_of(new, done, table, torch.tensor(slots)))
            assert (metadata.dcp_context_lens is None) == (before == [0, 0])
            if metadata.dcp_context_lens is not None:
                addresses[index].add(metadata.dcp_context_lens.data_ptr())
            q, k, v = (torch.cat([r[i][a:b] for r, a, b in zip(rows, before, done)]) for i in range(3))
            mine = slice(index * HEADS, (index + 1) * HEADS)
            attention.do_kv_cache_update(layer, k, v, cache, metadata.slot_mapping)
            got = attention.forward(layer, q[:, mine], k, v, cache, metadata, torch.empty_like(q[:, mine]))
            expected = [
                formula(r[0][a:b, mine], *(x[:b].expand(-1, HEADS_KV, -1) for x in r[1:]), **meaning)
                for r, a, b in zip(rows, before, done)
            ]
            worst = max(worst, float((got - torch.cat(expected)).abs().max()))
        errors[index] = worst

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert all(error is not None and error < 1e-5 for error in errors), errors
    assert all(len(found) == 1 for found in addresses)  # the buffer of lengths stays where it is
