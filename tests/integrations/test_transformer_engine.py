"""TransformerEngine's core attention on fa4, beside the package's parameters and the formula; it has not run there."""

import inspect

import pytest
import torch

from fa4.integrations.transformer_engine import MASKS, DotProductAttention

# Parameters of DotProductAttention, of transformer_engine/pytorch at its main of 2026-08 (2.20.0.dev0).
BUILD = (
    "num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type",
    "window_size", "bottom_right_diagonal", "sequence_parallel", "tp_size", "get_rng_state_tracker", "tp_group",
    "layer_number", "attention_type", "cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type", "softmax_scale",
    "softmax_type", "return_max_logit", "name",
)  # fmt: skip
FORWARD = (
    "query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format", "cu_seqlens_q", "cu_seqlens_kv",
    "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "attn_mask_type", "window_size",
    "bottom_right_diagonal", "checkpoint_core_attention", "core_attention_bias_type", "core_attention_bias",
    "alibi_slopes", "fast_zero_fill", "inference_params", "pad_between_seqs", "fp8_output", "bf16_backward",
    "num_splits", "score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors", "qkv_layer",
    "kv_layer", "qkv_interleave_dim",
)  # fmt: skip
BATCH, QUERIES, KEYS, HEADS, HEADS_KV, DIM = 2, 7, 9, 4, 2, 8


def rows(seed, queries=QUERIES, keys=KEYS):
    """q, k, v in float64, (batch, seqlen, heads, head_dim)."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (queries, HEADS), (keys, HEADS_KV), (keys, HEADS_KV)
    return [torch.randn(BATCH, n, h, DIM, generator=draw, dtype=torch.float64) for n, h in shapes]


def formula(q, k, v, seen, scale=DIM**-0.5, sink=None, more=0.0):
    """(batch, seqlen_q, heads * head_dim); rows that see nothing are 0."""
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 2) for x in (k, v))
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale + more).masked_fill(~seen, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    weights = scores.softmax(3).nan_to_num(0.0)[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


def assert_equal(got, expected):
    assert got.shape == expected.shape and (got - expected).abs().max() < 1e-12


def module(**arguments):
    return DotProductAttention(HEADS, DIM, HEADS_KV, qkv_format="bshd", **arguments)


def test_parameters_are_those_of_the_package():
    assert tuple(inspect.signature(DotProductAttention).parameters) == BUILD
    assert tuple(inspect.signature(DotProductAttention.forward).parameters)[1:] == FORWARD


@pytest.mark.parametrize("kind", ["no_mask", "causal", "causal_bottom_right"])
def test_masks_of_other_numbers_of_keys_than_queries(kind, seed):
    """ "causal" begins at the first key, "causal_bottom_right" ends at the last."""
    q, k, v = rows(seed)
    diagonal = {"no_mask": KEYS, "causal": 0, "causal_bottom_right": KEYS - QUERIES}[kind]
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(diagonal)
    expected = formula(q, k, v, seen)
    attention = module(attn_mask_type=kind)
    assert_equal(attention(q, k, v), expected)
    rows_first = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    assert_equal(attention(*rows_first, qkv_format="sbhd"), expected.transpose(0, 1))


@pytest.mark.parametrize("by", ["mask", "lengths"])
def test_padding(by, seed):
    """Of queries and keys, each with lengths of its own; queries that are padding get 0."""
    q, k, v = rows(seed)
    lengths = torch.tensor([[7, 4], [9, 3]], dtype=torch.int32)
    there = [torch.arange(n) < counts[:, None] for n, counts in zip((QUERIES, KEYS), lengths)]
    seen = there[0][:, None, :, None] & there[1][:, None, None]
    bounds = [torch.cat([torch.zeros(1), counts.cumsum(0)]).int() for counts in lengths]
    masked = tuple(~x[:, None, None] for x in there)
    given = dict(attention_mask=masked) if by == "mask" else dict(cu_seqlens_q=bounds[0], cu_seqlens_kv=bounds[1])
    attention = module(attn_mask_type="padding", softmax_scale=0.2)
    assert_equal(attention(q, k, v, **given), formula(q, k, v, seen, 0.2))
    offset = (lengths[1] - lengths[0]).view(-1, 1, 1, 1)
    later = torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + offset
    got = attention(q, k, v, **given, attn_mask_type="padding_causal_bottom_right")
    assert_equal(got, formula(q, k, v, seen & later, 0.2))


def test_packed_rows(seed):
    q, k, v = rows(seed, KEYS, KEYS)
    bounds = torch.tensor([0, KEYS, 2 * KEYS], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    causal = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    call = dict(cu_seqlens_q=bounds, cu_seqlens_kv=bounds, qkv_format="thd", attn_mask_type="padding_causal")
    assert_equal(module()(*flat, **call), formula(q, k, v, causal).flatten(0, 1))
    shorter = torch.tensor([0, 5, 11], dtype=torch.int32)
    call |= dict(cu_seqlens_q=shorter, cu_seqlens_kv=shorter, cu_seqlens_q_padded=bounds, cu_seqlens_kv_padded=bounds)
    got = module()(*flat, **call).unflatten(0, (BATCH, KEYS))
    for b, n in enumerate((5, 6)):
        assert_equal(got[b, :n], formula(q, k, v, causal)[b, :n])


def test_windows_arbitrary_masks_and_biases(seed):
    q, k, v = rows(seed, KEYS, KEYS)
    causal = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    attention = module(window_size=(3, 0))
    assert_equal(attention(q, k, v), formula(q, k, v, causal.triu(-3)))
    assert_equal(attention(q, k, v, window_size=(-1, 0)), formula(q, k, v, causal))
    two_sided = causal.tril(1) | torch.ones_like(causal).tril(2).triu(1)
    got = attention(q, k, v, attn_mask_type="no_mask", window_size=(3, 2))
    assert_equal(got, formula(q, k, v, two_sided.triu(-3)))
    draw = torch.Generator().manual_seed(seed)
    masked = torch.rand(BATCH, HEADS, KEYS, KEYS, generator=draw) < 0.4
    got = module()(q, k, v, masked, attn_mask_type="arbitrary")
    assert_equal(got, formula(q, k, v, ~masked))
    more = torch.randn(1, HEADS, KEYS, KEYS, generator=draw, dtype=torch.float64)
    got = module()(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=more)
    assert (got - formula(q, k, v, causal, more=more)).abs().max() < 1e-6  # scores of functions are float32


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks(kind, seed):
    attention = module(softmax_type=kind)
    assert [name for name, _ in attention.named_parameters()] == (["softmax_offset"] if kind == "learnable" else [])
    assert not attention.state_dict() or kind == "learnable"
    with torch.no_grad():
        attention.softmax_offset += torch.arange(HEADS)
    q, k, v = rows(seed, KEYS, KEYS)
    causal = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    assert_equal(attention(q, k, v), formula(q, k, v, causal, sink=attention.softmax_offset.detach()))


def test_what_fa4_has_not_is_refused():
    x = torch.zeros(1, 4, HEADS, DIM)
    for arguments, said in (
        (dict(attention_dropout=0.1), r"attention_dropout is 0\.1"),
        (dict(return_max_logit=True), "return_max_logit is set"),
        (dict(cp_group=[None, None], cp_comm_type="a2a+p2p"), r"cp_comm_type is 'a2a\+p2p'"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            module(**arguments)
    for arguments, said in (
        (dict(alibi_slopes=x), "alibi_slopes is given"),
        (dict(core_attention_bias_type="pre_scale_bias"), "core_attention_bias_type is given"),
        (dict(inference_params=object()), "inference_params is given"),
        (dict(score_mod=max), "score_mod is given"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            module()(x, x, x, **arguments)
    with pytest.raises(NotImplementedError, match="aligned at the first key"):
        module(window_size=(2, 0))(x[:, :2], x, x)
    with pytest.raises(ValueError, match="attn_mask_type is 'other', expected one of"):
        module(attn_mask_type="other")
    with pytest.raises(ValueError, match="expected it or cu_seqlens"):
        module(attn_mask_type="padding")(x, x, x)
    with pytest.raises(ValueError, match='expected both with qkv_format="thd"'):
        module(attn_mask_type="padding")(x[0], x[0], x[0], qkv_format="thd")
    assert module(attn_mask_type="causal,padding").attn_mask_type in MASKS
