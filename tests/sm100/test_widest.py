"""The Blackwell kernels of head dims above 256 on the emulated chip: pairs with 64 rows in each CTA."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES

from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, CacheSpec, ProblemSize
from fa4.sm100 import stages, tmem
from fa4.sm100.bwd.plan import Sm100Backward
from fa4.sm100.bwd.wide.kernel import parts
from fa4.sm100.bwd.widest import kernel as backward
from fa4.sm100.fwd.widest import kernel as forward
from fa4.sm100.fwd.widest.plan import WidestForward
from fa4.sm100.plan import Plan
from tests.emulated import Kernels, bits, check_forward, check_gradients, given, judge_gradients
from tests.kvcache.problem import CacheCase, build
from tests.poisoned import poison_unused
from tests.widest import NAMED, PACKED

KERNELS = Kernels("sm100", "sm_100a", Plan)
CHIP, MANY = chip_by_number(100), ProblemSize(1, 4096, 4096)


@pytest.mark.rotates(7)
@pytest.mark.parametrize("dims", [(512, 512), (320, 264), (576, 520), (64, 328)], ids=str)
def test_sequences_of_any_length(dims, seed):
    """Columns that are whole panels and that are not, in both directions; nothing unused is read."""
    case = replace(PACKED, head_dim=dims[0], head_dim_v=dims[1])
    check_forward(KERNELS, case, seed)
    check_gradients(KERNELS, poison_unused(cases.make(case, seed)), seed, SCHEDULES[seed % len(SCHEDULES)])


@pytest.mark.rotates(7)
@pytest.mark.parametrize("case", NAMED, ids=str)
def test_named_case(case, seed):
    """logits_1e4: row maxima grow, so O is rescaled between products."""
    check_forward(KERNELS, case, seed)
    if case.head_dim_v is None or case.heads_q == case.heads_kv:
        check_gradients(KERNELS, cases.make(case, seed), seed, SCHEDULES[seed % len(SCHEDULES)])


def test_gradients_have_the_same_bits_in_any_order_of_events(seed):
    """No kernel adds across CTAs: also without `deterministic`."""
    case = Case("causal", seqlen_q=150, seqlen_k=280, heads_q=2, heads_kv=1, head_dim=512, causal=True)
    problem = cases.make(case, seed)
    saved = given(problem)
    results = [
        KERNELS.gradients(problem, seed + i, schedule, None, sms, saved)
        for i, (schedule, sms) in enumerate(zip(SCHEDULES, (2, 4, 8)))
    ]
    assert len({bits(grads) for grads in results}) == 1, f"seed {seed}"
    cases.assert_right(judge_gradients(problem, results[0], saved), f"seed {seed}")


LATENT = dict(head_dim=576, head_dim_v=512, in_k=True)
CACHES = (
    CacheCase("pages_within_a_stage", (330, 0, 150), capacity=336, heads_q=8, page_size=16, sink=True, **LATENT),
    CacheCase("many_heads", (70, 600), capacity=640, queries=2, heads_q=128, page_size=64, **LATENT),
    CacheCase(
        "window", (90, 430), capacity=448, queries=(3, 7), heads_q=16, window_size=(250, 0), page_size=8, **LATENT
    ),
    CacheCase("own_values", (290, 40), capacity=512, heads_q=6, head_dim=512, head_dim_v=320, page_size=256),
)


@pytest.mark.rotates(7)
@pytest.mark.parametrize("case", CACHES, ids=str)
def test_cache(case, seed):
    built = build(case, seed)
    with emulate("sm_100a", sms=4, seed=seed, schedule=SCHEDULES[seed % len(SCHEDULES)]):
        result = built.call(backend="sm100")
    built.assert_right(result, f"seed {seed}")


@pytest.mark.parametrize("splits", [3, pytest.param(7, marks=pytest.mark.soak)])
def test_parts_of_the_keys(splits, seed):
    """More parts than one sequence has blocks."""
    built = build(CacheCase("parts", (900, 31, 0), capacity=960, heads_q=16, page_size=64, sink=True, **LATENT), seed)
    with emulate("sm_100a", sms=8, seed=seed, schedule="adversarial"):
        result = built.call(backend="sm100", num_splits=splits)
    built.assert_right(result, f"seed {seed}")


def test_every_head_dim_fits_the_chip():
    """Shared memory and tensor memory of all kernels; a ring holds at least three stages."""
    for d in (8, *range(264, 584, 8)):
        for dv in (8, 256, 264, 320, 512, 520, 576):
            if max(d, dv) <= 256:
                continue
            spec = AttentionSpec(torch.bfloat16, d, dv, 4, 2, 0.1, needs_backward=True)
            cfg = WidestForward(spec, ProblemSize(1, 512, 4096), CHIP).cfg
            made = [(forward, cfg, cfg.kv_stages)]
            made += [
                (backward, part, part.ring_stages) for part in parts(Sm100Backward(spec, MANY, CHIP).config(False))
            ]
            for kernel, part, in_ring in made:
                assert kernel.smem_map(part, kernel.channels(part)).nbytes <= CHIP.smem_per_block, (d, dv, part)
                assert kernel.tmem_map(part).end <= tmem.COLUMNS and in_ring >= 3, (d, dv, part)


def test_columns_of_products():
    assert [stages.column_parts(columns) for columns in (8, 128, 264, 512, 576)] == [
        [128], [128], [256, 128], [256, 256], [256, 256, 128],
    ]  # fmt: skip
    assert stages.d_columns(320) == 192


@pytest.mark.parametrize(
    "dims, changes, keys",
    [((512, 512), {}, 256), ((512, 520), {}, 128), ((512, 512), dict(cache=CacheSpec(page_size=64)), 256)],
    ids=str,
)
def test_keys_of_a_block(dims, changes, keys):
    spec = AttentionSpec(torch.bfloat16, *dims, 4, 2, 0.1, **changes)
    assert WidestForward(spec, MANY, CHIP).cfg.tile_n == keys


@pytest.mark.parametrize("heads, packed", [((128, 1), 128), ((16, 1), 16), ((6, 2), 3), ((96, 1), 32), ((65, 1), 1)])
def test_heads_of_a_tile(heads, packed):
    """A CTA's 64 rows hold whole queries, or a pair's 128 rows one."""
    spec = AttentionSpec(torch.bfloat16, 576, 512, *heads, 0.1)
    assert WidestForward(spec, ProblemSize(8, 1, 8192), CHIP).cfg.packed_heads == packed
