"""Errors that name the argument, and the operators as torch sees them."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fa4
from fa4 import cases
from fa4.cases import Case
from fa4.device import chip_by_number, emulating
from fa4.kvcache.ops import NO_MODS
from fa4.kvcache.record import Appended
from fa4.spec import AttentionInputs, Cache, Flags

from .named import CASES
from .problem import FP8, build


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def base():
    return dict(
        q=torch.randn(2, 3, 4, 16),
        k_cache=torch.randn(2, 24, 2, 16),
        v_cache=torch.randn(2, 24, 2, 16),
        cache_seqlens=i32(5, 20),
    )


NEW = dict(k=torch.randn(2, 3, 2, 16), v=torch.randn(2, 3, 2, 16))
ROTARY = dict(NEW, rotary_cos=torch.ones(30, 8), rotary_sin=torch.ones(30, 8))
PAGES = dict(
    k_cache=torch.randn(9, 8, 2, 16), v_cache=torch.randn(9, 8, 2, 16), page_table=i32(0, 1, 2, 3, 4, 5).view(2, 3)
)
FP8_CACHE = dict(k_cache=torch.zeros(2, 24, 2, 16).to(FP8), v_cache=torch.zeros(2, 24, 2, 16).to(FP8))
ERRORS = {
    "q": (TypeError, "q is a list, expected a torch.Tensor", dict(q=[1.0])),
    "q_axes": (ValueError, r"q has 3 dimensions, shape \(3, 4, 16\), expected 4", dict(q=base()["q"][0])),
    "q_dtype": (TypeError, "q has dtype torch.int64", dict(q=base()["q"].long())),
    "cache_dtype": (
        TypeError,
        "k_cache has dtype torch.float16, expected torch.float32 like q, or torch.float8",
        dict(k_cache=base()["k_cache"].half()),
    ),
    "cache_batch": (
        ValueError,
        r"k_cache has shape \(1, 24, 2, 16\), expected \(2, \*, \*, \*\)",
        dict(k_cache=base()["k_cache"][:1], v_cache=base()["v_cache"][:1]),
    ),
    "cache_head_dim": (
        ValueError,
        r"k_cache has shape \(2, 24, 2, 8\), expected \(\*, \*, \*, 16\)",
        dict(k_cache=base()["k_cache"][..., :8]),
    ),
    "v_cache": (
        ValueError,
        r"v_cache has shape \(2, 23, 2, 16\), expected \(2, 24, 2, \*\)",
        dict(v_cache=base()["v_cache"][:, 1:]),
    ),
    "cache_device": (ValueError, "v_cache is on meta, expected cpu", dict(v_cache=base()["v_cache"].to("meta"))),
    "cache_strided": (
        ValueError,
        "k_cache has stride 2 on its last axis",
        dict(k_cache=torch.randn(2, 24, 2, 32)[..., ::2]),
    ),
    "heads": (
        ValueError,
        "q has 3 heads, expected a positive multiple of k_cache's 2",
        dict(q=torch.randn(2, 3, 3, 16)),
    ),
    "seqlens_dtype": (TypeError, "cache_seqlens has dtype torch.int64", dict(cache_seqlens=torch.tensor([5, 20]))),
    "seqlens_shape": (ValueError, r"cache_seqlens has shape \(3\), expected \(2,\)", dict(cache_seqlens=i32(1, 2, 3))),
    "seqlens_float": (TypeError, "cache_seqlens is a float", dict(cache_seqlens=5.0)),
    "seqlens_number": (ValueError, "cache_seqlens is 25, expected 0 to the 24 rows", dict(cache_seqlens=25)),
    "seqlens_beyond": (
        ValueError,
        r"cache_seqlens is \[5, 25\], expected 0 to the 24 rows",
        dict(cache_seqlens=i32(5, 25)),
    ),
    "append_beyond": (
        ValueError,
        r"cache_seqlens is \[5, 22\] with \[3, 3\] new rows",
        dict(NEW, cache_seqlens=i32(5, 22)),
    ),
    "leftpad": (ValueError, r"cache_leftpad is \[6, 0\], expected 0 to the rows in use", dict(cache_leftpad=i32(6, 0))),
    "batch_idx": (ValueError, r"cache_batch_idx is \[0, 2\], expected 0 to 1", dict(cache_batch_idx=i32(0, 2))),
    "batch_idx_twice": (ValueError, "expected no sequence twice", dict(NEW, cache_batch_idx=i32(1, 1))),
    "page_table_dtype": (
        TypeError,
        "page_table has dtype torch.int64",
        dict(PAGES, page_table=PAGES["page_table"].long()),
    ),
    "no_heads": (
        ValueError,
        "q has 4 heads, expected a positive multiple of k_cache's 0",
        dict(k_cache=torch.zeros(2, 24, 0, 16), v_cache=torch.zeros(2, 24, 0, 16)),
    ),
    "page_table_axes": (ValueError, "page_table has 1 dimensions", dict(PAGES, page_table=i32(0, 1))),
    "page_table_batch": (
        ValueError,
        r"page_table has shape \(1, 3\), expected \(2, \*\)",
        dict(PAGES, page_table=i32(0, 1, 2)[None]),
    ),
    "page_number": (
        ValueError,
        r"page_table\[1\] is \[3, 9, 5\] in use, expected 0 to 8",
        dict(PAGES, page_table=i32(0, 1, 2, 3, 9, 5).view(2, 3)),
    ),
    "pages_beyond": (
        ValueError,
        r"cache_seqlens is \[5, 25\], expected 0 to the 24",
        dict(PAGES, cache_seqlens=i32(5, 25)),
    ),
    "pages_and_batch_idx": (
        ValueError,
        "cache_batch_idx and page_table are both given",
        dict(PAGES, cache_batch_idx=i32(0, 1)),
    ),
    "both_tables": (
        ValueError,
        "page_table and block_table are both given",
        dict(PAGES, block_table=PAGES["page_table"]),
    ),
    "k_alone": (ValueError, "k is given without v", dict(k=NEW["k"])),
    "new_without_seqlens": (ValueError, "k and v are given without cache_seqlens", dict(NEW, cache_seqlens=None)),
    "new_heads": (
        ValueError,
        r"k has shape \(2, 3, 1, 16\), expected \(2, \*, 2, 16\)",
        dict(NEW, k=NEW["k"][:, :, :1]),
    ),
    "new_rows_of_v": (
        ValueError,
        r"v has shape \(2, 2, 2, 16\), expected \(2, 3, 2, 16\)",
        dict(NEW, v=NEW["v"][:, :2]),
    ),
    "new_dtype": (TypeError, "v has dtype torch.float16, expected torch.float32", dict(NEW, v=NEW["v"].half())),
    "cos_alone": (ValueError, "rotary_cos is given without rotary_sin", dict(NEW, rotary_cos=torch.ones(30, 8))),
    "rotary_without_new": (
        ValueError,
        "rotary_cos is given without k and v",
        {k: ROTARY[k] for k in ("rotary_cos", "rotary_sin")},
    ),
    "rotary_width": (
        ValueError,
        r"rotary_cos has shape \(30, 9\), expected \(positions, 1 to 8\)",
        dict(NEW, rotary_cos=torch.ones(30, 9), rotary_sin=torch.ones(30, 9)),
    ),
    "rotary_shapes": (
        ValueError,
        r"rotary_sin has shape \(29, 8\), expected \(30, 8\)",
        dict(ROTARY, rotary_sin=torch.ones(29, 8)),
    ),
    "rotary_positions": (
        ValueError,
        "rotary_cos has 22 positions, expected at least 23",
        dict(NEW, rotary_cos=torch.ones(22, 8), rotary_sin=torch.ones(22, 8)),
    ),
    "rotary_dtype": (
        TypeError,
        "rotary_cos has dtype torch.float64",
        dict(NEW, rotary_cos=torch.ones(30, 8).double(), rotary_sin=torch.ones(30, 8).double()),
    ),
    "rotary_seqlens": (ValueError, "rotary_seqlens is given without rotary_cos", dict(NEW, rotary_seqlens=i32(0, 0))),
    "interleaved": (TypeError, "rotary_interleaved is a int", dict(ROTARY, rotary_interleaved=1)),
    "descale_without_fp8": (
        ValueError,
        "k_descale is given with a cache of dtype torch.float32",
        dict(k_descale=torch.ones(2)),
    ),
    "descale_shape": (
        ValueError,
        r"v_descale has shape \(3\), expected \(\), \(2,\) or \(2, 2\)",
        dict(FP8_CACHE, v_descale=torch.ones(3)),
    ),
    "splits": (ValueError, "num_splits is -1", dict(num_splits=-1)),
    "invariant": (TypeError, "batch_invariant is a str", dict(batch_invariant="yes")),
    "cu_seqlens_k_new": (ValueError, "cu_seqlens_k_new is given without k and v", dict(cu_seqlens_k_new=i32(0, 1, 2))),
    "cu_seqlens_q": (
        ValueError,
        r"cu_seqlens_q is \[0, 3, 2\]",
        dict(q=torch.randn(6, 4, 16), cu_seqlens_q=i32(0, 3, 2)),
    ),
    "sink": (ValueError, r"learnable_sink has shape \(2\), expected \(4,\)", dict(learnable_sink=torch.zeros(2))),
    "gradients": (NotImplementedError, "has no gradients", dict(q=torch.randn(2, 3, 4, 16, requires_grad=True))),
}


@pytest.mark.parametrize("error, message, change", ERRORS.values(), ids=ERRORS)
def test_an_error_names_the_argument(error, message, change):
    with pytest.raises(error, match=message):
        fa4.flash_attn_with_kvcache(**base() | change)


def operator_arguments(name, seed):
    a = build(CASES[name], seed).arguments
    appended = Appended(
        a["q"], a["k_cache"].nan_to_num(), a["v_cache"].nan_to_num(), a["k"], a["v"], a["cache_seqlens"],
        cos=a.get("rotary_cos"), sin=a.get("rotary_sin"), page_table=a.get("page_table"),
        batch_idx=a.get("cache_batch_idx"), interleaved=a.get("rotary_interleaved", True),
    )  # fmt: skip
    inputs = AttentionInputs(
        *appended[:3], a["learnable_sink"], seqused_k=a["cache_seqlens"] + a["k"].shape[1],
        max_seqlen_q=a["q"].shape[1], max_seqlen_k=appended.cache.capacity(appended.k_cache),
    )  # fmt: skip
    return appended, inputs, Cache(appended.page_table, appended.batch_idx, a.get("cache_leftpad"))


@pytest.mark.parametrize("name", ["append_and_rotate_in_pages", "leftpad_and_batch_idx"])
def test_opcheck(name, seed):
    appended, inputs, cache = operator_arguments(name, seed)
    torch.library.opcheck(torch.ops.fa4.append_to_cache.default, tuple(appended))
    arguments = (*inputs, *cache, *NO_MODS, *Flags(0.1, None, 0))
    torch.library.opcheck(torch.ops.fa4.forward_with_cache.default, arguments)


def test_the_schemas_are_the_records():
    names = [x.name for x in torch.ops.fa4.append_to_cache.default._schema.arguments]
    assert names == list(Appended._fields)
    mutated = [x.name for x in torch.ops.fa4.append_to_cache.default._schema.arguments if x.alias_info is not None]
    assert mutated == ["k_cache", "v_cache"]


@pytest.mark.parametrize("name", ["append_and_rotate_in_pages", "dense_append", "packed_append", "fp8_append"])
def test_fullgraph(name, seed):
    torch._dynamo.reset()
    built = build(CASES[name], seed)
    expected = built.call()
    compiled = torch.compile(fa4.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    arguments = built.arguments | {x: built.arguments[x].clone() for x in ("k_cache", "v_cache")}
    out, lse = compiled(**arguments, return_lse=True)
    if out.ndim == 4:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for x in ("k_cache", "v_cache"):
        assert torch.equal(arguments[x].float().nan_to_num(), built.ran[x].float().nan_to_num())


def test_fake_tensors_give_shapes():
    built = build(CASES["append_and_rotate_in_pages"], 0)
    out, lse = built.call()
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in built.arguments.items()}
        got = fa4.flash_attn_with_kvcache(**fakes, return_lse=True)
    assert got[0].flatten(0, 1).shape == out.shape and got[1].transpose(0, 1).flatten(1).shape == lse.shape


PADDED = Case(
    "padded",
    batch=3,
    seqlen_q=20,
    seqlen_k=60,
    seqused=((None, 57), (None, 3), (None, 0)),
    dtype=torch.float32,
    causal=True,
)


def test_padded_keys_without_a_cache(seed):
    """seqused_k of `flash_attn_func`, forward and backward, by graph and by a second call with other lengths."""
    torch._dynamo.reset()
    problem = cases.make(PADDED, seed)
    out, lse, grads = problem.call_with_gradients()
    cases.assert_right(cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads), f"seed {seed}")
    compiled = torch.compile(lambda **x: problem.call(**x), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q=problem.inputs.q)[0], out)
    other = replace(PADDED, seqused=((None, 1), (None, 60), (None, 33)))
    problem = cases.make(other, seed)
    cases.assert_right(cases.judge_forward(problem, *problem.call()), f"seed {seed}")


@pytest.mark.parametrize("drawn", [239, 425, 859])
def test_a_backward_sums_the_scores_of_a_row_with_one_key_anew(drawn):
    """By a product of another shape than the forward's: with other last bits in these draws, and so in dv."""
    problem = cases.make(PADDED, drawn)
    _, _, grads = problem.call_with_gradients()
    cases.assert_right(cases.judge_backward(problem, grads), f"seed {drawn}")


def test_explain_tells_who_serves_a_cache():
    q, k = torch.empty(2, 1, 8, 64, dtype=torch.bfloat16), torch.empty(40, 16, 2, 64, dtype=torch.bfloat16)
    table, small = torch.zeros(2, 20, dtype=torch.int32), k.view(160, 4, 2, 64)
    with emulating(chip_by_number(90)):
        pages_of_4 = fa4.explain(q, small, small, page_table=table, cache_seqlens=i32(5, 6))
        told = fa4.explain(q, k, k, page_table=table, cache_seqlens=i32(5, 6), batch_invariant=True)
        dense = fa4.explain(q, k[:2], k[:2], cache_seqlens=i32(5, 6))
        fp8 = fa4.explain(q, k.to(FP8), k.to(FP8), page_table=table)
        odd = fa4.explain(
            *(torch.empty(*x.shape[:3], 72, dtype=x.dtype) for x in (q, k.to(FP8), k.to(FP8))), page_table=table
        )
    assert told.chosen == "sm90" and told.extent == (2, 1, 320)
    assert pages_of_4.chosen == "sm90" and "gathered rows" in pages_of_4.tiles
    assert dense.chosen == "sm90" and fp8.chosen == "sm90" and odd.chosen == "torch"
    assert "lacks a cache of 8-bit numbers of head_dim (72, 72) (has multiples of 16)" in str(odd)
