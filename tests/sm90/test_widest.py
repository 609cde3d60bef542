"""Hopper's forward of head dims above 256, by pairs of CTAs with the same rows, on the emulated chip."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from warpcheck.machine import SCHEDULES

import fa4
from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import dispatch
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, CacheSpec, ProblemSize
from fa4.sm90.fwd.widest.kernel import channels, smem_map
from fa4.sm90.fwd.widest.plan import Plan, WidestForward
from tests.emulated import Kernels, bits, check_forward
from tests.kvcache.problem import CacheCase, build
from tests.widest import NAMED, PACKED

KERNELS = Kernels("sm90", "sm_90a", Plan)
CHIP = chip_by_number(90)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("dims", [(512, 512), (320, 264), (576, 512), (64, 328), (264, 16)], ids=str)
def test_sequences_of_any_length(dims, seed):
    """Columns that are whole panels and that are not; V of fewer panels than CTAs."""
    check_forward(KERNELS, replace(PACKED, head_dim=dims[0], head_dim_v=dims[1]), seed)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("case", NAMED, ids=str)
def test_named_case(case, seed):
    """logits_1e4: row maxima grow, so O is rescaled between products."""
    check_forward(KERNELS, case, seed)


def test_results_have_the_same_bits_in_any_order_of_events(seed):
    problem = cases.make(Case("causal", seqlen_q=150, seqlen_k=330, head_dim=320, causal=True, logits=30.0), seed)
    results = {
        bits(KERNELS.forward(problem, seed + i, schedule, None, sms))
        for i, (schedule, sms) in enumerate(zip(SCHEDULES, (2, 4, 8)))
    }
    assert len(results) == 1, f"seed {seed}"


WIDE = dict(head_dim=512, head_dim_v=320)
CACHES = (
    CacheCase("pages_within_a_part", (330, 0, 150), capacity=336, heads_q=8, page_size=8, sink=True, **WIDE),
    CacheCase("pages_of_parts", (40, 150), capacity=192, heads_q=6, heads_kv=2, page_size=48, queries=3, **WIDE),
    CacheCase("window", (90, 230), capacity=256, queries=(3, 7), heads_q=16, window_size=(50, 0), page_size=64, **WIDE),
    CacheCase("appended", (61, 0), queries=4, new=4, heads_q=4, page_size=256, causal=True, **WIDE),
)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("case", CACHES, ids=str)
def test_cache(case, seed):
    built = build(case, seed)
    with emulate("sm_90a", sms=4, seed=seed, schedule=SCHEDULES[seed % len(SCHEDULES)]):
        result = built.call(backend="sm90")
    built.assert_right(result, f"seed {seed}")


@pytest.mark.parametrize("splits", [3, pytest.param(7, marks=pytest.mark.soak)])
def test_parts_of_the_keys(splits, seed):
    """More parts than one sequence has blocks."""
    built = build(CacheCase("parts", (500, 31, 0), capacity=512, heads_q=16, page_size=64, sink=True, **WIDE), seed)
    with emulate("sm_90a", sms=8, seed=seed, schedule="adversarial"):
        result = built.call(backend="sm90", num_splits=splits)
    built.assert_right(result, f"seed {seed}")


def test_every_head_dim_fits_the_chip():
    """A ring holds what its readers hold at a time, and a part more; see `Sm90WidestConfig`."""
    for d in (8, 64, *range(264, 584, 8)):
        for dv in (8, 256, 264, 320, 512):
            if max(d, dv) > 256:
                spec = AttentionSpec(torch.bfloat16, d, dv, 4, 2, 0.1)
                cfg = WidestForward(spec, ProblemSize(1, 512, 4096), CHIP).cfg
                assert smem_map(cfg, channels(cfg)).nbytes <= CHIP.smem_per_block, (d, dv)


@pytest.mark.parametrize("heads, queries, packed", [((128, 1), 1, 64), ((6, 2), 64, 3), ((6, 2), 65, 1)])
def test_heads_of_a_tile(heads, queries, packed):
    """If the queries of a head fill at most half of a tile, it has several heads."""
    spec = AttentionSpec(torch.bfloat16, 512, 512, *heads, 0.1)
    assert WidestForward(spec, ProblemSize(8, queries, 8192), CHIP).cfg.packed_heads == packed


@pytest.mark.parametrize(
    "changes, chosen",
    [
        ({}, "sm90"),
        (dict(cache=CacheSpec(page_size=64)), "sm90"),
        (dict(cache=CacheSpec(page_size=4)), "sm80"),
        (dict(cache=CacheSpec(page_size=64, dtype=torch.float8_e4m3fn)), "sm80"),
        (dict(head_dim=576, head_dim_v=576), "sm80"),
    ],
    ids=str,
)
def test_what_it_takes(changes, chosen):
    spec = replace(AttentionSpec(torch.bfloat16, 512, 512, 4, 2, 0.1, has_seqused_k=True), **changes)
    explained = dispatch.explain(spec, ProblemSize(2, 1, 4096), CHIP)
    assert explained.chosen == chosen
    if chosen == "sm90":
        assert "128 x 64, pairs of CTAs" in explained.tiles
        assert explained.progress == "forward: a CTA waits for CTAs of its own cluster"


def test_a_mask_function_holds_in_partial_blocks_alone(seed):
    """As in torch's flex_attention: the mask here says no in the full block."""
    from torch.nn.attention.flex_attention import BlockMask

    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, 2, 264, generator=generator).bfloat16() for n in (128, 384, 384))
    partial, full = (torch.tensor([[[[i, 0, 0]]]], dtype=torch.int32) for i in (0, 2))
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        one,
        partial,
        one,
        full,
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 50,
        seq_lengths=(128, 384),
    )
    with emulate("sm_90a", sms=2, seed=seed):
        assert dispatch.select(AttentionSpec(q.dtype, 264, 264, 2, 2, 264**-0.5), CHIP, "auto").name == "sm90"
        out = fa4.flash_attn_func(q, k, v, block_mask=mask, backend="sm90")
    visible = torch.cat((torch.arange(50), torch.arange(256, 384)))
    q, k, v = (x[0].double().transpose(0, 1) for x in (q, k[:, visible], v[:, visible]))
    exact = torch.softmax(q @ k.transpose(1, 2) * 264**-0.5, -1) @ v
    assert (out[0].transpose(0, 1) - exact).norm() < 0.01 * exact.norm(), f"seed {seed}"
