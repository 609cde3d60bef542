"""fa4 as vLLM's backend of keys and values per head, beside its checked-in contract, and beside vLLM if installed."""

import functools
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from fa4.integrations import vllm as plugin
from fa4.runtime.plan import Layout
from fa4.torch_ops.run import prepare
from tests.integrations import contracts
from tests.integrations.contracts import vllm as contract_of_vllm
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
    whole,
)
from tests.integrations.vllm_stubs import ENGINES, IS_INSTALLED, install


@pytest.fixture(params=ENGINES)
def module(request, monkeypatch):
    """fa4's module of the backend."""
    if request.param == "installed" and not IS_INSTALLED:
        pytest.skip("vLLM is not installed")
    return install(request.param, monkeypatch)


@pytest.fixture
def backend(module):
    return module.Backend


def test_it_has_what_vllm_calls(module):
    contract = contracts.load("vllm")
    for name in ("backend.Backend", "backend.MetadataBuilder", "backend.Attention"):
        for base in contract_of_vllm.OURS[name]:
            assert not contracts.differences(contract["classes"][base], getattr(module, name.split(".")[1]))


def test_answers_are_those_that_vllm_was_given(module):
    """The columns of docs/results/serving-engines.md: vLLM's own verdicts about these answers are in the contract."""
    recorded = contracts.load("vllm")["answers"]
    for name in ("backend.Backend", "backend.MetadataBuilder", "backend.Attention"):
        cls = getattr(module, name.split(".")[1])
        for key, expected in recorded[name].items():
            if key in vars(cls) or any(key in vars(base) for base in cls.__mro__ if base.__module__.startswith("fa4.")):
                value = getattr(cls, key)
                value = value() if callable(value) else value
                assert str(value).lower().split(".")[-1] == str(expected).lower().split(".")[-1], (name, key)


def test_metadata_is_read_from_fields_that_vllm_has(module, seed):
    """Of vLLM's common metadata, only fields of its class are read."""
    known = contracts.load("vllm")["classes"]["CommonAttentionMetadata"]["fields"]
    common = common_of([3, 2], [5, 9], torch.zeros(2, 1).int(), torch.zeros(5))
    read = []

    class Watched:
        def __getattr__(self, name):
            read.append(name)
            return getattr(common, name)

    builder(module.Backend).build(0, Watched())
    assert read and set(read) <= set(known)


def test_the_contract_is_that_of_the_installed_vllm(monkeypatch):
    if not IS_INSTALLED:
        pytest.skip("vLLM is not installed")
    install("installed", monkeypatch)
    recorded = contract_of_vllm.recorded()
    if recorded["version"] != contracts.load("vllm")["version"]:
        pytest.skip(f"the contract is of another version than {recorded['version']}")
    assert recorded == contracts.load("vllm")


def test_a_name_is_registered_once(module, monkeypatch):
    registry = sys.modules.get("vllm.v1.attention.backends.registry")
    if not hasattr(registry, "of_stubs"):
        pytest.skip("vLLM's own registry keeps names for the whole process")
    plugin.register()
    assert registry.of_stubs.path == "fa4.integrations.vllm.Backend" and plugin.Backend is module.Backend
    registry.of_stubs.path = "somebody.else"
    plugin.register()
    assert registry.of_stubs.path == "somebody.else"


CACHES = {"whole": whole, "rows first": functools.partial(joined, rows_first=True), "heads first": joined}


@pytest.mark.parametrize("cache_of", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize(("options", "meaning"), LAYERS.values(), ids=LAYERS)
def test_a_prompt_in_parts_then_tokens_one_by_one(backend, options, meaning, cache_of, seed):
    requests = Requests(backend, seed, cache_of(PAGE), **options)
    for new in ((17, 3), (6, 20), (1, 1), (1, 4)):
        assert requests.step(new, **meaning) < 1e-5


@pytest.mark.parametrize("page", [16, 32, 48, 64, 128, 256])
def test_pages_of_any_multiple_of_16_rows(backend, page, seed):
    requests = Requests(backend, seed, joined(page), page)
    for new in ((page + 3, 5), (1, page), (2, 2)):
        assert requests.step(new) < 1e-5


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.TMA])
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("head_size", [64, 72, 128, 256])
def test_kernels_read_the_cache_where_it_lies(module, layout, rows_first, head_size):
    """A copy of the cache at each call would have the same results, and take most of the time."""
    for kind, dtype in (("auto", torch.bfloat16), ("fp8", torch.uint8)):
        if kind == "fp8" and head_size % 16:  # without a kernel
            continue
        attention = module.Attention(HEADS, head_size, 1.0, HEADS_KV, kv_cache_dtype=kind)
        shape = (8, 2, PAGE, HEADS_KV, 2 * head_size) if rows_first else (8, 2, HEADS_KV, PAGE, 2 * head_size)
        cache = torch.zeros(shape, dtype=dtype)[:, 1]
        cache = cache.transpose(1, 2) if rows_first else cache
        batch = builder(module.Backend).build(0, common_of([1], [9], torch.zeros(1, 1).int(), None))
        layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
        call = attention._on_cache(layer, torch.zeros(1, HEADS, head_size, dtype=torch.bfloat16), cache, batch)
        for name in ("k_cache", "v_cache"):
            x = call[name]
            assert x.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
            assert prepare.in_layout(x, layout) is x, name


@pytest.mark.parametrize("count", [2, 3, 5, 8, 16])
def test_queries_of_speculative_decoding(backend, count, seed):
    """The same number of new tokens for each request; and requests of which another number was accepted."""
    requests = Requests(backend, seed, joined(PAGE))
    for new in ((9, 21), (count, count), (count, 1), (count, count)):
        assert requests.step(new) < 1e-5


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("per_head", [False, True], ids=["layer", "heads"])
def test_a_cache_of_8_bits(backend, kind, per_head, seed):
    scales = ([0.05, 0.02], [0.03, 0.04]) if per_head else (0.05, 0.02)
    requests = Requests(backend, seed, joined(PAGE, torch.uint8), scales=scales, kv_cache_dtype=kind)

    def rounded(x, scale):
        factor = scale.reshape(-1, 1).float()
        return (x / factor).clamp(-448, 448).to(torch.float8_e4m3fn).float() * factor

    scales = requests.layer._k_scale, requests.layer._v_scale
    for new in ((17, 3), (6, 20), (1, 1)):
        before = list(requests.done)
        # The formula gets the numbers that the cache holds.
        kept = [(q, rounded(k, scales[0]), rounded(v, scales[1])) for q, k, v in requests.rows]
        original, requests.rows = requests.rows, kept
        assert requests.step(new) < 1e-5, before
        requests.rows = original


def test_a_decoder_that_is_not_causal_sees_as_far_on_both_sides(backend, seed):
    requests = Requests(backend, seed, joined(PAGE), sliding_window=5)
    assert requests.step((17, 30), causal=False, window=5) < 1e-5


@pytest.mark.parametrize("window", [None, 3])
def test_an_encoder_sees_both_sides(backend, window, seed):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(9, h, HEAD_DIM, generator=draw) for h in (HEADS, HEADS_KV, HEADS_KV))
    attention = backend.get_impl_cls()(
        HEADS, HEAD_DIM, SCALE, HEADS_KV, sliding_window=window, attn_type="encoder_only"
    )
    metadata = builder(backend).build(0, common_of([4, 5], [4, 5], torch.zeros(2, 0).int(), None, causal=False))
    got = attention.forward(None, q, k, v, None, metadata, torch.empty_like(q))
    attention.do_kv_cache_update(None, k, v, None, None)  # writes nothing: an encoder has no cache
    expected = [formula(*(x[a:b] for x in (q, k, v)), window=window, causal=False) for a, b in ((0, 4), (4, 9))]
    assert (got - torch.cat(expected)).abs().max() < 1e-5


def test_a_decoder_sees_all_of_its_encoder(backend, seed):
    """Attention between encoder and decoder: vLLM replaces lengths and slots, and gives keys once, of the encoder."""
    draw = torch.Generator().manual_seed(seed)
    attention = backend.get_impl_cls()(HEADS, HEAD_DIM, SCALE, HEADS_KV, attn_type="encoder_decoder")
    cache, table = joined(PAGE), torch.tensor([[3, 5], [0, 6]], dtype=torch.int32)
    k, v = (torch.randn(27, HEADS_KV, HEAD_DIM, generator=draw) for _ in range(2))
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    slots = [int(table[b, p // PAGE]) * PAGE + p % PAGE for b, n in ((0, 20), (1, 7)) for p in range(n)]
    for step, new in enumerate(([6, 2], [1, 1])):
        metadata = builder(backend).build(0, common_of(new, [20, 7], table, None, causal=False))
        metadata.slot_mapping = torch.tensor(slots)
        if step == 0:
            attention.do_kv_cache_update(layer, k, v, cache, metadata.slot_mapping)
        q = torch.randn(sum(new), HEADS, HEAD_DIM, generator=draw)
        got = attention.forward(layer, q, None, None, cache, metadata, torch.empty_like(q))
        parts = ((0, new[0], 0, 20), (new[0], sum(new), 20, 27))
        expected = [formula(q[a:b], k[c:d], v[c:d], causal=False) for a, b, c, d in parts]
        assert (got - torch.cat(expected)).abs().max() < 1e-5


def test_a_layer_that_shares_anothers_cache_reads_it(backend, seed):
    """vLLM then passes neither keys nor values that are new."""
    draw = torch.Generator().manual_seed(seed)
    cache, q = torch.randn(2, HEADS_KV, PAGE, 2 * HEAD_DIM, generator=draw), torch.randn(1, HEADS, HEAD_DIM)
    attention = backend.get_impl_cls()(HEADS, HEAD_DIM, SCALE, HEADS_KV, kv_sharing_target_layer_name="another")
    metadata = builder(backend).build(0, common_of([1], [20], torch.tensor([[1, 0]]).int(), None))
    got = attention.forward(None, q, None, None, cache, metadata, torch.empty_like(q))
    rows = cache[[1, 0]].transpose(1, 2).flatten(0, 1)[:20].split(HEAD_DIM, -1)
    assert (got - formula(q, *rows)).abs().max() < 1e-5


def test_metadata_is_vllms_own_buffers(backend, seed):
    """A graph replays with what these hold then; builders of other cache groups replace pages and slots only."""
    table, slots = torch.zeros(2, 4).int(), torch.zeros(3)
    common = common_of([1, 2], [5, 6], table, slots)
    made = builder(backend)
    metadata = made.build(0, common)
    assert metadata.query_start_loc is common.query_start_loc and metadata.seq_lens is common.seq_lens
    assert metadata.block_table is table and metadata.slot_mapping is slots
    other = made.update_block_table(metadata, table.clone(), slots.clone())
    changed = {x.name for x in fields(metadata) if getattr(metadata, x.name) is not getattr(other, x.name)}
    assert changed == {"block_table", "slot_mapping"} and metadata.block_table is table
    assert made.supports_draft_decode_metadata_update and made.update_draft_decode_metadata(metadata) is None


def test_vllms_own_layer_runs_it(monkeypatch, seed):
    """vLLM's layer, forward context, common metadata and cache spec, on a CPU: a prompt in parts, then tokens."""
    if not IS_INSTALLED:
        pytest.skip("vLLM is not installed")
    backend = install("installed", monkeypatch).Backend
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is backend
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.cache_config.block_size = PAGE
    with set_current_vllm_config(config):
        options = dict(per_layer_sliding_window=7, attn_backend=backend, prefix="model.layers.0.attn")
        layer = Attention(HEADS, HEAD_DIM, SCALE, HEADS_KV, cache_config=config.cache_config, **options)
        made = builder(backend, config, layer.get_kv_cache_spec(config))
        requests = Requests(backend, seed, joined(PAGE))
        layer.kv_cache = requests.cache
        for new in ((17, 3), (1, 20), (1, 1)):
            before, common = requests.common(new)
            told = vars(common) | dict(slot_mapping=common.slot_mapping[: sum(new)])
            metadata = made.build(0, CommonAttentionMetadata(**told))
            q, k, v = (x[: sum(new)].flatten(1) for x in requests.inputs(before))
            name = layer.layer_name
            with set_forward_context({name: metadata}, config, slot_mapping={name: metadata.slot_mapping}):
                got = layer(q, k, v).view(-1, HEADS, HEAD_DIM)
            expected = [
                formula(r[0][a:b], r[1][:b], r[2][:b], window=7)
                for r, a, b in zip(requests.rows, before, requests.done)
            ]
            assert (got - torch.cat(expected)).abs().max() < 1e-5


def test_what_is_refused(module, monkeypatch):
    backend = module.Backend
    attention = backend.get_impl_cls()
    with pytest.raises(NotImplementedError, match="attn_type is 'other'"):
        attention(HEADS, HEAD_DIM, 1.0, attn_type="other")
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is 'fp8_e5m2', expected one of"):
        attention(HEADS, HEAD_DIM, 1.0, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is 'fp8', and an encoder has no cache"):
        attention(HEADS, HEAD_DIM, 1.0, kv_cache_dtype="fp8", attn_type="encoder")
    x = torch.ones(2, HEADS, HEAD_DIM)
    for scales in (dict(output_scale=x), dict(output_block_scale=x)):
        with pytest.raises(NotImplementedError, match="a quantized output is asked for"):
            attention(HEADS, HEAD_DIM, 1.0).forward(None, x, x, x, None, None, x, **scales)
    assert not attention(HEADS, HEAD_DIM, 1.0).forward(None, x, x, x, None, None, x.clone()).any()  # profiling
    with pytest.raises(NotImplementedError, match="causal differs between requests"):
        builder(backend).build(0, SimpleNamespace(causal=torch.ones(2, dtype=torch.bool)))
    monkeypatch.setattr(attention, "dcp_world_size", 2, raising=False)
    monkeypatch.setattr(attention, "__new__", lambda cls, *args, **kw: object.__new__(cls))
    monkeypatch.setattr(module.parts, "combine", lambda: max)
    with pytest.raises(NotImplementedError, match="sliding_window is 8 with decode context parallelism"):
        attention(HEADS, HEAD_DIM, 1.0, sliding_window=8)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes is \[0.5\] with decode context parallelism"):
        attention(HEADS, HEAD_DIM, 1.0, alibi_slopes=[0.5])
    metadata = builder(backend).build(0, common_of([2], [2], torch.zeros(1, 1).int(), None))
    with pytest.raises(NotImplementedError, match="key and value are None with decode context parallelism"):
        attention(HEADS, HEAD_DIM, 1.0).forward(None, x, None, None, None, metadata, x)


def test_gpus_are_those_with_a_kernel(backend):
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

    def reason(capability=(9, 0), head_size=128, cache="auto"):
        gpu = SimpleNamespace(major=capability[0], minor=capability[1])
        return backend.supports_combination(head_size, torch.bfloat16, cache, 16, False, False, False, False, gpu) or (
            "" if backend.supports_compute_capability(gpu) else "gpu"
        )

    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert not any(reason(capability, size, cache) for size in (64, 128, 256, 512) for cache in ("auto", "fp8"))
    assert reason((7, 5)) == "no kernel of fa4 has head_size 128 with kv_cache_dtype 'auto' on this GPU"
    assert not reason(head_size=72) and "head_size 72 with kv_cache_dtype 'fp8'" in reason(head_size=72, cache="fp8")
    assert backend.supports_head_size(512) and not backend.supports_head_size(520)
    assert not backend.supports_head_size(68) and backend.get_supported_kernel_block_sizes(None)[0].base == 16


def test_batch_invariance_is_asked_for(module, monkeypatch, seed):
    seen, attend = [], module.flash_attn_with_kvcache
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(
        module, "flash_attn_with_kvcache", lambda **call: seen.append(call["batch_invariant"]) or attend(**call)
    )
    requests = Requests(module.Backend, seed, joined(PAGE))
    assert requests.step((20, 3)) < 1e-5 and requests.step((1, 1), prefix=PAGE) < 1e-5  # no prefix alone either
    assert seen == [True, True] and module.Backend.supports_batch_invariance()
