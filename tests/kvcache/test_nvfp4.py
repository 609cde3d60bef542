"""Caches of 4-bit numbers: a call equals one on the numbers times their scales; errors name arguments."""

from unittest import mock

import pytest
import torch

import fa4
from fa4.emulator import emulate
from fa4.fallback import tiles
from fa4.oracle import cases
from fa4.runtime import nvfp4
from fa4.runtime.device import chip_by_number, emulating

from .named import CASES
from .problem import build

HEADS, COLUMNS, ROWS = 2, 64, 150
SCALED = ("k_cache", "v_cache", "k_descale", "v_descale")


def call(seed, pages=False, new=0, dtype=torch.bfloat16, columns=COLUMNS):
    """Arguments of a call."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=draw).to(dtype)

    given = dict(q=5 * numbers(2, 7, 3 * HEADS, columns), cache_seqlens=torch.tensor([90, 140], dtype=torch.int32))
    (given["k_cache"], given["k_descale"]), (given["v_cache"], given["v_descale"]) = (
        fa4.quantize(numbers(2, ROWS, HEADS, columns), "nvfp4") for _ in range(2)
    )
    if pages:
        for name in SCALED:
            given[name] = given[name].reshape(-1, 10, HEADS, given[name].shape[-1])
        given["page_table"] = torch.arange(2 * ROWS // 10, dtype=torch.int32).view(2, -1)
    if new:
        given |= dict(k=numbers(2, new, HEADS, columns), v=numbers(2, new, HEADS, columns))
        angles = numbers(ROWS, columns // 2).float()
        given |= dict(rotary_cos=angles.cos().to(dtype), rotary_sin=angles.sin().to(dtype))
    return given


def dequantised(given):
    """The call on a cache of the numbers times their scales."""
    caches = {
        name: fa4.dequantize(given[name], given[f"{name[0]}_descale"], given["q"].dtype)
        for name in ("k_cache", "v_cache")
    }
    return given | caches | dict(k_descale=None, v_descale=None)


CALLS = {
    "plain": (dict(), dict(return_lse=True)),
    "pages": (dict(pages=True), dict(causal=True, num_splits=3)),
    "float16": (dict(dtype=torch.float16), dict(softcap=3.0, learnable_sink=torch.ones(3 * HEADS).half())),
    "float32": (dict(dtype=torch.float32), dict(causal=True, window_size=(60, None))),
    "score_mod": (dict(pages=True), dict(score_mod=lambda s, b, h, i, j: s + 0.01 * (j - i), return_lse=True)),
    "mask_mod": (dict(pages=True), dict(mask_mod=lambda b, h, i, j: (i + j) % 3 > 0, batch_invariant=True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_equals_a_call_on_the_products(name, seed):
    made, options = CALLS[name]
    given = call(seed, **made)
    results = [fa4.flash_attn_with_kvcache(**x, **options) for x in (given, dequantised(given))]
    for ours, expected in zip(*(x if isinstance(x, tuple) else (x,) for x in results)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("pages", [False, True])
def test_new_rows_are_quantised_as_by_the_recipe(pages, seed):
    """Rotated keys are rounded to k's dtype before."""
    given, plain = call(seed, pages=pages, new=7), call(seed, pages=pages, new=7)
    for _ in range(2):
        fa4.flash_attn_with_kvcache(**given, causal=True)
        given["cache_seqlens"] = given["cache_seqlens"] - 5
    rows = dequantised(plain)
    for _ in range(2):
        fa4.flash_attn_with_kvcache(**rows, causal=True)
        rows["cache_seqlens"] = rows["cache_seqlens"] - 5
    for name in ("k_cache", "v_cache"):
        got = fa4.dequantize(given[name], given[f"{name[0]}_descale"])
        ours, theirs = (x.flatten(0, -3).view(2, ROWS, HEADS, -1) for x in (got, rows[name]))
        for b, first in enumerate((85, 135)):
            assert torch.equal(ours[b, first : first + 12], fa4.dequantize(
                *fa4.quantize(theirs[b, first : first + 12], "nvfp4")))  # fmt: skip
            assert torch.equal(ours[b, :first], theirs[b, :first]) and torch.equal(ours[b, 147:], theirs[b, 147:])


def test_queries_of_8_bits(seed):
    given = call(seed)
    given["q"] = given["q"].to(torch.float8_e4m3fn)
    out = fa4.flash_attn_with_kvcache(**given)
    assert torch.equal(out, fa4.flash_attn_with_kvcache(**given | dict(q=given["q"].bfloat16())))


CHIPS = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100a"}


@pytest.mark.rotates(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", CHIPS)
def test_every_number_times_every_scale_is_taken_exactly(backend, dtype, seed):
    """One key of 32 heads with all 256 scales, of K as logits and of V as weights of 1 give them."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.rand(256, 16, generator=draw).argsort(1)  # in each group all 16 numbers, at places of their own
    codes = (order[:, ::2] | order[:, 1::2] << 4).to(torch.uint8).view(1, 1, 32, 64)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 1, 32, 8)
    finite = torch.where(scales % 128 == 127, 0, scales).to(torch.uint8)  # a NaN spoils any sum
    ones = torch.eye(128, dtype=dtype).view(1, 2, 64, 128).repeat(1, 1, 32, 1)  # query i, head h: column 64 i + h % 64
    with emulate(CHIPS[backend], seed=seed, schedule="random"):
        out, lse = fa4.flash_attn_with_kvcache(
            ones, codes.view(nvfp4.DTYPE), codes.view(nvfp4.DTYPE), cache_seqlens=1, return_lse=True, backend=backend,
            k_descale=finite.view(nvfp4.SCALE_DTYPE), v_descale=scales.view(nvfp4.SCALE_DTYPE), softmax_scale=1.0,
        )  # fmt: skip
    logits = nvfp4.values(codes, finite.view(nvfp4.SCALE_DTYPE))[0, 0]
    values = nvfp4.values(codes, scales.view(nvfp4.SCALE_DTYPE))[0, 0]
    for head in range(32):
        rows = lse[0, 64 * head : 64 * head + 64].T.flatten()
        assert torch.allclose(rows, logits[head], rtol=1e-6, atol=1e-9)
        got, numbers = out[0, 0, 64 * head].float(), values[head].isfinite()
        assert torch.equal(got[numbers], values[head][numbers]) and got[~numbers].isnan().all()


NUMBERS = {
    "ties": torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8),
    "ties of the scale": 6 * torch.tensor([1.0625, 1.1875, 2.0**-7 * 1.5, 1.3125]).repeat_interleave(16),
    "zeros": torch.tensor([0.0, -0.0]).repeat(32),
    "tiny": torch.linspace(-(2.0**-10), 2.0**-8, 64),
    "huge": torch.linspace(-6e4, 6e4, 64),
    "NaN": torch.cat((torch.full((1,), torch.nan), torch.ones(63))),
    "inf": torch.cat((torch.ones(40), torch.full((1,), -torch.inf), torch.ones(23))),
}


@pytest.mark.rotates(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_append_kernel_rounds_as_the_recipe(dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    rows = [*NUMBERS.values(), *(torch.randn(64, generator=draw) * 2.0**i for i in range(-12, 8))]
    x = torch.stack(rows).view(1, -1, 1, 64).to(dtype)
    caches = [torch.zeros(1, len(rows), 1, 32, dtype=torch.uint8).view(nvfp4.DTYPE) for _ in "kv"]
    scales = [torch.zeros(1, len(rows), 1, 4).to(nvfp4.SCALE_DTYPE) for _ in "kv"]
    with emulate("sm_90a", seed=seed):
        fa4.flash_attn_with_kvcache(
            x[:, :1], *caches, x, -x, cache_seqlens=torch.zeros(1, dtype=torch.int32), k_descale=scales[0],
            v_descale=scales[1],
        )  # fmt: skip
    for cache, scale, new in zip(caches, scales, (x, -x)):
        codes, expected = nvfp4.quantised(new)
        assert torch.equal(cache.view(torch.uint8), codes), f"seed {seed}"
        assert torch.equal(scale.view(torch.uint8), expected.view(torch.uint8)), f"seed {seed}"


def _nibbles_swapped(x):
    codes = x.view(torch.uint8)
    return (codes << 4 | codes >> 4).view(nvfp4.DTYPE)


MUTANTS = {
    "scales of the next columns": dict(v_descale=lambda x: x.roll(1, -1)),
    "scales of another row": dict(k_descale=lambda x: x.roll(1, 1)),
    "columns of a byte swapped": dict(k_cache=_nibbles_swapped),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_kernel_must_not_read_is_found(name, seed):
    """Results as of a kernel that reads elsewhere are judged wrong."""
    built = build(CASES["nvfp4_in_pages"], seed)
    changes = {x: change(built.arguments[x]) for x, change in MUTANTS[name].items()}
    with emulate("sm_90a", seed=seed), pytest.raises(AssertionError):
        cases.assert_right(cases.judge_forward(built.problem, *built.call(**changes)), name)


def test_no_more_than_a_tile_is_dequantised_at_once(seed):
    seen, values = list[int](), nvfp4.values

    def spy(codes, *rest):
        seen.append(codes.shape[-2])
        return values(codes, *rest)

    with mock.patch.object(nvfp4, "values", spy), mock.patch.object(tiles, "TILE_N", 32):
        fa4.flash_attn_with_kvcache(**call(seed, pages=True))
    assert max(seen) == 32


def test_it_compiles(seed):
    given, again = call(seed, pages=True, new=7), call(seed, pages=True, new=7)
    eager = fa4.flash_attn_with_kvcache(**given, causal=True)
    compiled = torch.compile(fa4.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**again, causal=True), eager, rtol=0, atol=0)
    for name in SCALED:
        assert torch.equal(given[name].view(torch.uint8), again[name].view(torch.uint8))


def test_explain_tells_why_a_backend_does_not_serve(seed):
    """Rows of a kernel begin at multiples of 16 bytes."""
    for columns, chosen in ((64, "sm80"), (48, "torch")):
        given = call(seed, pages=True, columns=columns)
        arguments = dict(q=given["q"], k=given["k_cache"], v=given["v_cache"], cache_seqlens=given["cache_seqlens"])
        arguments |= {name: given[name] for name in ("page_table", "k_descale", "v_descale")}
        with emulating(chip_by_number(80)):
            found = fa4.explain(**arguments)
        assert found.spec.cache.is_nvfp4 and found.spec.head_dim_v == columns and found.chosen == chosen
    assert r"lacks a cache of 4-bit numbers of head_dim (48, 48) (has multiples of 32)" in str(found)


def _transposed(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


WRONG = {
    "columns of v": (
        ValueError,
        "v_cache has 24 columns of 4 bits, expected a multiple of 16",
        lambda given: dict(v_cache=given["v_cache"][..., :12], v_descale=given["v_descale"][..., :1]),
    ),
    "columns of q": (
        ValueError,
        "q has 65 columns, expected an even number to go with k_cache of 4 bits",
        lambda given: dict(q=torch.zeros(2, 7, 6, 65).bfloat16()),
    ),
    "bytes": (
        TypeError,
        r"k_cache has dtype torch.uint8, expected k_cache.view\(torch.float4_e2m1fn_x2\) to go with its scales",
        lambda given: {name: given[name].view(torch.uint8) for name in ("k_cache", "v_cache")},
    ),
    "no scales": (
        TypeError,
        "k_descale is a NoneType, expected torch.float8_e4m3fn scales of k_cache, as fa4.quantize",
        lambda given: dict(k_descale=None),
    ),
    "factors": (
        TypeError,
        "v_descale has dtype torch.float32, expected float8_e4m3fn",
        lambda given: dict(v_descale=torch.ones(())),
    ),
    "shape": (
        ValueError,
        r"v_descale has shape \(2, 150, 2, 3\), expected \(2, 150, 2, 4\) beside v_cache \(2, 150, 2, 32\)",
        lambda given: dict(v_descale=given["v_descale"][..., :3]),
    ),
    "stride": (
        ValueError,
        r"k_descale has stride 2 on its last axis, expected 1: call k_descale.contiguous\(\)",
        lambda given: dict(k_descale=_transposed(given["k_descale"])),
    ),
    "columns": (
        ValueError,
        r"k_cache has shape .* expected two of q's columns a byte, \(\*, \*, \*, 64\), to go with q",
        lambda given: dict(q=torch.zeros(2, 7, 6, 128, dtype=torch.bfloat16)),
    ),
    "other dtype": (
        TypeError,
        "v_cache has dtype torch.float8_e4m3fn, expected torch.float4_e2m1fn_x2 like k_cache",
        lambda given: dict(v_cache=torch.zeros(2, ROWS, HEADS, COLUMNS).to(torch.float8_e4m3fn)),
    ),
    "q_descale": (
        ValueError,
        "q_descale is given with a cache of dtype torch.float4_e2m1fn_x2, whose scales .* multiply softmax_scale by it",
        lambda given: dict(q=given["q"].to(torch.float8_e4m3fn), q_descale=torch.ones(())),
    ),
    "shared scales": (
        ValueError,
        "k_descale and v_descale are the same memory",
        lambda given: dict(v_descale=given["k_descale"]) | {name: given["q"][:, :, :HEADS] for name in "kv"},
    ),
    "expanded scales": (
        ValueError,
        "k_descale has stride 0 on axis 0 of 2 entries, expected memory of its own for each row",
        lambda given: (
            dict(k_descale=given["k_descale"][:1].expand(2, -1, -1, -1))
            | {name: given["q"][:, :, :HEADS] for name in "kv"}
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_argument(name, seed):
    error, message, changes = WRONG[name]
    given = call(seed)
    with pytest.raises(error, match=message):
        fa4.flash_attn_with_kvcache(**given | changes(given))


def test_latents_have_no_4_bits():
    q_nope, q_rope = torch.zeros(1, 1, 2, 48).bfloat16(), torch.zeros(1, 1, 2, 16).bfloat16()
    cache = torch.zeros(1, 8, 32, dtype=torch.uint8).view(nvfp4.DTYPE)
    with pytest.raises(TypeError, match=r"kv_cache has dtype .*, expected torch.bfloat16 or 8 bits"):
        fa4.mla_attention_with_kvcache(q_nope, q_rope, cache, softmax_scale=1.0)


def test_numbers_of_4_bits_are_for_caches(seed):
    given = call(seed)
    with pytest.raises(TypeError, match="numbers of 4 bits are for a cache of flash_attn_with_kvcache"):
        fa4.flash_attn_func(given["q"], given["k_cache"], given["v_cache"], k_descale=given["k_descale"])


def test_no_row_is_written_before_an_error(seed):
    given = call(seed, new=3)
    before = given["k_cache"].view(torch.uint8).clone()
    changes = dict(v_cache=given["v_cache"][..., :12], v_descale=given["v_descale"][..., :1], v=given["v"][..., :24])
    with pytest.raises(ValueError, match="v_cache has 24 columns"):
        fa4.flash_attn_with_kvcache(**given | changes)
    assert torch.equal(given["k_cache"].view(torch.uint8), before)


@pytest.mark.rotates(3)
@pytest.mark.parametrize("chip", ["sm_80", "sm_90a", "sm_100a"])
def test_scales_of_unused_rows_may_hold_anything(chip, seed):
    """Beside a sequence that is empty."""
    given = call(seed) | dict(cache_seqlens=torch.tensor([90, 0], dtype=torch.int32))
    nan = {name: given[name].view(torch.uint8).clone() for name in ("k_descale", "v_descale")}
    for scales in nan.values():
        scales[0, 90:], scales[1] = 127, 127
    results = []
    for changes in ({}, {name: x.view(nvfp4.SCALE_DTYPE) for name, x in nan.items()}):
        with emulate(chip, sms=2, seed=seed):
            results.append(fa4.flash_attn_with_kvcache(**given | changes))
    assert torch.equal(*results) and results[0].isfinite().all()
