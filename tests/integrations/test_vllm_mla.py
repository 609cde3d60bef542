"""fa4 as vLLM's backend of latent attention, beside stubs that are held to its checked-in contract."""

import functools
import inspect
import math
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from fa4.emulator import emulate
from fa4.integrations import vllm as plugin
from tests.integrations import contracts
from tests.integrations.contracts import vllm as contract_of_vllm
from tests.integrations.vllm_mla import DECODER, Registered, modules

LATENT, ROPE = 512, 64
COLUMNS = LATENT + ROPE
SCALE = 192**-0.5  # of the head dim before absorption
OURS = tuple(f"fa4.integrations.vllm.{name}" for name in ("backend", "mla", "prefill"))


def resolved(path):
    """The class at a path, as vLLM looks it up."""
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)


@pytest.fixture
def install(monkeypatch):
    """Put stubs in the place of vLLM and register fa4 with them."""

    def installed(has_prefill=True):
        registered = Registered(model=SimpleNamespace(use_mla=True))
        for module in modules(registered, has_prefill):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        plugin.register()
        return registered

    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for found in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, found)
    yield installed
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.fixture
def backend(install):
    return resolved(install().attention["path"])


@pytest.fixture
def prefill(install):
    return resolved(install().prefill["path"])


def layer(backend, heads, **changes):
    options = dict(
        num_heads=heads, head_size=COLUMNS, scale=SCALE, num_kv_heads=1, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type=DECODER, kv_sharing_target_layer_name=None,
    )  # fmt: skip
    return backend.get_impl_cls()(*(options | changes).values(), kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)


def formula(q, rows):
    """out (queries, heads, 512) and lse (queries, heads) in float64 of one sequence; the queries are its last rows."""
    q, rows = q.double(), rows.double()
    scores = torch.einsum("qhd,kd->qhk", q, rows) * SCALE
    hidden = torch.arange(len(rows)) > (torch.arange(len(q)) + len(rows) - len(q))[:, None]
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    return torch.einsum("qhk,kd->qhd", scores.softmax(-1), rows[:, :LATENT]), scores.logsumexp(-1)


class Server:
    """Requests on one paged cache. Pages without an owner and rows past the end of a sequence are NaN, and entries of
    the table past the rows in use are no page's number."""

    def __init__(self, backend, seed, heads, page, dtype, speculative=0, scale=None):
        """scale: factor of a cache of e4m3 rows; None for one of `dtype`."""
        self.draw = torch.Generator().manual_seed(seed)
        self.heads, self.page, self.dtype = heads, page, dtype
        of_cache = dtype if scale is None else torch.float8_e4m3fn
        self.cache = torch.full((24, 2, page, COLUMNS), math.nan).to(of_cache)[:, 1]  # of the second of two layers
        self.scale = scale
        self.free = torch.randperm(24, generator=self.draw).tolist()
        self.requests = {}  # of each name, its pages and its rows
        self.attention = layer(backend, heads, kv_cache_dtype="auto" if scale is None else "fp8")
        config = SimpleNamespace(num_speculative_tokens=speculative)
        self.builder = backend.get_builder_cls()(None, ["layer"], config, torch.device("cpu"))

    def random(self, *shape):
        return torch.randn(*shape, generator=self.draw).to(self.dtype)

    def append(self, name, count):
        pages, rows = self.requests.get(name, ([], self.random(0, COLUMNS)))
        rows = torch.cat([rows, self.random(count, COLUMNS)])
        while len(pages) * self.page < len(rows):
            pages = [*pages, self.free.pop()]
        for i in range(len(rows) - count, len(rows)):
            stored = rows[i] if self.scale is None else (rows[i] / self.scale).to(torch.float8_e4m3fn)
            self.cache[pages[i // self.page], i % self.page] = stored
            rows[i] = stored if self.scale is None else stored.to(self.dtype) * self.scale
        self.requests[name] = pages, rows

    def step(self, new, joined=False, padding=0):
        """Append new[name] rows to each request, and attend. Returns what came and what is right.

        joined: latent and rotated columns of q come as one tensor. padding: sequences without rows at the end, as in a
        CUDA graph of a larger batch.
        """
        for name, count in new.items():
            self.append(name, count)
        batch = [self.requests[name] for name in new]
        starts = torch.tensor([0, *new.values(), *[0] * padding], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        table = torch.full((len(starts) - 1, 12), 1 << 20, dtype=torch.int32)
        for row, (pages, _) in zip(table, batch):
            row[: len(pages)] = torch.tensor(pages)
        lengths = torch.tensor([len(rows) for _, rows in batch] + [0] * padding, dtype=torch.int32)
        common = SimpleNamespace(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, block_table_tensor=table,
            max_query_len=max(new.values()), max_seq_len=12 * self.page, causal=True,
        )  # fmt: skip
        metadata = self.builder.build(0, common)
        assert metadata.num_decodes == len(starts) - 1 and metadata.num_prefills == 0
        q = self.random(int(starts[-1]), self.heads, COLUMNS)
        given = q if joined else (q[..., :LATENT].contiguous(), q[..., LATENT:])
        scales = None if self.scale is None else SimpleNamespace(_k_scale=torch.tensor(self.scale))
        got = self.attention.forward_mqa(given, self.cache, metadata, scales)
        right = [formula(q[a:b], rows) for a, b, (_, rows) in zip(starts.tolist(), starts[1:].tolist(), batch)]
        return got, tuple(map(torch.cat, zip(*right)))


def assert_close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert (got.double() - expected).abs().max() < tolerance


def test_it_has_what_vllm_calls(backend, prefill):
    classes = {"prefill.MlaPrefill": prefill, "mla.MlaBackend": backend}
    classes |= {f"mla.{cls.__name__}": cls for cls in (backend.get_impl_cls(), backend.get_builder_cls())}
    contract = contracts.load("vllm")
    for name, cls in classes.items():
        for base in contract_of_vllm.OURS[name]:
            assert not contracts.differences(contract["classes"][base], cls), name


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [16, 128])
def test_requests_come_and_go(backend, heads, page, seed):
    """Each step with another batch: prompts shorter than the queries of a speculative step, tokens one by one, several
    rows of a sequence, other numbers of them in one batch."""
    server = Server(backend, seed, heads, page, torch.float32, speculative=3)
    steps = (dict(a=4, b=2), dict(b=1, a=1, c=3), dict(c=4, a=1), dict(d=1), dict(a=3, c=3, d=3), dict(b=4))
    server.append("a", 2 * page + 5)
    server.append("c", page)
    for i, new in enumerate(steps):
        (out, lse), (expected, _) = server.step(new, joined=i % 2 == 1, padding=i % 3)
        assert_close(out, expected, 1e-4)
        assert lse is None


def test_a_cache_of_8_bits(backend, seed):
    server = Server(backend, seed, 16, 32, torch.float32, speculative=3, scale=0.03125)
    assert server.attention.supports_quant_query_input is False
    for new in (dict(a=4, b=2), dict(b=1, a=1), dict(a=3, b=4)):
        (out, _), (expected, _) = server.step(new)
        assert_close(out, expected, 1e-4)


def test_metadata_of_drafts_is_vllms_own(backend):
    made = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    assert made.supports_draft_decode_metadata_update and made.update_draft_decode_metadata(None) is None


@pytest.mark.rotates(4)
@pytest.mark.parametrize(
    ("heads", "page", "new"),
    [
        (16, 16, dict(a=1, b=1, c=1)),
        (16, 32, dict(a=2, b=2)),
        (128, 64, dict(a=1, b=1)),
        (16, 128, dict(a=1, b=3, c=2)),
    ],
    ids=str,
)
def test_on_an_emulated_hopper(backend, heads, page, new, seed, monkeypatch):
    """The kernel of latents takes the calls of vLLM. Two steps, the second with other lengths and requests."""
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")
    from fa4.integrations.vllm import mla

    monkeypatch.setattr(mla, "flash_attn_with_kvcache", functools.partial(mla.flash_attn_with_kvcache, backend="sm90"))
    monkeypatch.setattr(backend.get_impl_cls(), "dcp_world_size", 2)
    server = Server(backend, seed, heads, page, torch.bfloat16, speculative=2)
    for name, rows in (("a", 70), ("b", 3), ("c", 128)):
        server.append(name, rows)
    with emulate("sm_90a", sms=4, seed=seed, schedule="random"):
        for names in (tuple(new), tuple(new)[1:]):
            (out, lse), (expected, expected_lse) = server.step({name: new[name] for name in names})
            assert_close(out, expected, 0.03)
            assert_close(lse, expected_lse, 1e-3)


def test_ranks_of_a_context(backend, seed, monkeypatch):
    """Decode context parallelism: each rank has every second row of a sequence, or none. vLLM combines by lse."""
    monkeypatch.setattr(backend.get_impl_cls(), "dcp_world_size", 2)
    attention = layer(backend, 16)
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, COLUMNS, generator=draw) for n in (37, 1)]
    q = torch.randn(2, 16, COLUMNS, generator=draw)
    parts = []
    for rank in range(2):
        local = [r[rank::2] for r in rows]
        cache, table = torch.full((4, 16, COLUMNS), math.nan), torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
        for pages, kept in zip(table.tolist(), local):
            for i, row in enumerate(kept):
                cache[pages[i // 16], i % 16] = row
        common = SimpleNamespace(
            query_start_loc=torch.arange(3, dtype=torch.int32), query_start_loc_cpu=torch.arange(3),
            seq_lens=torch.tensor([len(r) for r in local], dtype=torch.int32), block_table_tensor=table,
            max_query_len=1, max_seq_len=32, causal=True,
        )  # fmt: skip
        metadata = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu")).build(0, common)
        parts.append(attention.forward_mqa(q, cache, metadata, None))
    assert all(out.shape == (2, 16, LATENT) and lse.shape == (2, 16) for out, lse in parts)
    assert (parts[1][1][1] == -math.inf).all() and not parts[1][0][1].any()  # a rank without rows of the sequence
    weights = torch.stack([lse for _, lse in parts]).double().softmax(0)
    combined = sum(w[..., None] * out for w, (out, _) in zip(weights, parts))
    assert_close(combined, torch.cat([formula(q[i : i + 1], rows[i])[0] for i in range(2)]), 1e-4)


def test_batch_invariance_is_asked_for(backend, monkeypatch):
    from fa4.integrations.vllm import mla

    seen = []
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    called = mla.flash_attn_with_kvcache
    monkeypatch.setattr(
        mla, "flash_attn_with_kvcache", lambda *args, **kw: seen.append(kw["batch_invariant"]) or called(*args, **kw)
    )
    Server(backend, 0, 16, 16, torch.float32).step(dict(a=1))
    assert seen == [True] and backend.supports_batch_invariance()


WIDTHS, LENGTHS, CONTEXTS = (24, 16), (5, 1, 9), (20, 0, 7)


@pytest.mark.parametrize("given", [False, True], ids=["returned", "given"])
def test_a_prompt_in_parts(prefill, given, seed):
    """Prompts on a cached context: the new tokens, then the context in two parts, merged by lse as vLLM does.

    given: the output is written in place.
    """
    draw = torch.Generator().manual_seed(seed)
    heads, (wide, narrow) = 4, WIDTHS
    attention = prefill(heads, SCALE)
    assert attention.supports_out()
    q = torch.randn(sum(LENGTHS), heads, wide, generator=draw)
    keys = [torch.randn(n + c, heads, wide + narrow, generator=draw) for n, c in zip(LENGTHS, CONTEXTS)]

    def sums(counts):
        return torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)

    def room():
        return torch.full((len(q), heads, narrow), math.nan) if given else None

    starts = sums(LENGTHS)
    attention.prepare_metadata(SimpleNamespace(query_start_loc=starts, max_query_len=max(LENGTHS)))
    out = room()
    k, v = torch.cat([x[c:] for x, c in zip(keys, CONTEXTS)]).split(WIDTHS, -1)
    parts = [attention.run_prefill_new_tokens(q, k, v, True, out=out)]
    assert not given or parts[0][0] is out
    alone = attention.run_prefill_new_tokens(q, k, v, False)
    assert torch.equal(alone, parts[0][0])
    for begin, end in ((0, 8), (8, 32)):
        counts = [max(0, min(c, end) - begin) for c in CONTEXTS]
        k, v = torch.cat([x[begin : begin + n] for x, n in zip(keys, counts)]).split(WIDTHS, -1)
        chunk = SimpleNamespace(
            query_start_loc=starts, cu_seq_lens=sums(counts), max_query_len=max(LENGTHS), max_seq_len=max(counts)
        )
        out = room()
        parts.append(attention.run_prefill_context_chunk(chunk, q, k, v, out=out))
        assert not given or parts[-1][0] is out
    assert all(lse.shape == (heads, len(q)) for _, lse in parts)
    weights = torch.stack([lse.T for _, lse in parts]).double().softmax(0)
    merged = sum(w[..., None] * part for w, (part, _) in zip(weights, parts))
    for i, rows in enumerate(keys):
        a, b = starts[i : i + 2].tolist()
        k, v = rows.double().split(WIDTHS, -1)
        scores = torch.einsum("qhd,khd->hqk", q[a:b].double(), k) * SCALE
        hidden = torch.arange(len(k)) > (torch.arange(b - a) + CONTEXTS[i])[:, None]
        right = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        assert_close(merged[a:b], right, 1e-5)


def test_prompts_of_deepseek_on_an_emulated_hopper(prefill, seed):
    """Head dims (192, 128), values as a view of what the projection returns, and a causal part with lse."""
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(50, 2, 192, generator=draw).bfloat16()
    k = torch.randn(50, 2, 192, generator=draw).bfloat16()
    v = torch.randn(50, 2, 256, generator=draw).bfloat16()[..., 128:]
    attention = prefill(2, SCALE)
    starts = torch.tensor([0, 20, 50], dtype=torch.int32)
    attention.prepare_metadata(SimpleNamespace(query_start_loc=starts, max_query_len=30))
    with emulate("sm_90a", sms=4, seed=seed, schedule="random"):
        out, lse = attention.run_prefill_new_tokens(q, k, v, True)
    for a, b in ((0, 20), (20, 50)):
        scores = torch.einsum("qhd,khd->hqk", q[a:b].double(), k[a:b].double()) * SCALE
        scores = scores.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -math.inf)
        assert_close(out[a:b], torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[a:b].double()), 0.03)
        assert_close(lse[:, a:b], scores.logsumexp(-1), 1e-3)


def test_one_name_serves_models_of_both_kinds(install):
    registered = install()
    path = registered.attention["path"]
    assert path == "fa4.integrations.vllm.Backend" and resolved(path).is_mla()
    registered.model.use_mla = False
    assert resolved(path) is resolved("fa4.integrations.vllm.backend.Backend")
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        resolved("fa4.integrations.vllm.Other")


def test_another_prefill_backend_keeps_the_name(install):
    registered = install()
    assert registered.prefill["path"] == "fa4.integrations.vllm.prefill.MlaPrefill"
    registered.prefill["path"] = "somebody.else"
    plugin.register()
    assert registered.prefill["path"] == "somebody.else"


def test_without_a_choice_of_prefill_backends(install, monkeypatch):
    registered = install(has_prefill=False)
    assert not registered.prefill and resolved(registered.attention["path"]).is_mla()


def supported(cls, major, minor):
    return cls.supports_compute_capability(SimpleNamespace(major=major, minor=minor))


def test_what_vllm_is_told(backend, prefill):
    assert backend.get_name() == prefill.get_name() == "CUSTOM" and backend.is_mla()
    assert backend.supports_head_size(576) and not backend.supports_head_size(320)
    assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [16]
    assert backend.supported_kv_cache_dtypes == ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    assert backend.get_builder_cls()._cudagraph_support.name == "UNIFORM_BATCH"
    impl = backend.get_impl_cls()
    assert impl.supports_dcp and impl.can_return_lse_for_decode and not impl.supports_pcp
    combination = dict.fromkeys(inspect.signature(backend.supports_combination).parameters)
    combination |= dict(dtype=torch.bfloat16)
    for dtype in (None, "auto", "bfloat16", "fp8"):
        assert backend.supports_combination(**combination | dict(kv_cache_dtype=dtype)) is None
    reason = backend.supports_combination(**combination | dict(kv_cache_dtype="float16"))
    assert reason == "kv_cache_dtype is 'float16', expected the model's torch.bfloat16, or 'auto'"
    sizes = (((128, 64), 128), True), (((192, 64), 256), True), (((256, 64), 256), False), (((128, 64), 130), False)
    for ((nope, rope), wide), expected in sizes:
        of = SimpleNamespace(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=wide)
        assert prefill.supports_mla_dimensions(of) is expected
    assert not prefill.supports_compute_capability(None)


def test_gpus_are_those_with_a_kernel(backend, prefill):
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    for cls in (backend, prefill):
        assert all(supported(cls, *chip) for chip in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)))
        assert not any(supported(cls, *chip) for chip in ((7, 5), (11, 0), (13, 0)))


REFUSED = {
    "e5m2": (dict(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype is 'fp8_e5m2', expected one of"),
    "window": (dict(sliding_window=128), "sliding_window is 128, expected None"),
    "softcap": (dict(logits_soft_cap=30.0), "logits_soft_cap is 30.0, expected None"),
    "slopes": (dict(alibi_slopes=[0.5]), r"alibi_slopes is \[0.5\], expected None"),
    "encoder": (dict(attn_type="encoder_only"), "attn_type is 'encoder_only', expected a decoder's own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(backend, name):
    change, text = REFUSED[name]
    with pytest.raises(NotImplementedError, match=text):
        layer(backend, 16, **change)


def test_a_quantized_output_is_refused(prefill):
    x = torch.ones(2, 4, 16)
    with pytest.raises(NotImplementedError, match="a quantized output is asked for"):
        prefill(4, SCALE).run_prefill_new_tokens(x, x, x, False, output_scale=x)
