"""Errors of the indexer's functions name the argument, what came and what was expected."""

import pytest
import torch

import fa4

Q, K, W = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 16), torch.randn(2, 5, 4)
E4M3 = torch.float8_e4m3fn
CU_Q, CU_K = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 9, 18], dtype=torch.int32)
PACKED = dict(q=Q.flatten(0, 1), k=K.flatten(0, 1), weights=W.flatten(0, 1), cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)
TABLE, USED = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([9, 4], dtype=torch.int32)
LOW = dict(q=Q.to(E4M3), k=K.to(E4M3))

ERRORS = {
    "q_a_list": (TypeError, "q is a list, expected a torch.Tensor", dict(q=[1.0])),
    "q_of_three_axes": (ValueError, r"q has shape \(5, 4, 16\), expected \(batch, seqlen_q, heads, head", dict(q=Q[0])),
    "q_of_integers": (TypeError, "q has dtype torch.int32, expected bfloat16, float16", dict(q=Q.int())),
    "k_of_another_dtype": (TypeError, "k has dtype torch.float16, expected torch.float32 like q", dict(k=K.half())),
    "k_with_heads": (ValueError, r"k has shape \(2, 9, 1, 16\), expected \(batch, seqlen_k, h", dict(k=K[:, :, None])),
    "k_of_another_batch": (ValueError, r"k has shape \(1, 9, 16\), expected \(2, \*, 16\)", dict(k=K[:1])),
    "k_of_another_width": (ValueError, "k has head_dim 8, expected 16 like q", dict(k=K[..., :8].contiguous())),
    "strided_columns": (ValueError, "q has stride 2 on its last axis", dict(q=torch.randn(2, 5, 4, 32)[..., ::2])),
    "weights_of_another_shape": (
        ValueError,
        r"weights has shape \(2, 5, 3\), expected \(2, 5, 4\)",
        dict(weights=W[..., :3]),
    ),
    "weights_of_bfloat16": (
        TypeError,
        "weights has dtype torch.bfloat16, expected float32",
        dict(weights=W.bfloat16()),
    ),
    "causal_a_word": (TypeError, "causal is a str, expected a bool", dict(causal="yes")),
    "unknown_backend": (ValueError, "backend is 'cuda', expected one of 'auto'", dict(backend="cuda")),
    "cu_seqlens_q_alone": (ValueError, "cu_seqlens_q is given without cu_seqlens_k", dict(cu_seqlens_q=CU_Q)),
    "cu_seqlens_k_alone": (ValueError, "cu_seqlens_k is given without cu_seqlens_q", dict(cu_seqlens_k=CU_K)),
    "max_seqlen_q_alone": (ValueError, "max_seqlen_q is given without cu_seqlens_q", dict(max_seqlen_q=5)),
    "max_seqlen_k_alone": (ValueError, "max_seqlen_k is given without cu_seqlens_k or", dict(max_seqlen_k=9)),
    "short_max_seqlen_q": (ValueError, "max_seqlen_q is 4, expected at least 5", PACKED | dict(max_seqlen_q=4)),
    "short_max_seqlen_k": (ValueError, "max_seqlen_k is 8, expected at least 9", PACKED | dict(max_seqlen_k=8)),
    "cu_seqlens_k_of_another_batch": (
        ValueError,
        r"cu_seqlens_k has shape \(2\), expected \(3,\)",
        PACKED | dict(cu_seqlens_k=CU_K[:2]),
    ),
    "cu_seqlens_falls": (
        ValueError,
        r"cu_seqlens_k is \[18, 9, 0\], expected 0 first",
        PACKED | dict(cu_seqlens_k=CU_K.flip(0)),
    ),
    "too_many_used": (
        ValueError,
        r"seqused_k is \[10, 0\], expected 0 to",
        dict(seqused_k=torch.tensor([10, 0]).int()),
    ),
    "pages_without_lengths": (ValueError, "seqused_k is None with page_table", dict(page_table=TABLE)),
    "pages_and_cu_seqlens_k": (
        ValueError,
        "cu_seqlens_k is given with page_table",
        dict(page_table=TABLE, cu_seqlens_k=CU_K),
    ),
    "pages_of_int64": (TypeError, "page_table has dtype torch.int64", dict(page_table=TABLE.long(), seqused_k=USED)),
    "pages_of_another_batch": (
        ValueError,
        r"page_table has shape \(1, 1\), expected \(2, pages",
        dict(page_table=TABLE[:1], seqused_k=USED),
    ),
    "no_such_page": (ValueError, "page_table has page 2, expected 0 to 1", dict(page_table=TABLE + 1, seqused_k=USED)),
    "more_than_pages_hold": (
        ValueError,
        r"seqused_k is \[10, 4\], expected 0 to",
        dict(page_table=TABLE, seqused_k=torch.tensor([10, 4]).int()),
    ),
    "scale_of_float32_q": (
        ValueError,
        "q_descale is given with q of dtype torch.float32",
        dict(q_descale=torch.ones(1)),
    ),
    "scale_of_another_shape": (
        ValueError,
        r"k_descale has shape \(9\), expected one element or \(2, 9\)",
        LOW | dict(k_descale=torch.ones(9)),
    ),
    "scale_of_bfloat16": (
        TypeError,
        "q_descale has dtype torch.bfloat16",
        LOW | dict(q_descale=torch.ones(1).bfloat16()),
    ),
    "trained_scale": (
        NotImplementedError,
        "q_descale requires grad",
        LOW | dict(q_descale=torch.ones(1).requires_grad_()),
    ),
    "gradients_of_e4m3": (
        NotImplementedError,
        "weights requires grad, and e4m3",
        LOW | dict(weights=W.clone().requires_grad_()),
    ),
    "gradients_of_pages": (
        NotImplementedError,
        "q requires grad, and a call with page_table",
        dict(q=Q.clone().requires_grad_(), page_table=TABLE, seqused_k=USED),
    ),
}


@pytest.mark.parametrize("error, text, changes", ERRORS.values(), ids=ERRORS)
def test_of_scores(error, text, changes):
    with pytest.raises(error, match=text):
        fa4.indexer_scores(**(dict(q=Q, k=K, weights=W) | changes))


TOPK_ERRORS = {
    "negative": (ValueError, "topk is -1, expected 0 or more", dict(topk=-1)),
    "a_float": (TypeError, "topk is a float, expected an int", dict(topk=2.0)),
    "return_scores_a_number": (TypeError, "return_scores is a int, expected a bool", dict(return_scores=1)),
    "scores_with_gradients": (
        NotImplementedError,
        "return_scores is True with tensors",
        dict(q=Q.clone().requires_grad_(), return_scores=True),
    ),
    "no_list": (TypeError, "k is a list", dict(k=[1.0])),
}


@pytest.mark.parametrize("error, text, changes", TOPK_ERRORS.values(), ids=TOPK_ERRORS)
def test_of_topk(error, text, changes):
    with pytest.raises(error, match=text):
        fa4.indexer_topk(**(dict(q=Q, k=K, weights=W, topk=3) | changes))


def test_indices_have_no_gradients():
    assert not fa4.indexer_topk(Q.clone().requires_grad_(), K, W, 3).requires_grad


ATTN = dict(attn_q=torch.randn(2, 5, 4, 8), attn_k=torch.randn(2, 9, 2, 8), attn_lse=torch.zeros(2, 4, 5))
INDICES = torch.zeros(2, 5, 1, dtype=torch.int32)
LOSS_ERRORS = {
    "reduction": (ValueError, "reduction is 'max', expected 'mean', 'sum' or 'none'", dict(reduction="max")),
    "e4m3": (TypeError, "q has dtype torch.float8_e4m3fn, expected float16", LOW),
    "attn_q_of_other_rows": (
        ValueError,
        r"attn_q has shape \(2, 4, 4, 8\), expected \(2, 5, heads, dim\)",
        dict(attn_q=ATTN["attn_q"][:, :4]),
    ),
    "attn_k_of_other_rows": (
        ValueError,
        r"attn_k has shape \(2, 8, 2, 8\), expected \(2, 9, heads, dim\)",
        dict(attn_k=ATTN["attn_k"][:, :8]),
    ),
    "attn_k_of_another_dtype": (TypeError, "attn_k has dtype torch.float16", dict(attn_k=ATTN["attn_k"].half())),
    "attn_k_of_another_width": (
        ValueError,
        "attn_k has dim 4, expected 8 like attn_q",
        dict(attn_k=ATTN["attn_k"][..., :4]),
    ),
    "heads_do_not_divide": (
        ValueError,
        "attn_q has 3 heads, expected a positive multiple",
        dict(attn_q=ATTN["attn_q"][:, :, :3]),
    ),
    "lse_of_another_shape": (
        ValueError,
        r"attn_lse has shape \(2, 5, 4\), expected \(2, 4, 5\)",
        dict(attn_lse=ATTN["attn_lse"].mT),
    ),
    "lse_of_half": (TypeError, "attn_lse has dtype torch.float16", dict(attn_lse=ATTN["attn_lse"].half())),
    "indices_of_int64": (TypeError, "indices has dtype torch.int64", dict(indices=INDICES.long())),
    "indices_of_other_rows": (
        ValueError,
        r"indices has shape \(2, 4, 1\), expected \(2, 5, topk\)",
        dict(indices=INDICES[:, :4]),
    ),
    "scale_a_tensor": (TypeError, "softmax_scale is a Tensor", dict(softmax_scale=torch.ones(()))),
    "backend_without_a_loss": (fa4.NoBackend, "backend 'sm90' lacks a loss of the indexer", dict(backend="sm90")),
}


@pytest.mark.parametrize("error, text, changes", LOSS_ERRORS.values(), ids=LOSS_ERRORS)
def test_of_the_loss(error, text, changes):
    with pytest.raises(error, match=text):
        fa4.indexer_loss(**(dict(q=Q, k=K, weights=W) | ATTN | changes))
