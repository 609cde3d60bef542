"""fa4 as SGLang's attention backend, beside its checked-in contract, and beside SGLang where it is installed."""

import enum
import importlib
import importlib.util
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from fa4.integrations import sglang as plugin
from tests.integrations import contracts
from tests.integrations.contracts import sglang as contract_of_sglang
from tests.integrations.contracts.vllm import stub
from tests.integrations.vllm_stubs import module

HEADS, HEADS_KV, HEAD_DIM, SCALE = 4, 2, 16, 0.3
IS_INSTALLED = importlib.util.find_spec("sglang") is not None
SRT = "sglang.srt"


def modes(members):
    """SGLang's modes of a batch, with those of its questions that are asked."""
    plain = enum.IntEnum("ForwardMode", members)
    extends = {"EXTEND", "MIXED", "TARGET_VERIFY", "SPLIT_PREFILL", "DLLM_EXTEND"}
    questions = {"is_decode": {"DECODE"}, "is_target_verify": {"TARGET_VERIFY"}, "is_dllm_extend": {"DLLM_EXTEND"}}

    def is_extend(name):
        return lambda include_draft_extend_v2=False: (
            name in extends or (include_draft_extend_v2 and name == "DRAFT_EXTEND_V2")
        )

    made = SimpleNamespace()
    for member in plain:
        answers = {name: (lambda yes: lambda: yes)(member.name in of) for name, of in questions.items()}
        answers["is_extend"] = is_extend(member.name)
        setattr(made, member.name, SimpleNamespace(name=member.name, **answers))
    return made


def contract_modules():
    contract = contracts.load("sglang")
    modes_of, registry, choices = modes(contract["classes"]["ForwardMode"]["members"]), {}, ["triton", "fa4"]

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        of_mode = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return of_mode(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    names = [name.lower() for name in contract["classes"]["AttentionType"]["members"]]
    packages = (
        "sglang", SRT, f"{SRT}.arg_groups", f"{SRT}.layers", f"{SRT}.layers.attention", f"{SRT}.mem_cache",
        f"{SRT}.model_executor",
    )  # fmt: skip
    return [
        *map(module, packages),
        module(
            f"{SRT}.arg_groups.choices", ATTENTION_BACKEND_CHOICES=choices, add_attention_backend_choices=choices.extend
        ),
        module(
            f"{SRT}.layers.attention.attention_registry",
            ATTENTION_BACKENDS=registry,
            register_attention_backend=lambda name: lambda create: registry.update({name: create}),
        ),
        module(
            f"{SRT}.layers.attention.base_attn_backend",
            AttentionBackend=stub(contract, "AttentionBackend", forward=forward),
        ),
        module(
            f"{SRT}.layers.radix_attention", AttentionType=SimpleNamespace(**{name.upper(): name for name in names})
        ),
        module(
            f"{SRT}.mem_cache.memory_pool",
            KVWriteLoc=SimpleNamespace(for_layer=lambda batch, layer: SimpleNamespace(loc=batch.out_cache_loc)),
        ),
        module(f"{SRT}.model_executor.forward_batch_info", ForwardMode=modes_of),
    ]


@pytest.fixture(params=["contract", "installed"])
def engine(request, monkeypatch):
    """fa4's module of the backend, and SGLang's modes and types."""
    if request.param == "installed" and not IS_INSTALLED:
        pytest.skip("SGLang is not installed")
    name = "fa4.integrations.sglang.backend"
    monkeypatch.delitem(sys.modules, name, raising=False)
    if request.param == "contract":
        for found in [x for x in sys.modules if x == "sglang" or x.startswith("sglang.")]:
            monkeypatch.delitem(sys.modules, found)
        for made in contract_modules():
            monkeypatch.setitem(sys.modules, made.__name__, made)
    ours = importlib.import_module(name)
    del sys.modules[name]
    monkeypatch.setitem(sys.modules, name, ours)
    modes_of = importlib.import_module(f"{SRT}.model_executor.forward_batch_info").ForwardMode
    types = importlib.import_module(f"{SRT}.layers.radix_attention").AttentionType
    made = SimpleNamespace(Backend=ours.Backend, modes=modes_of, types=types, pool=Pool, layer=SimpleNamespace)
    if request.param == "installed":
        made.pool, made.layer = sglangs_pool, sglangs_layer
    return made


def formula(q, k, v, window=None, softcap=0.0, sink=None, causal=True):
    """(queries, heads, head_dim) and lse (queries, heads) in float64; the queries are the last rows."""
    k, v = (x.double().repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    distance = torch.arange(len(k)) - (torch.arange(len(q)) + len(k) - len(q))[:, None]
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    reach = math.inf if window is None else window
    seen = (distance <= 0) & (distance >= -reach) if causal else distance.abs() <= reach
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(HEADS, len(q), 1)], 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., : len(k)], v), scores.logsumexp(2).T


def sglangs_pool(slots, page, dtype):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(slots - page, page, dtype, HEADS_KV, HEAD_DIM, 4, "cpu", False)
    pool.buffers = pool.get_kv_buffer(3)
    for x in pool.buffers:
        x.copy_(torch.full(x.shape, math.nan).to(dtype))
    return pool


def sglangs_layer(**options):
    from sglang.srt.layers.radix_attention import RadixAttention

    layer = RadixAttention(HEADS, HEAD_DIM, SCALE, HEADS_KV, options["layer_id"])
    for name, value in options.items():
        assert hasattr(layer, name), name
        setattr(layer, name, value)
    return layer


class Pool:
    """A layer's keys and values by slots, as SGLang's pool hands them out. Slots without a token are NaN."""

    def __init__(self, slots, page, dtype):
        self.buffers = [torch.full((slots, HEADS_KV, HEAD_DIM), math.nan).to(dtype) for _ in range(2)]

    def get_kv_buffer(self, layer_id):
        assert layer_id == 3
        return self.buffers

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        for buffer, x, scale in zip(self.buffers, (cache_k, cache_v), (k_scale, v_scale)):
            x = x.view(-1, HEADS_KV, HEAD_DIM)
            x = x if buffer.dtype == x.dtype else x / (1.0 if scale is None else scale)
            buffer[loc_info.loc] = x.to(buffer.dtype)


class Server:
    """Requests whose tokens lie in pages in no order; `step` appends and attends."""

    def __init__(self, engine, seed, page=1, dtype=torch.float32, **layer):
        self.engine, self.page, self.draw = engine, page, torch.Generator().manual_seed(seed)
        self.pool = engine.pool(64 * page, page, dtype)
        self.slots = SimpleNamespace(req_to_token=torch.zeros(4, 24 * page, dtype=torch.int32))
        self.free, self.rows, self.pages = torch.randperm(64, generator=self.draw).tolist(), {}, {}
        options = dict(
            layer_id=3, tp_q_head_num=HEADS, tp_k_head_num=HEADS_KV, tp_v_head_num=HEADS_KV, qk_head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM, scaling=SCALE, logit_cap=0.0, logit_capping_method="tanh", sliding_window_size=-1,
            is_cross_attention=False, attn_type=engine.types.DECODER, k_scale=None, v_scale=None,
            xai_temperature_len=-1,
        )  # fmt: skip
        self.layer = engine.layer(**options | layer)
        self.backend = engine.Backend(self.runner(dtype))

    def runner(self, dtype=torch.float32, **changes):
        config = SimpleNamespace(context_len=24 * self.page, is_encoder_decoder=False)
        options = dict(
            req_to_token_pool=self.slots, token_to_kv_pool=self.pool, kv_cache_dtype=dtype, page_size=self.page,
            model_config=config, device="cpu", use_mla_backend=False, attention_chunk_size=None,
            kv_index_translator=SimpleNamespace(is_translating=False),
        )  # fmt: skip
        return SimpleNamespace(**options | changes)

    def random(self, count, heads):
        return torch.randn(count, heads, HEAD_DIM, generator=self.draw)

    def append(self, request, count):
        """Return slots of new tokens, and the new tokens' keys and values."""
        new = self.random(count, HEADS_KV), self.random(count, HEADS_KV)
        old = self.rows.get(request, (self.random(0, HEADS_KV),) * 2)
        first, pages = len(old[0]), self.pages.setdefault(request, [])
        self.rows[request] = tuple(torch.cat(pair) for pair in zip(old, new))
        while len(pages) * self.page < first + count:
            pages.append(self.free.pop())
        slots = [pages[i // self.page] * self.page + i % self.page for i in range(first, first + count)]
        self.slots.req_to_token[request, first : first + count] = torch.tensor(slots, dtype=torch.int32)
        return slots, new

    def batch(self, new, mode="EXTEND", padding=0, **changes):
        """A batch of SGLang, the queries, and the new keys and values. padding: further requests with one query, of
        which the rows of the result do not matter."""
        before = [len(self.rows[request][0]) if request in self.rows else 0 for request in new]
        slots, rows = zip(*(self.append(request, count) for request, count in new.items()))
        lengths = [len(self.rows[request][0]) for request in new]
        if mode == "TARGET_VERIFY":  # SGLang's lengths do not have the drafts
            lengths = before
        made = dict(
            forward_mode=getattr(self.engine.modes, mode), seq_lens=torch.tensor(lengths + [1] * padding),
            seq_lens_cpu=torch.tensor(lengths), req_pool_indices=torch.tensor(list(new) + [0] * padding),
            out_cache_loc=torch.tensor([slot for found in slots for slot in found]), out_cache_loc_is_physical=False,
            encoder_lens=None,
            input_ids=torch.zeros(sum(new.values())), spec_info=None, extend_seq_lens=torch.tensor(list(new.values())),
            extend_seq_lens_cpu=list(new.values()), batch_size=len(new) + padding, dcp_kv_mask=None,
        )  # fmt: skip
        k, v = (torch.cat(x) for x in zip(*rows))
        return SimpleNamespace(**made | changes), self.random(sum(new.values()), HEADS), k, v

    def step(self, new, mode="EXTEND", meaning=None, prepare=None, options=None, **changes):
        """Largest error of out, and the result."""
        batch, q, k, v = self.batch(new, mode, **changes)
        (prepare or self.backend.init_forward_metadata)(batch)
        padded = torch.cat([q, torch.full((changes.get("padding", 0), HEADS, HEAD_DIM), 7.0)])
        got = self.backend.forward(padded.flatten(1), k, v, self.layer, batch, **(options or {}))
        out = got[0] if isinstance(got, tuple) else got
        return (out.view(-1, HEADS, HEAD_DIM)[: len(q)] - self.expected(new, q, meaning)[0]).abs().max(), got

    def expected(self, new, q, meaning=None):
        parts, first = [], 0
        for request, count in new.items():
            parts.append(formula(q[first : first + count], *self.rows[request], **(meaning or {})))
            first += count
        return tuple(map(torch.cat, zip(*parts)))


def test_it_has_what_sglang_calls(engine):
    contract = contracts.load("sglang")["classes"]["AttentionBackend"]
    assert not contracts.differences(contract, engine.Backend)
    for name in ("get_cuda_graph_seq_len_fill_value", "init_cuda_graph_state", "forward_extend", "forward_decode"):
        assert name in contract["methods"] and name in vars(engine.Backend), name


def test_batches_are_read_from_fields_that_sglang_has(engine, seed):
    server, read = Server(engine, seed), set()
    known = contracts.load("sglang")["classes"]["ForwardBatch"]

    class Watched:
        def __init__(self, of):
            self.of = of

        def __getattr__(self, name):
            read.add(name)
            return getattr(self.of, name)

    for mode in ("EXTEND", "DECODE"):
        batch, q, k, v = server.batch({0: 1}, mode)
        server.backend.init_forward_metadata(Watched(batch))
        server.backend.forward(q.flatten(1), k, v, server.layer, Watched(batch))
    assert len(read) > 5 and read <= {*known["fields"], *known["annotated"]}


def test_the_contract_is_that_of_the_installed_sglang():
    if not IS_INSTALLED:
        pytest.skip("SGLang is not installed")
    recorded = contract_of_sglang.recorded()
    if recorded["version"] != contracts.load("sglang")["version"]:
        pytest.skip(f"the contract is of another version than {recorded['version']}")
    assert recorded == contracts.load("sglang")


def test_the_name_is_added_once(engine):
    registry = importlib.import_module(f"{SRT}.layers.attention.attention_registry").ATTENTION_BACKENDS
    choices = importlib.import_module(f"{SRT}.arg_groups.choices").ATTENTION_BACKEND_CHOICES
    for _ in range(2):
        plugin.register()
    assert registry["fa4_kernels"] is plugin.create and choices.count("fa4_kernels") == 1
    assert isinstance(plugin.create(Server(engine, 0).runner()), engine.Backend)


@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_prompts_in_parts_then_tokens(engine, page, seed):
    server = Server(engine, seed, page)
    assert server.step({0: 17, 2: 3})[0] < 1e-5
    assert server.step({2: 20, 0: 1, 1: 5}, "MIXED")[0] < 1e-5
    assert server.step({0: 1, 1: 1, 2: 1}, "DECODE")[0] < 1e-5
    assert server.step({1: 1}, "DECODE", seq_lens_cpu=None)[0] < 1e-5


SINK = torch.linspace(-1, 1, HEADS)
LAYERS = {
    "window": (dict(sliding_window_size=4), dict(window=4), {}),
    "softcap": (dict(logit_cap=2.0), dict(softcap=2.0), {}),
    "sinks": ({}, dict(sink=SINK), dict(sinks=SINK)),
    "nothing": (dict(sliding_window_size=None), {}, dict(sinks=None, score_mod=None)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_options_of_layers(engine, name, seed):
    layer, meaning, options = LAYERS[name]
    server = Server(engine, seed, 16, **layer)
    for new, mode in (({0: 20, 1: 3}, "EXTEND"), ({0: 2, 1: 9}, "EXTEND"), ({1: 1, 0: 1}, "DECODE")):
        assert server.step(new, mode, meaning, options=options)[0] < 1e-5


@pytest.mark.parametrize("kind", ["ENCODER_ONLY", "DECODER_BIDIRECTIONAL"])
@pytest.mark.parametrize("window", [-1, 3])
def test_layers_that_are_not_causal(engine, kind, window, seed):
    server = Server(engine, seed, attn_type=getattr(engine.types, kind), sliding_window_size=window)
    meaning = dict(causal=False, window=None if window < 0 else window)
    assert server.step({0: 9, 1: 14}, meaning=meaning)[0] < 1e-5


def test_a_cache_of_8_bits(engine, seed):
    scales = torch.tensor(0.03125), torch.tensor([0.0625])
    server = Server(engine, seed, 16, torch.float8_e4m3fn, k_scale=scales[0], v_scale=scales[1])
    for new, mode in (({0: 20, 1: 3}, "EXTEND"), ({0: 1, 1: 1}, "DECODE")):
        batch, q, k, v = server.batch(new, mode)
        for request in new:  # what the cache holds
            kept = zip(server.rows[request], scales)
            server.rows[request] = tuple((x / s).to(torch.float8_e4m3fn).float() * s for x, s in kept)
        server.backend.init_forward_metadata(batch)
        got = server.backend.forward(q.flatten(1), k, v, server.layer, batch)
        assert (got.view_as(q) - server.expected(new, q)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("drafts", [2, 5, 16])
def test_drafts_are_verified(engine, drafts, seed):
    server = Server(engine, seed, 16)
    server.step({0: 20, 1: 3})
    spec = SimpleNamespace(draft_token_num=drafts, topk=1)
    assert server.step({1: drafts, 0: drafts}, "TARGET_VERIFY", spec_info=spec)[0] < 1e-5


def test_a_draft_model_is_given_what_was_accepted(engine, seed):
    """Other numbers of tokens for each request, and SGLang's notes of its drafts."""
    server = Server(engine, seed, 16)
    server.step({0: 20, 1: 3})
    for host in ([3, 1], None):
        changes = dict(spec_info=object(), extend_seq_lens_cpu=host)
        assert server.step({0: 3, 1: 1}, "DRAFT_EXTEND_V2", **changes)[0] < 1e-5


def test_graphs_read_the_same_buffers(engine, seed):
    """What a graph was captured with is where later batches of its size are written, padding included."""
    server = Server(engine, seed, 16)
    server.step({0: 20, 1: 3, 2: 40})
    backend = server.backend
    with pytest.raises(RuntimeError, match="before init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(Server(engine, seed).batch({0: 1}, "DECODE")[0])
    backend.init_cuda_graph_state(4, 64)
    spec = SimpleNamespace(draft_token_num=3, topk=1)
    addresses = {}
    steps = (
        ({0: 1, 1: 1, 2: 1}, "DECODE", {}),
        ({2: 1}, "DECODE", dict(padding=2)),
        ({0: 3, 1: 3, 2: 3}, "TARGET_VERIFY", dict(spec_info=spec)),
        ({2: 1, 0: 1}, "DECODE", dict(padding=1)),
        ({1: 3, 2: 3, 0: 3}, "TARGET_VERIFY", dict(spec_info=spec)),
    )
    for new, mode, changes in steps:
        assert server.step(new, mode, prepare=backend.init_forward_metadata_out_graph, **changes)[0] < 1e-5
        metadata = backend.forward_metadata
        tensors = metadata.query_start_loc, metadata.seq_lens, metadata.page_table
        found = tuple(x.data_ptr() for x in tensors), tuple(x.shape for x in tensors)
        found += metadata.max_query_len, metadata.max_seq_len
        assert addresses.setdefault(mode, found) == found
    assert backend.get_cuda_graph_seq_len_fill_value() == 1 and not backend.needs_cpu_seq_lens


def test_lse_is_returned(engine, seed):
    server = Server(engine, seed)
    batch, q, k, v = server.batch({0: 9, 1: 2})
    server.backend.init_forward_metadata(batch)
    out, lse = server.backend.forward(q.flatten(1), k, v, server.layer, batch, return_lse=True)
    expected = server.expected({0: 9, 1: 2}, q)
    assert out.shape == q.shape and lse.shape == q.shape[:2] and lse.is_contiguous()
    assert (out - expected[0]).abs().max() < 1e-5 and (lse - expected[1]).abs().max() < 1e-5


def test_the_output_of_the_engine_is_written(engine, seed):
    server, output = Server(engine, seed), torch.full((11, HEADS * HEAD_DIM), math.nan)
    error, got = server.step({0: 9, 1: 2}, _attn_output=output)
    assert error < 1e-5 and got.data_ptr() == output.data_ptr() and not output.isnan().any()


def test_keys_are_not_written_again(engine, seed):
    server = Server(engine, seed)
    batch, q, k, v = server.batch({0: 5})
    server.backend.init_forward_metadata(batch)
    server.backend.forward(q.flatten(1), k, v, server.layer, batch)
    before = [x.clone() for x in server.pool.buffers]
    for keys, save in (((None, None), True), ((k + 1, v + 1), False)):
        got = server.backend.forward(q.flatten(1), *keys, server.layer, batch, save_kv_cache=save)
        assert (got.view_as(q) - server.expected({0: 5}, q)[0]).abs().max() < 1e-5
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, server.pool.buffers))


SWA = SimpleNamespace(swa_kv_pool=object())
RUNNERS = {
    "use_mla_backend is True": dict(use_mla_backend=True),
    "is_encoder_decoder is True": dict(model_config=SimpleNamespace(context_len=9, is_encoder_decoder=True)),
    "attention_chunk_size is 8": dict(attention_chunk_size=8),
    "kv_index_translator is True": dict(kv_index_translator=SimpleNamespace(is_translating=True)),
    "swa_kv_pool is True.*disable-hybrid-swa-memory": dict(token_to_kv_pool=SWA),
    "kv_cache_dtype is torch.float8_e5m2": dict(kv_cache_dtype=torch.float8_e5m2),
}
BATCHES = {
    "encoder_lens is given": ("EXTEND", dict(encoder_lens=torch.ones(1))),
    "forward_mode is DLLM_EXTEND": ("DLLM_EXTEND", {}),
    "topk is 4, expected 1": ("TARGET_VERIFY", dict(spec_info=SimpleNamespace(draft_token_num=3, topk=4))),
    "ragged_verify_layout is given": (
        "TARGET_VERIFY",
        dict(spec_info=SimpleNamespace(draft_token_num=3, ragged_verify_layout=1)),
    ),
    "spec_info is given with one query": ("DECODE", dict(spec_info=object())),
}
FORWARDS = {
    "score_mod is given": (dict(score_mod=max), {}, {}),
    "is_cross_attention is True": ({}, dict(is_cross_attention=True), {}),
    "logit_capping_method is 'other'": ({}, dict(logit_cap=2.0, logit_capping_method="other"), {}),
    "xai_temperature_len is 7": ({}, dict(xai_temperature_len=7), {}),
    "dcp_kv_mask is given": ({}, {}, dict(dcp_kv_mask=torch.ones(1))),
}


@pytest.mark.parametrize("message", RUNNERS)
def test_runners_that_are_refused(engine, message):
    with pytest.raises(NotImplementedError, match=message):
        engine.Backend(Server(engine, 0).runner(**RUNNERS[message]))


@pytest.mark.parametrize("message", BATCHES)
def test_batches_that_are_refused(engine, message):
    server, (mode, changes) = Server(engine, 0), BATCHES[message]
    batch = server.batch({0: 3}, mode, **changes)[0]
    with pytest.raises(NotImplementedError, match=message):
        server.backend.init_forward_metadata(batch)


@pytest.mark.parametrize("message", FORWARDS)
def test_calls_that_are_refused(engine, message):
    options, layer, changes = FORWARDS[message]
    server = Server(engine, 0, **layer)
    batch, q, k, v = server.batch({0: 3}, **changes)
    server.backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=message):
        server.backend.forward(q.flatten(1), k, v, server.layer, batch, **options)
