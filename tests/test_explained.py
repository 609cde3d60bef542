"""What explain refuses, what it says of waits between CTAs, and the layout that fa4 warns of."""

import re
import warnings

import pytest
import torch

import fa4
from fa4.runtime.device import chip_by_number, emulating

Q, K = torch.randn(2, 7, 4, 16), torch.randn(2, 9, 2, 16)
PACKED = {"q": Q[0], "k": K[0], "v": K[0]}


def a_cache(heads, head_dim=16, rows=32):
    return torch.randn(2, rows, heads, head_dim)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


ON_A_CACHE = {
    "splits_below_0": (ValueError, "num_splits is -1, expected 0 or more", dict(num_splits=-1)),
    "splits_a_word": (TypeError, "num_splits is a str", dict(num_splits="2")),
    "invariant_a_word": (TypeError, "batch_invariant is a str, expected a bool", dict(batch_invariant="x")),
    "heads": (ValueError, "q has 4 heads, expected a positive multiple of k's 3", dict(k=a_cache(3), v=a_cache(3))),
    "head_dim": (ValueError, r"k has shape \(2, 32, 2, 24\), expected \(\*, \*, \*, 16\)", dict(k=a_cache(2, 24))),
    "rows_of_v": (ValueError, r"v has shape \(2, 9, 2, 16\), expected \(2, 32, 2, \*\)", dict(v=a_cache(2, 16, 9))),
    "table_a_number": (TypeError, "page_table is a int, expected a torch.Tensor", dict(page_table=3)),
    "table_int64": (TypeError, "page_table has dtype torch.int64", dict(page_table=torch.zeros(2, 3).long())),
    "index_a_number": (TypeError, "cache_batch_idx is a int", dict(cache_batch_idx=7)),
    "lengths_a_word": (TypeError, "cache_seqlens is a str", dict(cache_seqlens="3")),
    "lengths_beyond_it": (ValueError, "cache_seqlens is 33, expected 0 to the 32 rows", dict(cache_seqlens=33)),
    "cu_seqlens_a_number": (TypeError, "cu_seqlens_q is a int", dict(q=Q[0], cu_seqlens_q=3)),
}
ELSEWHERE = {
    "cu_seqlens_a_number": (TypeError, "cu_seqlens_q is a int", PACKED | dict(cu_seqlens_q=3)),
    "other_cu_seqlens": (
        ValueError,
        r"cu_seqlens_k has shape \(3\), expected \(2,\)",
        PACKED | dict(cu_seqlens_q=i32(0, 7), cu_seqlens_k=i32(0, 4, 9)),
    ),
    "cu_seqlens_of_padded": (ValueError, "cu_seqlens_q is given with q of shape", dict(cu_seqlens_q=i32(0, 7))),
    "seqused_float": (TypeError, "seqused_k has dtype torch.float32", dict(seqused_k=torch.ones(2))),
    "seqused_of_another_batch": (ValueError, r"seqused_q has shape \(3\)", dict(seqused_q=i32(1, 1, 1))),
    "a_cache_without_a_table": (TypeError, "cache_seqlens is a str", dict(cache_seqlens="3")),
    "splits": (ValueError, "num_splits is -1", dict(num_splits=-1)),
}


@pytest.mark.parametrize("error, message, change", ON_A_CACHE.values(), ids=ON_A_CACHE)
def test_explain_refuses_what_a_call_on_a_cache_refuses(error, message, change):
    arguments = {"q": Q, "k": a_cache(2), "v": a_cache(2), "cache_leftpad": i32(0, 0)} | change
    with pytest.raises(error, match=message):
        fa4.explain(**arguments)


@pytest.mark.parametrize("error, message, change", ELSEWHERE.values(), ids=ELSEWHERE)
def test_explain_refuses_what_other_calls_refuse(error, message, change):
    arguments = {"q": Q, "k": K, "v": K} | change
    with pytest.raises(error, match=message):
        fa4.explain(**arguments)


LIKELY_HEADS_FIRST = {
    "a_usual_model": ((2, 32, 2048, 64), (2, 8, 2048, 64)),
    "short": ((1, 16, 200, 64), (1, 16, 200, 64)),
}
RIGHT = {
    "a_usual_model": ((2, 2048, 32, 64), (2, 2048, 8, 64)),
    "one_row_of_a_decoder": ((64, 1, 128, 64), (64, 1, 128, 64)),
    "decoding": ((8, 1, 128, 64), (8, 4096, 8, 64)),
    "a_first_token_with_very_many_heads": ((8, 1, 256, 64), (8, 1, 256, 64)),
    "several_tokens_at_once": ((8, 4, 128, 64), (8, 4096, 128, 64)),
    "frames_of_a_video": ((4096, 8, 40, 64), (4096, 8, 40, 64)),
    "a_small_window_of_an_image": ((4096, 16, 128, 32), (4096, 16, 128, 32)),
    "many_heads_that_share_one": ((1, 128, 512, 64), (1, 128, 1, 64)),
}


@pytest.mark.parametrize("q, k", [*LIKELY_HEADS_FIRST.values(), *RIGHT.values()])
def test_heads_before_rows_are_warned_of_once(q, k, monkeypatch):
    """The commonest mistake of those who come from torch's layout; nothing else is suspected."""
    monkeypatch.setattr(fa4.torch_ops.checks, "_warned_of_axes", False)
    q, k = torch.empty(q, device="meta"), torch.empty(k, device="meta")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            fa4.explain(q, k, k)
            fa4.flash_attn_func(q, k, k)
    expected = r"takes for \(batch, seqlen, heads, head_dim\): .* heads of .*transpose\(1, 2\)"
    assert len(told) == ((tuple(q.shape), tuple(k.shape)) in LIKELY_HEADS_FIRST.values())
    assert all(re.search(expected, str(warning.message)) for warning in told)


CLUSTER, LOWER = "CTAs of its own cluster", "CTAs of lower launch index"
PROGRESS = {
    "sm80_forward": (80, 64, False, {}, "no other CTA", None),
    "sm80_deterministic": (80, 64, True, {"deterministic": True}, "no other CTA", LOWER),
    "sm80_backward": (80, 64, True, {}, "no other CTA", "no other CTA"),
    "sm90_deterministic": (90, 64, True, {"deterministic": True}, "no other CTA", LOWER),
    "sm90_ordered_by_default": (90, 96, True, {"causal": True}, "no other CTA", LOWER),
    "sm90_first_writer": (90, 64, True, {}, "no other CTA", "a CTA that runs and does not wait"),
    "sm90_forward_pair": (90, 256, False, {}, CLUSTER, None),
    "sm90_backward_pair": (90, 256, True, {"causal": True}, "no other CTA", f"{CLUSTER} and {LOWER}"),
    "sm100_pair": (100, 128, True, {}, CLUSTER, CLUSTER),
    "sm100_deterministic_pair": (100, 128, True, {"deterministic": True}, CLUSTER, f"{CLUSTER} and {LOWER}"),
}


@pytest.mark.parametrize("chip, head_dim, grad, flags, forward, backward", PROGRESS.values(), ids=PROGRESS)
def test_explain_says_what_the_ctas_of_a_call_wait_for(chip, head_dim, grad, flags, forward, backward):
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    x = torch.empty(1, 16384, 8, head_dim, dtype=torch.bfloat16, requires_grad=grad)
    with emulating(chip_by_number(chip)):
        explanation = fa4.explain(x, x, x, **flags)
    expected = f"forward: a CTA waits for {forward}"
    if backward is not None:
        expected += f"; backward: a CTA waits for {backward}"
    assert explanation.progress == expected
    assert f"progress {expected}" in str(explanation).splitlines()


def eight_bits(head_dim=64, axis="tokens", rows=200):
    """e4m3 tensors with scales of blocks. axis: of v's blocks."""
    x, given = torch.randn(1, rows, 2, head_dim).bfloat16(), {}
    for name in "qkv":
        quantised = fa4.quantize(x, "mxfp8", axis=axis if name == "v" else "head_dim")
        given |= {name: quantised.data, f"{name}_descale": quantised.scales}
    return given


HALF = torch.zeros(1, 200, 2, 64, dtype=torch.bfloat16)
NO_SCALES = {name: HALF.to(torch.float8_e4m3fn) for name in "qkv"}
DEQUANTISED = {
    "multiplied": (120, eight_bits(), None),
    "gb10": (121, eight_bits(128), None),
    "rounded": (120, dict.fromkeys("qkv", HALF) | dict(precision="mxfp8"), None),
    "blackwell": (100, NO_SCALES, None),
    "columns_of_v": (120, eight_bits(axis="head_dim"), 'of 32 tokens of v (axis="tokens")'),
    "wide": (121, eight_bits(256), "lacks head_dim (256, 256) (has multiples of 16 up to 128)"),
    "blocks": (100, eight_bits() | dict(block_mask=fa4.create_block_mask(fa4.masks.causal, None, None, 200, 200,
                                                                         device="cpu")), "lacks block_mask"),
    "a_backend": (120, eight_bits() | dict(backend="sm80"), "no kernel has them on sm_120 with backend='sm80'"),
    "few_queries": (100, eight_bits(rows=7), "need 129 queries or more to pay"),
    "hopper": (90, eight_bits(), "lacks scales of blocks of 32 numbers"),
    "a_negative_scale": (120, NO_SCALES | dict(softmax_scale=-1.0), "a softmax_scale that is not negative"),
    "no_kernel": (80, NO_SCALES, "no kernel has them on sm_80"),
}  # fmt: skip


@pytest.mark.parametrize("chip, call, reason", DEQUANTISED.values(), ids=DEQUANTISED)
def test_explain_says_why_8_bits_are_not_multiplied(chip, call, reason):
    """Where they are, rows of the same backend for 16 bits are no reason."""
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    with emulating(chip_by_number(chip)):
        explanation = fa4.explain(**call)
    told = dict(explanation.refused).get("products of 8 bits")
    if reason is None:
        assert told is None and explanation.chosen not in dict(explanation.refused)
    else:
        assert told is not None and reason in "; ".join(told)
        assert f"not products of 8 bits: {'; '.join(told)}" in str(explanation).splitlines()


def test_explain_says_nothing_of_ctas_where_there_is_no_kernel():
    explanation = fa4.explain(Q, K, K, backend="torch")
    assert explanation.progress == "" and "progress" not in str(explanation)
