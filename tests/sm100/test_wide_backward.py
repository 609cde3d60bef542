"""The Blackwell backward of head dims above 128 on the emulated chip: three kernels, each of one gradient."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES

from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec
from fa4.sm100.bwd import plan
from fa4.sm100.bwd.tiles import WIDE_PAIR, WIDE_SINGLE, tiles_for
from fa4.sm100.bwd.wide.kernel import channels, parts, smem_map, tmem_map
from fa4.sm100.plan import Plan
from tests.emulated import Kernels, bits, check_gradients, given, judge_gradients
from tests.poisoned import poison_unused

KERNELS = Kernels("sm100", "sm_100a", Plan)
ROWS = pytest.mark.parametrize("tiles", [WIDE_SINGLE, WIDE_PAIR], ids=["single", "pair"])
PACKED = Case(
    "packed",
    lengths=((130, 140), (60, 300), (7, 9), (0, 5), (9, 0)),
    seqused=((129, 130), (50, 257), (7, 3), (0, 2), (3, 0)),
    padding=20,
    heads_q=4,
    heads_kv=2,
    head_dim=256,
    causal=True,
    sink=True,
)


@pytest.mark.rotates(6)
@pytest.mark.parametrize(
    ("dims", "tiles"),
    [((256, 256), WIDE_PAIR), ((136, 200), WIDE_PAIR), ((72, 256), WIDE_SINGLE), ((160, 64), WIDE_SINGLE)],
    ids=str,
)
def test_gradients_of_sequences_of_any_length(dims, tiles, seed):
    """Columns of dV and dK that are whole panels and that are not; nothing unused is read."""
    problem = poison_unused(cases.make(replace(PACKED, head_dim=dims[0], head_dim_v=dims[1]), seed))
    check_gradients(KERNELS, problem, seed, SCHEDULES[seed % len(SCHEDULES)], tiles)


NAMED = (
    (Case("softcap", seqlen_q=300, seqlen_k=420, head_dim=256, window_size=(150, 60), softcap=15.0), WIDE_PAIR),
    (Case("no_key", seqlen_q=400, seqlen_k=200, head_dim=192, causal=True, dtype=torch.float16), WIDE_SINGLE),
    (Case("one_query", seqlen_q=1, seqlen_k=300, head_dim=256), WIDE_SINGLE),
    (Case("one_key", seqlen_q=300, seqlen_k=1, head_dim=256), WIDE_PAIR),
    (Case("logits_1e4", seqlen_q=192, seqlen_k=192, head_dim=256, logits=1e4, causal=True), WIDE_PAIR),
)  # fmt: skip


@pytest.mark.rotates(6)
@pytest.mark.parametrize(("case", "tiles"), NAMED, ids=str)
def test_gradients_of_named_case(case, tiles, seed):
    check_gradients(KERNELS, cases.make(case, seed), seed, SCHEDULES[seed % len(SCHEDULES)], tiles)


@pytest.mark.rotates(2)
@ROWS
def test_gradients_have_the_same_bits_in_any_order_of_events(tiles, seed):
    """No kernel adds across CTAs: also without `deterministic`."""
    case = Case("causal", seqlen_q=300, seqlen_k=600, heads_q=2, heads_kv=1, head_dim=256, causal=True)
    problem = cases.make(case, seed)
    saved = given(problem)
    results = [
        KERNELS.gradients(problem, seed + i, schedule, tiles, sms, saved)
        for i, (schedule, sms) in enumerate(zip(SCHEDULES, (2, 4, 8)))
    ]
    assert len({bits(grads) for grads in results}) == 1, f"seed {seed}"
    cases.assert_right(judge_gradients(problem, results[0], saved), f"seed {seed}")


@pytest.mark.parametrize(
    ("dims", "sms", "row"),
    [((256, 256), 148, WIDE_PAIR), ((64, 136), 148, WIDE_PAIR), ((256, 256), 1, WIDE_SINGLE)],
    ids=str,
)
def test_pairs_serve_wide_heads_on_two_multiprocessors(dims, sms, row):
    spec = AttentionSpec(torch.bfloat16, *dims, heads_q=1, heads_kv=1, softmax_scale=1.0)
    assert tiles_for(spec, chip_by_number(100, sms=sms)).row is row


@ROWS
def test_every_wide_head_dim_fits_the_chip(tiles):
    chip = chip_by_number(100)
    pairs = [(d, d_v) for d in range(136, 257, 8) for d_v in (8, d, 256)] + [(8, 136), (64, 256)]
    for head_dim, head_dim_v in pairs:
        spec = AttentionSpec(torch.bfloat16, head_dim, head_dim_v, heads_q=1, heads_kv=1, softmax_scale=1.0)
        for cfg in parts(plan.configure(spec, chip, True, tiles)):
            assert smem_map(cfg, channels(cfg)).nbytes <= chip.smem_per_block
            assert tmem_map(cfg).ranges["D"].columns >= cfg.grad_tile.columns
