"""Hopper's latent forward on the emulated chip, against the oracle; when it is chosen, and what it leaves to others."""

import dataclasses
import random

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from warpcheck.machine import SCHEDULES

import fa4
from fa4.emulator import emulate
from fa4.runtime import dispatch
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, CacheSpec, ProblemSize
from tests.kvcache.problem import CacheCase, build, build_beyond_float16

# Blocks have 64 keys; the even ones are one warpgroup's. All rows of a sequence's queries and heads fill tiles of 64.
LATENT = dict(head_dim=576, head_dim_v=512, in_k=True)
CASES = (
    CacheCase("one_block", (20, 64, 1), heads_q=16, **LATENT),
    CacheCase("two_blocks", (65, 128), queries=2, heads_q=16, page_size=64, **LATENT),
    CacheCase("odd_and_even_blocks", (330, 0, 150, 97), capacity=336, heads_q=8, page_size=16, sink=True, **LATENT),
    CacheCase("many_heads", (70, 140), heads_q=128, page_size=64, dtype=torch.float16, **LATENT),
    CacheCase("padded_heads", (100,), queries=20, heads_q=5, causal=True, softcap=5.0, **LATENT),
    CacheCase("packed_window", (90, 130), queries=(3, 7), heads_q=16, window_size=(50, 0), page_size=8, **LATENT),
    CacheCase("appended", (61, 0), queries=4, new=4, heads_q=16, page_size=64, **LATENT),
    CacheCase("no_rope", (90, 40), heads_q=16, head_dim=512, head_dim_v=512, in_k=True),
    # Rows that are copied one by one; a CTA takes several tiles.
    CacheCase("rows", (20, 64, 1, 0, 130), page_size=1, heads_q=16, **LATENT),
    CacheCase("rows_of_many_heads", (64, 63, 0, 129, 155, 1), page_size=1, heads_q=128, sink=True, **LATENT),
    CacheCase("rows_in_a_window", (155, 90), page_size=3, queries=(5, 7), heads_q=24, window_size=(70, 0), **LATENT),
    CacheCase("rows_with_leftpad", (150, 70), leftpad=(9, 70), page_size=16, heads_q=8, dtype=torch.float16, **LATENT),
    CacheCase("rows_no_rope", (90, 140), page_size=1, heads_q=64, head_dim=512, head_dim_v=512, in_k=True),
    # 8-bit rows, which a warpgroup converts: rows of pages of any size.
    CacheCase("bytes", (20, 200, 1), capacity=200, heads_q=16, fp8="both", **LATENT),
    CacheCase("bytes_in_pages", (65, 330), capacity=384, heads_q=16, page_size=64, fp8="tensor", sink=True, **LATENT),
    CacheCase("bytes_of_many_heads", (140,), heads_q=128, page_size=16, dtype=torch.float16, fp8="tensor", **LATENT),
    CacheCase("single_rows", (150, 70), leftpad=(9, 70), page_size=1, heads_q=8, fp8="tensor", int8=True, **LATENT),
    CacheCase("bytes_appended", (61, 0), queries=4, new=4, heads_q=16, page_size=5, fp8="tensor", **LATENT),
    CacheCase(
        "bytes_of_many_queries", (300, 30), capacity=320, queries=5, heads_q=24, page_size=64, fp8="tensor", **LATENT
    ),
    CacheCase("rows_of_656_bytes", (20, 200, 1), capacity=200, heads_q=16, fp8="rows", **LATENT),
    CacheCase(
        "such_rows_in_pages",
        (65, 330),
        capacity=384,
        queries=3,
        heads_q=40,
        page_size=64,
        fp8="rows",
        sink=True,
        **LATENT,
    ),
    CacheCase("such_single_rows", (150, 70), leftpad=(9, 70), page_size=1, heads_q=8, fp8="rows", **LATENT),
    CacheCase("such_rows_appended", (61, 0), queries=4, new=4, heads_q=16, page_size=5, fp8="rows", **LATENT),
    CacheCase("bytes_no_rope", (90, 40), heads_q=16, head_dim=512, head_dim_v=512, in_k=True, fp8="tensor"),
)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, seed):
    built = build(case, seed)
    for schedule in random.Random(seed).sample(SCHEDULES, 2):
        with emulate("sm_90a", sms=4, seed=seed, schedule=schedule):
            result = built.call(backend="sm90")
        built.assert_right(result, f"{schedule}, seed {seed}")


@pytest.mark.rotates(3)
@pytest.mark.parametrize("splits, page_size", [(3, 64), (3, 1), pytest.param(7, 64, marks=pytest.mark.soak)])
def test_parts_of_the_keys(splits, page_size, seed):
    """More parts than one sequence has blocks."""
    case = CacheCase("parts", (200, 31, 0), capacity=240, heads_q=16, page_size=page_size, sink=True, **LATENT)
    built = build(case, seed)
    with emulate("sm_90a", sms=8, seed=seed, schedule="adversarial"):
        result = built.call(backend="sm90", num_splits=splits)
    built.assert_right(result, f"seed {seed}")


@pytest.mark.rotates(3)
def test_maxima_that_grow_from_block_to_block(seed):
    """Keys are visited from the last to the first. Each block's largest score is far above that of the block before, so
    that each warpgroup rescales O for its own blocks and for the other's."""
    built = build(CacheCase("growing", (230,), capacity=256, heads_q=16, page_size=64, **LATENT), seed)
    k, i = built.arguments["k_cache"], built.problem.inputs
    factor = torch.linspace(30, 1, 230).view(-1, 1, 1)
    grown = (i.k.float() * factor).to(i.k.dtype)
    table = built.arguments["page_table"][0]
    for row in range(230):
        k[table[row // 64], row % 64] = grown[row]
    built.problem = dataclasses.replace(built.problem, inputs=i._replace(k=grown, v=grown[..., :512]))
    built.after = {"k_cache": k.clone(), "v_cache": k[..., :512].clone()}
    with emulate("sm_90a", sms=2, seed=seed, schedule="random"):
        result = built.call(backend="sm90")
    built.assert_right(result, f"seed {seed}")


@pytest.mark.rotates(3)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_queries_beyond_float16_beside_8bit_rows(softcap, seed):
    """Rows of Q get scales of their own."""
    built = build_beyond_float16(CacheCase("far", (150,), heads_q=4, fp8="tensor", softcap=softcap, **LATENT), seed)
    with emulate("sm_90a", sms=2, seed=seed):
        result = built.call(backend="sm90")
    built.assert_right(result, f"seed {seed}")


SPEC = AttentionSpec(
    torch.bfloat16,
    576,
    512,
    128,
    1,
    0.1,
    window_right=0,
    has_seqused_k=True,
    cache=CacheSpec(page_size=64),
    v_in_k=True,
)


@pytest.mark.parametrize(
    "changes, hopper, blackwell",
    [
        ({}, "sm90", "sm100"),
        (dict(v_in_k=False), "sm90", "sm100"),
        (dict(head_dim_v=256), "sm90", "sm100"),
        (dict(cache=CacheSpec(page_size=1)), "sm90", "sm100"),
        (dict(cache=CacheSpec(page_size=64, has_leftpad=True)), "sm90", "sm80"),
        (dict(cache=CacheSpec(page_size=1), v_in_k=False), "sm80", "sm100"),
        (dict(cache=CacheSpec(page_size=64, dtype=torch.int8)), "sm90", "sm100"),
        (dict(cache=CacheSpec(page_size=1, has_leftpad=True, dtype=torch.float8_e4m3fn)), "sm90", "sm100"),
        (dict(cache=CacheSpec(dtype=torch.float8_e4m3fn), head_dim_v=256), "sm80", "sm100"),
        (dict(cache=None), "sm90", "sm100"),
    ],
    ids=str,
)
def test_what_it_takes(changes, hopper, blackwell):
    """Beside it, what the kernels of wide heads take: on Hopper a V of its own, on Blackwell both."""
    spec = dataclasses.replace(SPEC, **changes)
    assert [dispatch.select(spec, chip_by_number(number)).name for number in (90, 100)] == [hopper, blackwell]


def test_a_cta_takes_several_tiles_of_single_rows():
    """But parts of the keys are one of a CTA, and so are tiles whose keys TMA loads."""
    chip, extent = chip_by_number(90), ProblemSize(4096, 1, 2048)
    single = dataclasses.replace(SPEC, cache=CacheSpec(page_size=1))
    assert dispatch.plan(single, extent, chip)._forward.cfg.persistent
    assert not dispatch.plan(SPEC, extent, chip)._forward.cfg.persistent
    parts = dispatch.plan(single, ProblemSize(4, 1, 1 << 15), chip)._forward
    assert parts.splits > 1 and not parts.cfg.persistent


def test_it_says_what_it_waits_for():
    plan = dispatch.plan(SPEC, ProblemSize(4, 1, 1 << 15), chip_by_number(90))
    assert "64 x 64, 64 heads packed, keys in" in plan.describe()
    assert plan.progress == "forward: a CTA waits for no other CTA"


def test_a_view_of_the_cache_is_recognised(seed):
    """By the caller's tensors: the memory of k_cache's first columns, not a copy of them."""
    built = build(CacheCase("view", (70,), heads_q=16, page_size=64, **LATENT), seed)
    arguments = built.arguments | dict(backend="sm90")
    copy = dict(v_cache=arguments["k_cache"][..., :512].clone())
    with emulate("sm_90a", sms=2, seed=seed) as gpu:
        for caches in 3 * [_caches(arguments), copy]:  # whatever call was the last
            assert fa4.flash_attn_with_kvcache(**arguments | caches).shape == (1, 1, 16, 512)
        kernels = [launch.entry.split("_")[2] for launch in gpu.launches if "combine" not in launch.entry]
    assert kernels == 3 * ["latent", "widest"]


@pytest.mark.rotates(3)
@pytest.mark.parametrize("is_view", [True, False])
def test_lists_of_latents(is_view, seed):
    """A v that is a view of k is recognised; a copy runs kernels that load both. Lists of one block, of several, and
    none."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 4, 128, 576, generator=gen).bfloat16()
    k = torch.randn(1, 300, 1, 576, generator=gen).bfloat16()
    indices = torch.stack([torch.randperm(300, generator=gen)[:200] for _ in range(4)]).view(1, 4, 1, 200).int()
    counts = torch.tensor([200, 60, 0, int(torch.randint(65, 200, (1,), generator=gen))]).view(1, 4, 1).int()
    sink = torch.randn(128, generator=gen)
    v = k[..., :512] if is_view else k[..., :512].clone()
    options = dict(counts=counts, causal=True, return_lse=True)
    with emulate("sm_90a", sms=3, seed=seed, schedule=random.Random(seed).choice(SCHEDULES)) as gpu:
        out, lse = fa4.sparse_attention(q, k, v, indices, sink=sink, **options)
    assert ("latent" in gpu.launches[-1].entry) == is_view
    wide = (x.double() for x in (q, k, v))
    exact, exact_lse = fa4.sparse_attention(*wide, indices, sink=sink.double(), **options)
    same, _ = fa4.sparse_attention(q, k, v, indices, sink=sink, backend="torch", **options)
    errors = [(x.double() - exact).norm() for x in (out, same)]
    assert errors[0] <= 2 * errors[1], f"seed {seed}: {errors}"
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def _caches(arguments):
    return dict(v_cache=arguments["k_cache"][..., :512])
