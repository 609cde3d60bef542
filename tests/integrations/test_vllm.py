"""fa4 as vLLM's attention backend, beside stubs: the package itself, which needs a GPU, has not run it."""

import abc
import enum
import inspect
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fa4.integrations import vllm as plugin

# Parameters of the methods that vLLM calls by name, of vllm/v1/attention/backend.py in 0.33.0 and at commit
# 0014ca6b9929 of its main, which also has get_kv_cache_shape.
PARAMETERS = {
    "AttentionImpl.__init__": (
        "self", "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
        "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
    ),
    "AttentionImpl.forward": (
        "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
        "output_block_scale",
    ),
    "AttentionMetadataBuilder.__init__": ("self", "kv_cache_spec", "layer_names", "vllm_config", "device"),
    "AttentionMetadataBuilder.build": ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    "AttentionBackend.get_kv_cache_shape": (
        "num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str",
    ),
}  # fmt: skip
# Those beside that a backend has to have.
ABSTRACT = ("get_name", "get_impl_cls", "get_builder_cls")
HEADS, HEADS_KV, HEAD_DIM, PAGE = 4, 2, 16, 16
SCALE = 0.3  # not the usual one for HEAD_DIM


def stub(name, **members):
    module = ModuleType(name)
    for key, value in members.items():
        setattr(module, key, value)
    return module


def base(name, *extra):
    """A class with vLLM's abstract methods of that name."""
    methods = [*extra, *(key.split(".")[1] for key in PARAMETERS if key.startswith(f"{name}."))]
    made = {method: abc.abstractmethod(lambda self, *args: None) for method in methods}
    return abc.ABCMeta(name, (), made)


def write_pages(key, value, k_cache, v_cache, slots, kv_cache_dtype, k_scale, v_scale):
    """What vLLM's kernel of this name does: rows to their slots, those of -1 nowhere."""
    assert kv_cache_dtype == "auto" and k_scale is not None and v_scale is not None
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_cache[slot // PAGE, slot % PAGE], v_cache[slot // PAGE, slot % PAGE] = key[row], value[row]


@pytest.fixture
def registered(monkeypatch):
    """vLLM's modules as far as fa4 looks at them: what was registered, and the backend's module."""
    registry = {}
    custom = SimpleNamespace(is_overridden=lambda: bool(registry))
    stubs = [
        stub("vllm"),
        stub("vllm._custom_ops", reshape_and_cache_flash=write_pages),
        stub("vllm.config", get_current_vllm_config_or_none=lambda: None),
        stub("vllm.v1"),
        stub("vllm.v1.attention"),
        stub("vllm.v1.attention.backends"),
        stub(
            "vllm.v1.attention.backends.registry",
            AttentionBackendEnum={"CUSTOM": custom},
            register_backend=lambda backend, path: registry.update(path=path),
        ),
        stub(
            "vllm.v1.attention.backend",
            AttentionBackend=base("AttentionBackend", *ABSTRACT),
            AttentionImpl=base("AttentionImpl"),
            AttentionMetadataBuilder=base("AttentionMetadataBuilder"),
            AttentionCGSupport=enum.Enum("AttentionCGSupport", "NEVER UNIFORM_BATCH ALWAYS"),
            AttentionType=SimpleNamespace(
                DECODER="decoder", ENCODER="encoder", ENCODER_ONLY="encoder_only", ENCODER_DECODER="encoder_decoder"
            ),
            MultipleOf=lambda base: SimpleNamespace(base=base),
        ),
    ]
    for module in stubs:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "fa4.integrations.vllm.backend", raising=False)
    plugin.register()
    yield registry
    sys.modules.pop("fa4.integrations.vllm.backend", None)


@pytest.fixture
def backend(registered):
    path, name = registered["path"].rsplit(".", 1)
    return getattr(__import__(path, fromlist=[name]), name)


def test_parameters_are_vllms(backend):
    classes = dict(
        AttentionImpl=backend.get_impl_cls(),
        AttentionMetadataBuilder=backend.get_builder_cls(),
        AttentionBackend=backend,
    )
    for name, expected in PARAMETERS.items():
        cls, method = name.split(".")
        got = tuple(inspect.signature(getattr(classes[cls], method)).parameters)
        assert got[: len(expected)] == expected, name
        assert got[len(expected) :] in ((), ("sinks",)), name  # which vLLM passes to backends that say they take them


def test_another_backend_keeps_the_name(registered):
    registered["path"] = "somebody.else"
    plugin.register()
    assert registered["path"] == "somebody.else"


def formula(q, k, v, window=None, softcap=0.0, slopes=None, sink=None):
    """(queries, heads, head_dim) in float64 of one sequence, whose last keys are the queries' own."""
    k, v = (x.double().repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    distance = torch.arange(len(k)) - (torch.arange(len(q)) + len(k) - len(q))[:, None]
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if slopes is None else scores + torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
    seen = (distance <= 0) & (distance > -(window or math.inf))
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(HEADS, len(q), 1)], 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., : len(k)], v)


LAYERS = {
    "plain": ({}, {}),
    "window": (dict(sliding_window=5), dict(window=5)),
    "softcap": (dict(logits_soft_cap=2.0), dict(softcap=2.0)),
    "alibi": (dict(alibi_slopes=[0.5, 0.25, 0.1, 0.05]), dict(slopes=[0.5, 0.25, 0.1, 0.05])),
    "sink": (dict(sinks=torch.linspace(-1, 1, HEADS)), dict(sink=torch.linspace(-1, 1, HEADS))),
}


def whole(backend):
    """A cache of older versions of vLLM: keys and values are two halves of it."""
    return torch.full(backend.get_kv_cache_shape(8, PAGE, HEADS_KV, HEAD_DIM), math.nan)


def joined(rows_first):
    """A cache of vLLM 0.33, one layer of two: a row has its keys, then its values. rows_first: in memory rows come
    before heads."""
    shape = (8, 2, PAGE, HEADS_KV, 2 * HEAD_DIM) if rows_first else (8, 2, HEADS_KV, PAGE, 2 * HEAD_DIM)
    cache = torch.full(shape, math.nan)[:, 1]
    return cache.transpose(1, 2) if rows_first else cache


CACHES = {"whole": whole, "rows first": lambda _: joined(True), "heads first": lambda _: joined(False)}


@pytest.mark.parametrize(
    ("options", "meaning", "cache_of"),
    [(*layer, whole) for layer in LAYERS.values()] + [({}, {}, cache) for cache in list(CACHES.values())[1:]],
    ids=[*LAYERS, *list(CACHES)[1:]],
)
def test_a_prompt_in_parts_then_tokens_one_by_one(backend, options, meaning, cache_of, seed):
    """Two requests in one batch, each step with other numbers of new tokens, on pages in no order; and padding."""
    draw = torch.Generator().manual_seed(seed)
    rows = [
        torch.randn(40, h, HEAD_DIM, generator=draw) for h in (HEADS, HEADS_KV, HEADS_KV, HEADS, HEADS_KV, HEADS_KV)
    ]
    requests = rows[:3], rows[3:]
    table = torch.randperm(8, generator=draw).view(2, 4).int()
    cache = cache_of(backend)
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    attention = backend.get_impl_cls()(HEADS, HEAD_DIM, SCALE, HEADS_KV, **options)
    builder = backend.get_builder_cls()(None, [], None, torch.device("cpu"))
    done = [0, 0]
    for new in ((17, 3), (6, 20), (1, 1), (1, 4)):
        before, done = done, [a + b for a, b in zip(done, new)]
        parts = [torch.cat([r[i][a:b] for r, a, b in zip(requests, before, done)]) for i in range(3)]
        q, k, v = (torch.cat([x, x.new_full((2, *x.shape[1:]), 7.0)]) for x in parts)
        slots = [int(table[b, p // PAGE]) * PAGE + p % PAGE for b in range(2) for p in range(before[b], done[b])]
        common = SimpleNamespace(
            num_actual_tokens=sum(new), query_start_loc=torch.tensor([0, new[0], sum(new)], dtype=torch.int32),
            seq_lens=torch.tensor(done, dtype=torch.int32), block_table_tensor=table,
            slot_mapping=torch.tensor([*slots, -1, -1]), max_query_len=max(new), max_seq_len=64, causal=True,
        )  # fmt: skip
        output = torch.full_like(q, 5.0)
        got = attention.forward(layer, q, k, v, cache, builder.build(0, common), output)
        assert got is output and (output[sum(new) :] == 5.0).all()
        expected = [formula(r[0][a:b], r[1][:b], r[2][:b], **meaning) for r, a, b in zip(requests, before, done)]
        assert (output[: sum(new)] - torch.cat(expected)).abs().max() < 1e-5


def test_an_encoder_sees_both_sides(backend, seed):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(9, h, HEAD_DIM, generator=draw) for h in (HEADS, HEADS_KV, HEADS_KV))
    attention = backend.get_impl_cls()(HEADS, HEAD_DIM, SCALE, HEADS_KV, attn_type="encoder_only")
    common = SimpleNamespace(
        num_actual_tokens=9, query_start_loc=torch.tensor([0, 4, 9], dtype=torch.int32), seq_lens=None,
        block_table_tensor=None, slot_mapping=None, max_query_len=5, max_seq_len=5, causal=False,
    )  # fmt: skip
    batch = backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, common)
    got = attention.forward(None, q, k, v, None, batch, torch.empty_like(q))
    expected = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[a:b].double().transpose(0, 1) for x in (q, k, v)), scale=SCALE, enable_gqa=True
        ).transpose(0, 1)
        for a, b in ((0, 4), (4, 9))
    ]
    assert (got - torch.cat(expected)).abs().max() < 1e-5


def test_a_layer_that_shares_anothers_cache_writes_nothing(backend, seed):
    draw = torch.Generator().manual_seed(seed)
    cache = torch.randn(backend.get_kv_cache_shape(2, PAGE, HEADS_KV, HEAD_DIM), generator=draw)
    before, q, k = cache.clone(), *(torch.randn(1, h, HEAD_DIM, generator=draw) for h in (HEADS, HEADS_KV))
    attention = backend.get_impl_cls()(HEADS, HEAD_DIM, SCALE, HEADS_KV, kv_sharing_target_layer_name="another")
    common = SimpleNamespace(
        num_actual_tokens=1, query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([20], dtype=torch.int32), block_table_tensor=torch.tensor([[1, 0]], dtype=torch.int32),
        slot_mapping=torch.tensor([3]), max_query_len=1, max_seq_len=32, causal=True,
    )  # fmt: skip
    batch = backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, common)
    got = attention.forward(None, q, k, k, cache, batch, torch.empty_like(q))
    rows = [x[[1, 0]].flatten(0, 1)[:20] for x in cache]
    assert torch.equal(cache, before) and (got - formula(q, *rows)).abs().max() < 1e-5


def test_what_is_refused(backend):
    attention = backend.get_impl_cls()
    with pytest.raises(NotImplementedError, match="attn_type is 'encoder_decoder'"):
        attention(HEADS, HEAD_DIM, 1.0, attn_type="encoder_decoder")
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is 'fp8', expected one of"):
        attention(HEADS, HEAD_DIM, 1.0, kv_cache_dtype="fp8")
    x = torch.ones(2, HEADS, HEAD_DIM)
    with pytest.raises(NotImplementedError, match="a quantized output is asked for"):
        attention(HEADS, HEAD_DIM, 1.0).forward(None, x, x, x, None, None, x, output_scale=x)
    assert not attention(HEADS, HEAD_DIM, 1.0).forward(None, x, x, x, None, None, x.clone()).any()  # profiling
    builder = backend.get_builder_cls()(None, [], None, None)
    with pytest.raises(NotImplementedError, match="causal differs between requests"):
        builder.build(0, SimpleNamespace(causal=torch.ones(2, dtype=torch.bool)))
    assert backend.supports_sliding_window() and backend.get_supported_kernel_block_sizes(None)[0].base == 16
    assert not backend.supports_head_size(512) and not backend.supports_attn_type("encoder_decoder")
    assert not backend.supports_compute_capability(SimpleNamespace(major=7, minor=5))
