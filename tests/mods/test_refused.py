"""Arguments of flex_attention, create_block_mask and dropout_mask that are refused, by their names there."""

import re

import pytest
import torch
from torch.autograd import forward_ad

import fa4

Q = torch.randn(1, 2, 12, 8)
NESTED = torch.nested.nested_tensor([Q[0], Q[0, :, :5]])


OFFSETS = torch.tensor([0, 3, 8])


def jagged(heads=2, dim=8, dtype=torch.float32, offsets=OFFSETS):
    """(2, heads, lengths, dim); of the same lengths where offsets are the same tensor."""
    return torch.nested.nested_tensor_from_jagged(torch.randn(8, heads, dim).to(dtype), offsets).transpose(1, 2)


JAGGED = jagged()
TABLE = torch.zeros(2, 5, dtype=torch.int32)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(value=Q[:, :1]), ValueError, "value has shape (1, 1, 12, 8), expected (1, 2, 12, *) to go with key"),
        (dict(key=Q[..., :4]), ValueError, "key has shape (1, 2, 12, 4), expected (1, *, *, 8) to go with query"),
        (dict(query=Q[0]), ValueError, "query has shape (2, 12, 8), expected 4 axes: (batch, heads, seqlen, head_dim)"),
        (dict(key=3), TypeError, "key is a int, expected a torch.Tensor"),
        (dict(value=Q.half()), TypeError, "value has dtype torch.float16, expected torch.float32 like query"),
        (dict(query=Q.int()), TypeError, "query has dtype torch.int32"),
        (dict(key=Q.to("meta")), ValueError, "key is on meta, expected cpu like query"),
        (dict(value=Q.transpose(2, 3).contiguous().transpose(2, 3)), ValueError, "value has stride 12 on its last"),
        (dict(key=Q[:, :1], value=Q[:, :1]), ValueError, "query has 2 heads, expected 1 like key: pass enable_gqa"),
        (dict(query=Q[:, :1], enable_gqa=True), ValueError, "query has 1 heads, expected a positive multiple of key"),
        (dict(query=NESTED), TypeError, "query is a nested tensor of layout torch.strided, expected torch.jagged"),
        (dict(value=NESTED), TypeError, "value is a nested tensor of layout torch.strided, expected torch.jagged"),
        (dict(key=Q.to_sparse()), TypeError, "key has layout torch.sparse_coo, expected torch.strided, or"),
        (dict(key=JAGGED), TypeError, "key has layout torch.jagged, expected torch.strided like query"),
        (dict(query=JAGGED, key=JAGGED), TypeError, "value has layout torch.strided, expected torch.jagged like query"),
        (dict(enable_gqa="yes"), TypeError, "enable_gqa is a str"),
        (dict(scale="a"), TypeError, "scale is a str"),
        (dict(scale=float("inf")), ValueError, "scale is inf"),
        (dict(return_lse="yes"), TypeError, "return_lse is a str"),
        (dict(return_aux=3), TypeError, "return_aux is 3, expected torch's AuxRequest"),
        (dict(kernel_options={"BLOCK_M": 64}), ValueError, "kernel_options is {'BLOCK_M': 64}, expected None or {}"),
    ],
)  # fmt: skip
def test_flex_attention_names_its_own_arguments_and_axes(call, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        fa4.flex_attention(**(dict(query=Q, key=Q, value=Q) | call))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(key=jagged(3), value=jagged(3)), ValueError, "query has 2 heads, expected 3 like key: pass enable_gqa"),
        (dict(query=jagged(4)), ValueError, "query has 4 heads, expected 2 like key: pass enable_gqa=True for groups"),
        (dict(query=jagged(3), enable_gqa=True), ValueError, "query has 3 heads, expected a positive multiple of key"),
        (dict(key=jagged(dim=7)), ValueError, "key has shape (2, 2, j"),
        (dict(value=jagged(1)), ValueError, "value has shape (2, 1, j"),
        (dict(key=jagged(dtype=torch.half)), TypeError, "key has dtype torch.float16, expected torch.float32 like"),
        (dict(value=jagged(offsets=OFFSETS.clone())), ValueError, "value has lengths of its own, expected key's"),
        (dict(query=JAGGED.transpose(1, 2)), ValueError, "query has shape (2, j"),
        (dict(enable_gqa="yes"), TypeError, "enable_gqa is a str"),
    ],
)  # fmt: skip
def test_flex_attention_names_its_own_arguments_of_nested_tensors_too(call, error, message):
    """jagged() has the lengths of JAGGED."""
    with pytest.raises(error, match="^" + re.escape(message)):
        fa4.flex_attention(**(dict(query=JAGGED, key=JAGGED, value=JAGGED) | call))


def test_flex_attention_takes_empty_options_and_dtypes_of_autocast():
    expected = fa4.flex_attention(Q, Q, Q)
    assert torch.equal(fa4.flex_attention(Q, Q, Q, kernel_options={}), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fa4.flex_attention(Q, Q.bfloat16(), Q).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(B=True), TypeError, "B is True, expected an integer"),
        (dict(B=1.5), TypeError, "B is 1.5, expected an integer"),
        (dict(H=0), ValueError, "H is 0, expected at least 1"),
        (dict(Q_LEN=5.0), TypeError, "Q_LEN is 5.0, expected an integer"),
        (dict(Q_LEN=None), TypeError, "Q_LEN is None, expected an integer"),
        (dict(KV_LEN="7"), TypeError, "KV_LEN is '7', expected an integer"),
        (dict(BLOCK_SIZE=(128,)), ValueError, "BLOCK_SIZE is (128,), expected an integer or two: (queries, keys)"),
        (dict(BLOCK_SIZE="a"), TypeError, "BLOCK_SIZE is 'a', expected an integer"),
        (dict(BLOCK_SIZE=1.5), TypeError, "BLOCK_SIZE is 1.5, expected an integer"),
        (dict(BLOCK_SIZE=None), TypeError, "BLOCK_SIZE is None, expected an integer"),
        (dict(BLOCK_SIZE=(128.0, 128.0)), TypeError, "BLOCK_SIZE is 128.0, expected an integer"),
        (dict(device="nonsense"), ValueError, "device is 'nonsense', expected one of torch's"),
        (dict(H=3), ValueError, "indexes axis 0 of a captured tensor of shape (2, 5) by h, expected at least 3"),
        (dict(Q_LEN=6), ValueError, "indexes axis 1 of a captured tensor of shape (2, 5) by q_idx, expected at least"),
        (dict(device="meta"), ValueError, "captured a tensor on cpu, expected meta like the block mask"),
        (
            dict(mask_mod=lambda b, h, q_idx, kv_idx: TABLE[h, q_idx + 1] == 0),
            IndexError,
            "a captured tensor of shape (2, 5) is read beyond its end: index 5 is out of bounds for dimension 1",
        ),
    ],
)  # fmt: skip
def test_create_block_mask_names_what_does_not_fit(call, error, message):
    given = dict(
        mask_mod=lambda b, h, q_idx, kv_idx: TABLE[h, q_idx] == 0, B=None, H=2, Q_LEN=5, KV_LEN=5, device="cpu"
    )
    with pytest.raises(error, match=re.escape(message)):
        fa4.create_block_mask(**(given | call))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(batch=-1), ValueError, "batch is -1, expected at least 0"),
        (dict(heads=1.5), TypeError, "heads is 1.5, expected an integer"),
        (dict(seqlen_q="a"), TypeError, "seqlen_q is 'a', expected an integer"),
        (dict(seqlen_k=-1), ValueError, "seqlen_k is -1, expected at least 0"),
    ],
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_dropout_mask_names_a_size_that_is_none(dropout_p, call, error, message):
    with pytest.raises(error, match=message):
        fa4.dropout_mask(dropout_p, 3, **(dict(batch=1, heads=1, seqlen_q=2, seqlen_k=2) | call))


def test_a_captured_tensors_tangent_is_refused():
    """It would be dropped without a sign, also when calls without one came before."""
    q, slopes = torch.randn(1, 12, 2, 8), torch.rand(2)
    for _ in range(2):
        fa4.flash_attn_func(q, q, q, score_mod=fa4.scores.alibi(slopes))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(slopes, torch.ones(2))
        for function in (fa4.scores.alibi(dual), lambda score, b, h, q_idx, kv_idx: score * dual[h]):
            with pytest.raises(NotImplementedError, match=r"captured a tensor of shape \(2,\) that carries a tangent"):
                fa4.flash_attn_func(q, q, q, score_mod=function)
        fa4.flash_attn_func(q, q, q, score_mod=fa4.scores.alibi(slopes))


def test_transforms_that_do_not_reach_attention_say_so():
    q = torch.randn(3, 1, 12, 2, 8)
    with pytest.raises(ValueError, match=r"torch\.vmap maps fa4 attention over 0 calls"):
        torch.vmap(lambda x: fa4.flash_attn_func(x, x, x))(q[:0])
    with pytest.raises(NotImplementedError, match=r"inside torch\.func\.functionalize"):
        torch.func.functionalize(lambda x: fa4.flash_attn_func(x, x, x))(q[0])
