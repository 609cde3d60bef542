"""Errors that name the argument, and the operators as torch sees them."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fa4
from fa4.kvcache.ops import NO_MODS
from fa4.kvcache.record import AppendArguments
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.spec import AttentionInputs, Cache, Flags

from .named import CASES
from .problem import FP8, build, numbers


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
PACKED = dict(q=torch.randn(5, 4, 16), cu_seqlens_q=i32(0, 2, 5))
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
    "gradients": (
        NotImplementedError,
        "q requires grad, and flash_attn_with_kvcache has no gradients",
        dict(q=torch.randn(2, 3, 4, 16, requires_grad=True)),
    ),
    "rotary_gradients": (
        NotImplementedError,
        "rotary_sin requires grad",
        dict(ROTARY, rotary_sin=torch.ones(30, 8, requires_grad=True)),
    ),
    "descale_gradients": (
        NotImplementedError,
        "v_descale requires grad",
        dict(FP8_CACHE, v_descale=torch.ones(2, requires_grad=True)),
    ),
    "sink_gradients": (
        NotImplementedError,
        "learnable_sink requires grad",
        dict(learnable_sink=torch.zeros(4, requires_grad=True)),
    ),
    "captured_gradients": (
        NotImplementedError,
        "score_mod captured a tensor that requires grad",
        dict(NEW, score_mod=fa4.scores.alibi(torch.ones(4, requires_grad=True))),
    ),
    "max_seqlen_q": (
        ValueError,
        "max_seqlen_q is 2, expected at least 3, the longest sequence",
        dict(PACKED, max_seqlen_q=2),
    ),
    "max_seqlen_q_tensor": (
        ValueError,
        "max_seqlen_q is 2, expected at least 3, the longest sequence",
        dict(PACKED, max_seqlen_q=torch.tensor(2)),
    ),
    "max_seqlen_q_negative": (ValueError, "max_seqlen_q is -1, expected 0 or more", dict(PACKED, max_seqlen_q=-1)),
    "max_seqlen_q_dense": (TypeError, "max_seqlen_q is a str, expected an int", dict(max_seqlen_q="x")),
    "max_seqlen_q_dense_number": (
        ValueError,
        "max_seqlen_q is 2, expected at least 3, the rows of q",
        dict(max_seqlen_q=2),
    ),
    "max_seqlen_k": (ValueError, "max_seqlen_k is 22, expected at least 23, the longest", dict(NEW, max_seqlen_k=22)),
    "rotary_positions_of_queries": (
        ValueError,
        "rotary_cos has 30 positions, expected at least 32",
        dict(ROTARY, q=torch.randn(2, 12, 4, 16), causal=True),
    ),
    "rotary_positions_of_the_first": (
        ValueError,
        "rotary_cos has 30 positions, expected at least 31",
        dict(ROTARY, k=NEW["k"][:, :0], v=NEW["v"][:, :0], rotary_seqlens=i32(0, 30)),
    ),
    "rotary_seqlens_negative": (
        ValueError,
        r"rotary_seqlens is \[-5, 0\], expected 0 or more",
        dict(ROTARY, rotary_seqlens=i32(-5, 0)),
    ),
    "descale_negative": (
        ValueError,
        "k_descale has -1.0, expected finite numbers, 0 or more",
        dict(FP8_CACHE, k_descale=torch.tensor([1.0, -1.0])),
    ),
    "descale_nan": (
        ValueError,
        "v_descale has nan, expected finite",
        dict(FP8_CACHE, v_descale=torch.tensor(torch.nan)),
    ),
    "page_twice": (
        ValueError,
        "page_table has page 2 for new rows of sequence 0 and of sequence 1, expected no page twice",
        dict(PAGES, **NEW, page_table=i32(0, 2, 1, 3, 4, 2).view(2, 3), cache_seqlens=i32(9, 17)),
    ),
    "page_of_new_rows_read": (
        ValueError,
        "page_table has page 2 for new rows of sequence 0 and for rows that sequence 1 reads, expected a page of its",
        dict(PAGES, **NEW, page_table=i32(0, 2, 1, 3, 2, 5).view(2, 3), cache_seqlens=i32(9, 17)),
    ),
    "page_of_new_rows_read_by_its_own": (
        ValueError,
        "block_table has page 2 for new rows of sequence 1 and for rows that sequence 1 reads",
        dict(PAGES, **NEW, page_table=None, block_table=i32(0, 1, 4, 2, 3, 2).view(2, 3), cache_seqlens=i32(9, 17)),
    ),
    "page_twice_of_one": (
        ValueError,
        "block_table has page 2 for new rows of sequence 0 and of sequence 0",
        dict(PAGES, **NEW, page_table=None, block_table=i32(2, 2, 1, 3, 4, 5).view(2, 3), cache_seqlens=i32(6, 17)),
    ),
    "block_table": (
        TypeError,
        "block_table has dtype torch.int64",
        dict(PAGES, page_table=None, block_table=PAGES["page_table"].long()),
    ),
    "expanded_cache": (
        ValueError,
        "v_cache has stride 0 on axis 0 of 2 entries, expected memory of its own",
        dict(NEW, v_cache=torch.randn(1, 24, 2, 16).expand(2, 24, 2, 16)),
    ),
    "overlapping_rows": (
        ValueError,
        r"k_cache has strides \(16, 16, 16, 1\) for shape \(2, 24, 2, 16\), expected memory of its own",
        dict(NEW, k_cache=torch.zeros(800).as_strided((2, 24, 2, 16), (16, 16, 16, 1))),
    ),
    "one_memory": (
        ValueError,
        "k_cache and v_cache are the same memory, expected one of its own for each",
        dict(NEW, **dict.fromkeys(("k_cache", "v_cache"), torch.randn(2, 24, 2, 16))),
    ),
    "jagged": (
        TypeError,
        "q is a nested tensor, expected a plain one: q may be packed, with cu_seqlens_q",
        dict(q=torch.nested.nested_tensor_from_jagged(torch.randn(6, 4, 16), torch.tensor([0, 3, 6]))),
    ),
    "nested": (TypeError, "k_cache is a nested tensor", dict(k_cache=torch.nested.nested_tensor([*base()["k_cache"]]))),
    "sparse": (TypeError, "v_cache has layout torch.sparse_coo", dict(v_cache=base()["v_cache"].to_sparse())),
    "return_lse": (TypeError, "return_lse is a str, expected a bool", dict(return_lse="yes")),
    "backend": (ValueError, "no backend can run this on cpu: sm90", dict(NEW, backend="sm90")),
    "backend_with_mods": (
        ValueError,
        "no backend can run this on cpu: sm90",
        dict(NEW, backend="sm90", mask_mod=fa4.masks.causal),
    ),
}


@pytest.mark.parametrize("error, message, change", ERRORS.values(), ids=ERRORS)
def test_an_error_names_the_argument_and_leaves_the_caches(error, message, change):
    """Also the second time, when what came of the first call may be known."""
    given = base() | change
    caches = {name: given[name] for name in ("k_cache", "v_cache")}
    before = {name: x.clone() for name, x in caches.items() if not (x.is_nested or x.is_sparse)}
    for _ in range(2):
        with pytest.raises(error, match=message):
            fa4.flash_attn_with_kvcache(**given)
    for name, x in before.items():
        assert x.is_meta or torch.equal(given[name].float(), x.float()), f"{name} was written"


def test_a_dense_bound_of_queries_may_be_given(seed):
    given = base()
    expected = fa4.flash_attn_with_kvcache(**given)
    for bound in (3, 7, torch.tensor(3)):
        assert torch.equal(fa4.flash_attn_with_kvcache(**given, max_seqlen_q=bound), expected)


def test_new_rows_go_to_a_page_of_their_own_in_a_shared_table(seed):
    """Of a page before the new rows' several sequences may have rows."""
    draw = torch.Generator().manual_seed(seed)
    given = base() | {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in PAGES.items()}
    given |= dict(NEW, page_table=i32(0, 2, 1, 0, 4, 2).view(2, 3), cache_seqlens=i32(9, 8))
    given |= {name: torch.randn(given[name].shape, generator=draw) for name in ("q", "k", "v")}
    fa4.flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"][2, 1:4], given["k"][0]) and torch.equal(given["k_cache"][4, :3], given["k"][1])


def test_nothing_is_recorded_into_the_caches(seed):
    """Under no_grad and by detached tables, with gradients on."""
    given = base() | ROTARY | dict(rotary_cos=torch.ones(30, 8, requires_grad=True))
    with torch.no_grad():
        fa4.flash_attn_with_kvcache(**given)
    expected = fa4.flash_attn_with_kvcache(**given | dict(rotary_cos=given["rotary_cos"].detach()))
    assert not (expected.requires_grad or given["k_cache"].requires_grad) and given["k_cache"].grad_fn is None
    with torch.no_grad():
        slopes = torch.ones(4, requires_grad=True)
        fa4.flash_attn_with_kvcache(**given, score_mod=fa4.scores.alibi(slopes))


def test_a_tangent_is_refused_by_its_own_name():
    given = base()
    with torch.autograd.forward_ad.dual_level():
        for name in ("q", "k_cache", "rotary_cos"):
            dual = dict(ROTARY, **base())
            dual[name] = torch.autograd.forward_ad.make_dual(dual[name], dual[name])
            with pytest.raises(NotImplementedError, match=f"^{name} carries a tangent"):
                fa4.flash_attn_with_kvcache(**given | dual)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8, torch.float32, torch.float64])
def test_autocast_takes_queries_and_new_rows_in_its_dtype(cache_dtype, seed):
    """Caches are never converted: of another dtype than autocast's they keep that of the call."""
    given = base() | ROTARY
    caches = {name: given[name].to(cache_dtype) for name in ("k_cache", "v_cache")}
    wide = cache_dtype in (torch.float32, torch.float64)
    moved = given | {n: given[n].to(cache_dtype) for n in ("q", "k", "v")} if wide else given
    lowered = {name: moved[name] if wide else moved[name].bfloat16() for name in ("q", "k", "v")}
    own = {name: x.clone() for name, x in caches.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa4.flash_attn_with_kvcache(**moved | caches)
    expected = fa4.flash_attn_with_kvcache(**moved | own | lowered)
    assert out.dtype == (cache_dtype if wide else torch.bfloat16) and torch.equal(out, expected)
    assert all(torch.equal(caches[name], own[name]) for name in own)


def test_vmap_maps_whole_caches_and_refuses_the_rest_by_name(seed):
    q, k, v = (torch.randn(5, *shape) for shape in ((2, 3, 4, 16), (2, 24, 2, 16), (2, 24, 2, 16)))
    out = torch.func.vmap(fa4.flash_attn_with_kvcache)(q, k, v)
    assert torch.equal(out, torch.stack([fa4.flash_attn_with_kvcache(*x) for x in zip(q, k, v)]))
    refused = {
        "cache_seqlens": dict(cache_seqlens=i32(5, 20)),
        "block_table": dict(block_table=i32(0, 1).view(2, 1)),
        "k": dict(NEW, cache_seqlens=3),
        "cache_leftpad": dict(cache_leftpad=i32(1, 2)),
    }
    for name, given in refused.items():
        with pytest.raises(NotImplementedError, match=f"^{name} is given inside torch.func.vmap, expected q, k_cache"):
            torch.func.vmap(lambda q, k, v, g=given: fa4.flash_attn_with_kvcache(q, k, v, **g))(q, k, v)


def operator_arguments(name, seed):
    a = build(CASES[name], seed).arguments
    appended = AppendArguments(
        a["q"], a["k_cache"].nan_to_num(), a["v_cache"].nan_to_num(), a["k"], a["v"], a["cache_seqlens"],
        cos=a.get("rotary_cos"), sin=a.get("rotary_sin"), page_table=a.get("page_table"),
        batch_idx=a.get("cache_batch_idx"), interleaved=a.get("rotary_interleaved", True),
    )  # fmt: skip
    cache = Cache(appended.page_table, appended.batch_idx, a.get("cache_leftpad"))
    inputs = AttentionInputs(
        *appended[:3], a["learnable_sink"], seqused_k=a["cache_seqlens"] + a["k"].shape[1],
        max_seqlen_q=a["q"].shape[1], max_seqlen_k=cache.capacity(appended.k_cache),
    )  # fmt: skip
    return appended, inputs, cache


@pytest.mark.parametrize("name", ["append_and_rotate_in_pages", "leftpad_and_batch_idx"])
def test_opcheck(name, seed):
    appended, inputs, cache = operator_arguments(name, seed)
    torch.library.opcheck(torch.ops.fa4.append_to_cache.default, tuple(appended))
    arguments = (*inputs, *cache, *NO_MODS, *Flags(0.1, None, 0))
    torch.library.opcheck(torch.ops.fa4.forward_with_cache.default, arguments)


def test_the_schemas_are_the_records():
    names = [x.name for x in torch.ops.fa4.append_to_cache.default._schema.arguments]
    assert names == list(AppendArguments._fields)
    mutated = [x.name for x in torch.ops.fa4.append_to_cache.default._schema.arguments if x.alias_info is not None]
    assert mutated == ["k_cache", "v_cache", "k_scales", "v_scales"]


@pytest.mark.parametrize(
    "name", ["append_and_rotate_in_pages", "dense_append", "packed_append", "fp8_append", "nvfp4_append"]
)
def test_fullgraph(name, seed):
    torch._dynamo.reset()
    built = build(CASES[name], seed)
    expected = built.call()
    compiled = torch.compile(fa4.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    arguments = built.arguments | {x: built.arguments[x].clone() for x in built.after}
    out, lse = compiled(**arguments, return_lse=True)
    if out.ndim == 4:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for x in built.after:
        assert torch.equal(*(numbers(tensors, x).nan_to_num() for tensors in (arguments, built.ran)))


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
