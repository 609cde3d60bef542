"""Caches on the chip that is here: every named case, long ones, a captured graph replayed with other lengths, results
that the batch cannot change, and no wait for the device."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from tests.gpu.offered import needs_gpu
from tests.kvcache.named import CASES
from tests.kvcache.problem import CacheCase, build, shared_front

pytestmark = needs_gpu

GEMMA = dict(capacity=4096, heads_q=8, heads_kv=4, head_dim=256, window_size=(1023, 0))
LATENT = dict(head_dim=576, head_dim_v=512, in_k=True)
LONG = (
    CacheCase("long", (100_000, 31_337), capacity=100_352, page_size=64, heads_q=8, heads_kv=2, head_dim=128),
    CacheCase("long_dense", (100_000, 777), capacity=100_352, heads_q=8, heads_kv=2, head_dim=128, new=1),
    CacheCase("long_chunk", (30_000, 9), capacity=32_768, page_size=256, queries=512, new=512, head_dim=128),
    CacheCase(
        "long_fp8", (100_000, 777), capacity=100_352, page_size=64, heads_q=8, heads_kv=2, head_dim=128, fp8="both"
    ),
    CacheCase("long_fp8_chunk", (30_000, 9), capacity=32_768, queries=512, new=512, head_dim=128, fp8="heads"),
    CacheCase(
        "gpt_oss",
        (1000, 3, 130, 4090),
        new=1,
        capacity=4096,
        page_size=16,
        heads_q=64,
        heads_kv=8,
        sink=True,
        window_size=(127, 0),
        rotary="halves",
        rotary_dim=64,
    ),
    CacheCase("gemma_2", (1000, 3, 4090), new=1, page_size=16, softcap=50.0, **GEMMA),
    CacheCase("gemma_3_chunk", (1000, 3, 3000), new=300, queries=300, page_size=64, **GEMMA),
    CacheCase("latent", (1000, 0, 4090), page_size=64, heads_q=16, sink=True, capacity=4096, **LATENT),
    CacheCase("latent_heads", (5000, 70, 9), queries=3, new=3, page_size=64, heads_q=128, capacity=5120, **LATENT),
    CacheCase("latent_chunk", (3000, 600), queries=200, page_size=16, heads_q=8, capacity=3200, **LATENT),
    CacheCase("many_fp8", tuple(range(0, 2560, 20)), capacity=2560, page_size=16, heads_q=8, head_dim=128, fp8="heads"),
    CacheCase("many", tuple(range(0, 2560, 20)), capacity=2560, page_size=16, heads_q=8, heads_kv=1, head_dim=128),
)


@pytest.mark.parametrize("backend", ["auto", "sm80"])
@pytest.mark.parametrize("case", [*CASES.values(), *LONG], ids=str)
def test_named_case(case, backend, seed):
    built = build(case, seed, "cuda")
    if case.shared:
        shared_front(built)
    built.assert_right(built.call(backend=backend), f"{backend}, seed {seed}")


@pytest.mark.parametrize("fp8", [None, "both"])
def test_a_captured_graph_is_replayed_with_other_lengths(fp8, seed):
    """Lengths, pages, queries, new rows and descales change in place; the plan and the launches stay."""
    lengths = (0, 100, 1000, 33)
    case = CacheCase("graph", lengths, new=2, queries=2, capacity=1024, page_size=16, rotary="halves", fp8=fp8)
    built = build(case, seed, "cuda")
    a = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in built.arguments.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # for the tensors above
    with torch.cuda.stream(side):  # compile outside of the capture
        fa4.flash_attn_with_kvcache(**a)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa4.flash_attn_with_kvcache(**a, return_lse=True)
    for lengths in ((1022, 0, 15, 16), (5, 999, 64, 500)):
        built = build(replace(case, lengths=lengths), seed + lengths[0], "cuda")
        for name, x in built.arguments.items():
            if isinstance(x, torch.Tensor):
                a[name].copy_(x)
        graph.replay()
        built.ran = a
        built.assert_right((out.flatten(0, 1), lse.transpose(0, 1).flatten(1)), f"{lengths}, seed {seed}")


@pytest.mark.parametrize("fp8", [None, "heads"])
@pytest.mark.parametrize("page_size", [None, 16, 128], ids=str)
def test_a_sequence_gives_the_same_bits_in_every_batch(page_size, fp8, seed):
    """batch_invariant: alone, among others, and among so many that no block would split its keys."""
    lengths = tuple(torch.randint(1, 4000, (200,), generator=torch.Generator().manual_seed(seed)).tolist())
    case = CacheCase("batch", lengths, capacity=4096, page_size=page_size, heads_q=4, head_dim=128, fp8=fp8)
    built = build(case, seed, "cuda")
    out, lse = built.call(batch_invariant=True)
    for rows in (slice(0, 1), slice(7, 8), slice(100, 117)):
        some = {name: built.arguments[name][rows] for name in ("q", "cache_seqlens")}
        others = ("page_table",) if page_size else ("k_cache", "v_cache")
        some |= {name: built.arguments[name][rows] for name in others}
        got = built.call(batch_invariant=True, **some)
        assert torch.equal(got[0], out[rows]) and torch.equal(got[1], lse[:, rows]), f"seed {seed}"


@pytest.mark.parametrize("name", ["append_and_rotate_in_pages", "fp8_append_and_rotate"])
def test_nothing_waits_for_the_device(name, seed):
    built = build(CASES[name], seed, "cuda")
    built.call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        built.call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
