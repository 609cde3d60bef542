"""Megatron's core_attention on fa4: what Megatron hands over is taken, and results are attention."""

import contextlib
import enum
import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from fa4.integrations.megatron import CoreAttention

# Names as megatron-core 0.16.1 calls: keywords of its CoreAttentionBuilder, and of the forward of its CoreAttention
# after four positions. A test in the soak runs the package itself.
BUILD = ("config", "layer_number", "attn_mask_type", "attention_type", "cp_comm_type", "softmax_scale", "pg_collection")
FORWARD = ("attn_mask_type", "attention_bias", "packed_seq_params")
PACKED = (
    "qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q",
    "max_seqlen_kv", "local_cp_size", "cp_group",
)  # fmt: skip
Mask = enum.Enum("AttnMaskType", "padding causal no_mask padding_causal arbitrary causal_bottom_right")
HEADS, HEADS_KV, HEAD_DIM, LENGTH, BATCH = 4, 2, 8, 12, 2


def config(**changes):
    """Those fields of a TransformerConfig that are looked at, with Megatron's defaults but for dropout."""
    fields = dict(
        attention_dropout=0.0, softmax_type="vanilla", window_size=None, window_attn_skip_freq=None,
        context_parallel_size=1, deterministic_mode=False, num_attention_heads=HEADS, params_dtype=torch.float64,
        use_cpu_initialization=True, perform_initialization=True, init_method=torch.nn.init.normal_, qk_clip=False,
        log_max_attention_logit=False,
    )  # fmt: skip
    return SimpleNamespace(**fields | changes)


def module(mask=Mask.causal, layer_number=1, softmax_scale=None, **changes):
    values = (config(**changes), layer_number, mask, "self", None, softmax_scale, None)
    return CoreAttention(**dict(zip(BUILD, values)))


def rows_of(seed, *shape):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, h, HEAD_DIM, generator=draw, dtype=torch.float64) for h in (HEADS, HEADS_KV, HEADS_KV)]


def formula(q, k, v, seen, scale=None, sink=None):
    """(seqlen, batch, heads, head_dim) by the definition; seen broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, *(x.repeat_interleave(HEADS // HEADS_KV, 2) for x in (k, v))))
    scores = (q @ k.mT * (HEAD_DIM**-0.5 if scale is None else scale)).masked_fill(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    return (scores.softmax(3)[..., : k.shape[2]] @ v).permute(2, 0, 1, 3).flatten(2)


def assert_equal(got, expected):
    assert got.shape == expected.shape and (got - expected).abs().max() < 1e-12


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def test_calls_of_megatron_are_taken():
    inspect.signature(CoreAttention).bind(**dict.fromkeys(BUILD))
    inspect.signature(CoreAttention.forward).bind(*[None] * 5, **dict.fromkeys(FORWARD))


@pytest.mark.parametrize("layer_number", [1, 2])
def test_causal_with_a_window_in_some_layers(layer_number, seed):
    """window_attn_skip_freq=2 leaves every second layer without one."""
    attention = module(layer_number=layer_number, softmax_scale=0.3, window_size=(4, 0), window_attn_skip_freq=2)
    q, k, v = rows_of(seed, LENGTH, BATCH)
    seen = CAUSAL.triu(-4) if layer_number == 1 else CAUSAL
    masked = ~CAUSAL[None, None]  # Megatron builds one for causal masks too
    assert_equal(attention(q, k, v, masked, attn_mask_type=Mask.causal), formula(q, k, v, seen, 0.3))


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks(kind, seed):
    torch.manual_seed(seed)
    attention = module(softmax_type=kind)
    q, k, v = rows_of(seed, LENGTH, BATCH)
    names = [name for name, _ in attention.named_parameters()]
    assert names == (["softmax_offset"] if kind == "learnable" else [])
    assert attention.softmax_offset.any() == (kind == "learnable")
    assert_equal(attention(q, k, v, None), formula(q, k, v, CAUSAL, sink=attention.softmax_offset))


@pytest.mark.parametrize("rows", [1, LENGTH], ids=["keys", "pairs"])
def test_masks_are_true_where_nothing_is_seen(rows, seed):
    attention = module(Mask.padding)
    q, k, v = rows_of(seed, LENGTH, BATCH)
    masked = torch.rand(BATCH, 1, rows, LENGTH, generator=torch.Generator().manual_seed(seed)) < 0.4
    masked[..., 0] = False  # each query sees a key
    assert_equal(attention(q, k, v, masked), formula(q, k, v, ~masked))
    got = attention(q, k, v, masked, attn_mask_type=Mask.padding_causal)
    assert_equal(got, formula(q, k, v, ~masked & CAUSAL))


def test_packed_sequences_with_and_without_padding_between(seed):
    """7 and 5 rows behind one another, and the same at rows 0 and 8."""
    q, k, v = rows_of(seed, 12)
    whole = torch.tensor([0, 7, 12], dtype=torch.int32)
    parts = [formula(*(x[a:b, None] for x in (q, k, v)), CAUSAL[: b - a, : b - a])[:, 0] for a, b in ((0, 7), (7, 12))]
    packed = SimpleNamespace(**dict.fromkeys(PACKED) | dict(cu_seqlens_q=whole, cu_seqlens_kv=whole))
    attention = module(Mask.padding_causal)
    assert_equal(attention(q, k, v, None, packed_seq_params=packed), torch.cat(parts))
    padded = torch.tensor([0, 8, 14], dtype=torch.int32)
    place = torch.cat([torch.arange(7), torch.arange(8, 13)])
    packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = padded
    wide = [torch.full((14, *x.shape[1:]), 9.0, dtype=x.dtype).index_copy(0, place, x) for x in (q, k, v)]
    assert_equal(attention(*wide, None, packed_seq_params=packed)[place], torch.cat(parts))


def test_what_fa4_has_not_is_refused():
    x = torch.zeros(4, 1, 2, 8)
    for changes, said in (
        (dict(attention_dropout=0.1), r"attention dropout is 0\.1"),
        (dict(qk_clip=True), r"config\.qk_clip"),
        (dict(softmax_type="other"), "softmax_type is 'other'"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            module(**changes)
    with pytest.raises(NotImplementedError, match="attention_bias is given"):
        module()(x, x, x, None, attention_bias=x)
    with pytest.raises(NotImplementedError, match="other numbers of keys than queries"):
        module()(x[:1], x, x, None)
    with pytest.raises(NotImplementedError, match="cp_comm_type is 'a2a', expected one of"):
        CoreAttention(config(context_parallel_size=2), 1, Mask.causal, "self", cp_comm_type="a2a")
    with pytest.raises(ValueError, match="pg_collection has no cp"):
        CoreAttention(config(context_parallel_size=2), 1, Mask.causal, "self")


@pytest.fixture
def megatron(tmp_path, monkeypatch):
    """Megatron Core on one process without a GPU, which its own attention asks for a buffer and random numbers."""
    core = pytest.importorskip("megatron.core", reason="the package itself")
    parallel_state, tensor_parallel = core.parallel_state, core.tensor_parallel
    buffer = SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(parallel_state, "get_global_memory_buffer", lambda: buffer)
    monkeypatch.setattr(
        tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=contextlib.nullcontext), raising=True
    )
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield core
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.soak
def test_a_gpt_of_megatron_is_as_with_its_own_attention(megatron, seed):
    """Logits and all gradients, of two layers with grouped queries. `pip install megatron-core`, which no extra has."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    def run(core_attention):
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, use_cpu_initialization=True,
            attention_dropout=0.0, hidden_dropout=0.0,
        )  # fmt: skip
        spec = get_gpt_layer_local_spec()
        if core_attention is not None:
            spec.submodules.self_attention.submodules.core_attention = core_attention
        model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=32)
        tokens = torch.randint(64, (2, 16))
        logits = model(tokens, torch.arange(16).expand(2, -1), ~torch.ones(1, 1, 16, 16, dtype=torch.bool).tril())
        logits.square().mean().backward()
        return [logits, *(p.grad for p in model.parameters() if p.grad is not None)]

    for ours, theirs in zip(run(CoreAttention), run(None), strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * max(1, theirs.abs().max())
