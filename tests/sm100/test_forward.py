"""The Blackwell forward on the emulated chip: named cases against the oracle, under several interleavings."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES

import fa4
from fa4.emulator import emulate
from fa4.fwd.l2_groups import even_l2_group
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import device
from fa4.runtime.spec import AttentionSpec, CacheSpec, ProblemSize
from fa4.sm100.fwd import plan
from fa4.sm100.fwd.config import Schedule
from fa4.sm100.fwd.kernel import channels, smem_map
from fa4.sm100.fwd.tiles import ForwardTiles, tiles_for
from fa4.sm100.plan import Plan
from fa4.torch_ops.run import forward
from tests.emulated import (
    SOAK_ONLY,
    Kernels,
    SharedForwardTests,
    check_forward,
    check_forward_under_many_interleavings,
    poison_unused,
)
from tests.sm100.named import CASES

pytestmark = pytest.mark.rotates(5)

KERNELS = Kernels("sm100", "sm_100a", Plan)
# These have kernels to themselves, of parts that others show together or that Hopper's share and show; the soak runs
# them. Half precision is in `test_one_q_tile_a_cta`, unequal lengths and head dims in other cases and pairs, one side's
# used lengths in the launch that is Hopper's too, packed heads in the group of twelve, heads apart in that of three,
# one query of head_dim 128 and many keys in test_few.py, many blocks of keys in the laps of CTAs that stay.
LIKE_OTHERS = {
    "few_queries_many_keys_varlen",
    "fp16",
    "fp16_large_logits",
    "gqa",
    "gqa_packed_short_queries",
    "head_dim_v_larger",
    "many_blocks",
    "mqa",
    "one_by_512",
    "seqused_keys_only",
    "seqused_queries_only",
    "varlen_different_k",
}


class TestShared(SharedForwardTests):
    kernels, row = KERNELS, "dynamic for all others"


@pytest.mark.parametrize("name", sorted(CASES.keys() - SOAK_ONLY - LIKE_OTHERS))
def test_case(name, seed):
    check_forward(KERNELS, CASES[name], seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_case_under_many_interleavings(name, seed):
    check_forward_under_many_interleavings(KERNELS, CASES[name], seed)


def test_schedules_and_thresholds_agree(seed):
    """Work order changes nothing; rescaling at every growth and the order of key blocks change roundings only."""
    problem = cases.make(Case("long", seqlen_q=300, seqlen_k=400, causal=True), seed)
    dynamic = ForwardTiles(polynomial=6, schedule=Schedule.DYNAMIC)  # the same kernel as that of other cases
    rows = (
        dynamic,
        replace(dynamic, schedule=Schedule.SINGLE),
        replace(dynamic, schedule=Schedule.PERSISTENT, rescale_threshold=0.0, sawtooth=True),
    )
    first, second, third = (KERNELS.forward(problem, seed, "random", row) for row in rows)
    for out, lse in (first, third):
        cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


PAIRS = ForwardTiles(polynomial=2, schedule=Schedule.SINGLE, ctas=2)


@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_schedules_of_pairs_agree(head_dims, seed):
    """More tiles than pairs run at a time, so that pairs take over those of others, to the last."""
    d, dv = head_dims
    case = Case("pairs", heads_q=3, heads_kv=1, seqlen_q=700, seqlen_k=300, head_dim=d, head_dim_v=dv, causal=d < 256)
    problem = cases.make(case, seed)
    shape = dict(q_tiles=1, s_stages=2) if dv > 128 else {}
    rows = [
        replace(PAIRS, schedule=schedule, direct_store=d > 128, **shape)
        for schedule in (Schedule.DYNAMIC, Schedule.PERSISTENT, Schedule.SINGLE)
    ]
    first, *others = (KERNELS.forward(problem, seed, "random", row, sms=4) for row in rows)
    cases.assert_right(cases.judge_forward(problem, *first), f"seed {seed}")
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other))
    again = KERNELS.forward(problem, seed + 1, "adversarial", rows[0], sms=2)
    assert all(torch.equal(x, y) for x, y in zip(first, again))


# Ends in the first CTA, in the second, in the first tile and in the second; rows not in use; packed heads; one key.
PACKED = Case(
    "packed",
    heads_q=4,
    heads_kv=2,
    head_dim=128,
    lengths=((300, 390), (0, 5), (9, 1), (7, 0), (520, 140)),
    seqused=((300, 257), (0, 5), (3, 1), (7, 0), (520, 130)),
)


@pytest.mark.parametrize("head_dim", [128, 192])
def test_a_pair_serves_sequences_of_any_length(head_dim, seed):
    problem = poison_unused(cases.make(replace(PACKED, head_dim=head_dim, head_dim_v=128), seed))
    for schedule in ("round_robin", "adversarial"):
        out, lse = KERNELS.forward(problem, seed, schedule, replace(PAIRS, direct_store=head_dim > 128))
        cases.assert_right(cases.judge_forward(problem, out, lse), f"{schedule}, seed {seed}")


def test_a_pair_of_wide_heads_under_many_interleavings(seed):
    """O is not staged, so that Q of 192 columns leaves five stages of K and V."""
    one = dict(heads_q=2, heads_kv=1, lengths=((300, 520),), seqused=((300, 520),))
    problem = cases.make(replace(PACKED, head_dim=192, head_dim_v=128, **one), seed)
    tiles = replace(PAIRS, direct_store=True)
    results = [KERNELS.forward(problem, seed + i, schedule, tiles) for i in range(2) for schedule in SCHEDULES]
    cases.assert_right(cases.judge_forward(problem, *results[0]), f"seed {seed}")
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), f"seed {seed}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seqlen_k", [300, 900])
def test_a_pair_of_wide_heads_ends_at_the_diagonal(schedule, seqlen_k, seed):
    """The diagonal crosses all four row blocks of a work tile; of short keys the first rows see none."""
    case = Case("causal", seqlen_q=700, seqlen_k=seqlen_k, head_dim=192, head_dim_v=128, heads_q=2, causal=True)
    problem = cases.make(case, seed)
    tiles = replace(PAIRS, direct_store=True)
    out, lse = KERNELS.forward(problem, seed, schedule, tiles)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"{schedule}, seed {seed}")


WIDE_PAIRS = replace(PAIRS, q_tiles=1, s_stages=2)
WIDE = replace(WIDE_PAIRS, ctas=1, tile_n=64, direct_store=True)


@pytest.mark.parametrize(
    "tiles", [WIDE_PAIRS, replace(WIDE_PAIRS, direct_store=True), WIDE], ids=["tma", "pair", "one"]
)
@pytest.mark.parametrize("dims", [(256, 256), (136, 200), (160, 64), (72, 168)], ids=str)
def test_wide_heads_of_sequences_of_any_length(tiles, dims, seed):
    """Halves of V that are whole panels and that are not."""
    problem = poison_unused(cases.make(replace(PACKED, head_dim=dims[0], head_dim_v=dims[1]), seed))
    out, lse = KERNELS.forward(problem, seed, "adversarial", tiles)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


@pytest.mark.parametrize("head_dim_v", [8, 136])
def test_no_box_of_v_lies_outside(head_dim_v, seed):
    """Padded columns of the second CTA of a pair: the map of a sequence may begin outside every allocation."""
    case = Case("unused", seqlen_q=300, seqlen_k=300, seqused=((None, 98),), head_dim=256, head_dim_v=head_dim_v)
    problem = poison_unused(cases.make(case, seed))
    out, lse = KERNELS.forward(problem, seed, "adversarial", replace(WIDE_PAIRS, direct_store=True))
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


@pytest.mark.parametrize("tiles", [replace(WIDE_PAIRS, direct_store=True), WIDE], ids=["pair", "one"])
def test_wide_heads_under_many_interleavings(tiles, seed):
    """One key block, several, and several work tiles of a CTA; O is scaled again and again."""
    case = Case("wide", seqlen_q=700, seqlen_k=600, head_dim=256, heads_q=2, causal=True)
    problem = cases.make(case, seed)
    problem.inputs.k.mul_(4)
    results = []
    for schedule in SCHEDULES:
        for i in range(2):
            row = replace(tiles, schedule=(Schedule.SINGLE, Schedule.PERSISTENT)[i], rescale_threshold=0.0)
            results.append(KERNELS.forward(problem, seed + i, schedule, row))
    cases.assert_right(cases.judge_forward(problem, *results[0]), f"seed {seed}")
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), f"seed {seed}"


@pytest.mark.parametrize("seqlen_q", [40, 260])
def test_parts_of_wide_heads(seqlen_q, seed):
    problem = cases.make(Case("parts", batch=1, seqlen_q=seqlen_q, seqlen_k=2100, head_dim=256, heads_q=2), seed)
    with emulate(KERNELS.chip, sms=24):
        assert KERNELS.made(problem.spec, problem.inputs)._forward.cfg.split
    out, lse = KERNELS.forward(problem, seed, sms=24)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


def test_a_pair_hands_tensor_memory_over_without_a_release(seed):
    """mbarrier.arrive.release.cluster compiles to a MEMBAR.ALL.GPU, and stood twice in each step of softmax."""
    problem = cases.make(CASES["pair"], seed)
    with emulate("sm_100a", sms=2, timing=True) as gpu:
        forward(problem.inputs, problem.spec, KERNELS.made(problem.spec, problem.inputs))
    arrivals = {i.opcode for i in gpu.launches[-1].record.kernel.instructions if "mbarrier.arrive" in i.opcode}
    assert any(".relaxed.cluster" in opcode for opcode in arrivals)
    assert not any(".release.cluster" in opcode for opcode in arrivals), arrivals


def test_one_q_tile_a_cta(seed):
    """How many Q tiles take turns is the configuration's: roles, channels and memory follow. All exponentials are
    polynomials here; some are everywhere else."""
    case = Case("one", seqlen_q=150, seqlen_k=260, head_dim=128, dtype=torch.float16, causal=True)
    problem = cases.make(case, seed)
    tiles = ForwardTiles(polynomial=16, schedule=Schedule.SINGLE, q_tiles=1)
    out, lse = KERNELS.forward(problem, seed, "random", tiles)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


@pytest.mark.parametrize(
    ("fit", "pairs", "l2_group"), [(6, 32, 4), (100, 512, 64), (25, 16, 16), (3, 16, 2), (5, 7, 5), (0, 8, 1)]
)
def test_sections_are_as_many_as_fit_and_of_one_size_where_that_is_near(fit, pairs, l2_group):
    assert even_l2_group(fit, pairs) == l2_group


@pytest.mark.parametrize(
    "number, changes, polynomial, schedule, ctas",
    [
        (100, dict(), 6, Schedule.PERSISTENT, 2),
        (100, dict(varlen=True), 6, Schedule.SINGLE, 2),
        (100, dict(window_right=0), 6, Schedule.DYNAMIC, 2),
        (100, dict(window_left=100, window_right=0), 6, Schedule.PERSISTENT, 1),
        (100, dict(head_dim=64, head_dim_v=64, varlen=True), 6, Schedule.SINGLE, 1),
        (103, dict(varlen=True), 0, Schedule.SINGLE, 2),  # the chip decides about exp2 alone
        (103, dict(window_right=0), 0, Schedule.DYNAMIC, 2),
        (100, dict(window_right=0, head_dim=64, head_dim_v=64), 6, Schedule.DYNAMIC, 1),
        (100, dict(window_right=0, head_dim=192), 6, Schedule.DYNAMIC, 2),
    ],
)
def test_chip_and_problem_decide_about_different_columns(number, changes, polynomial, schedule, ctas):
    spec = replace(AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1), **changes)
    tiles = tiles_for(spec, device.chip_by_number(number)).row
    assert (tiles.polynomial, tiles.schedule, tiles.ctas) == (polynomial, schedule, ctas)


def test_beside_other_kernels_no_tile_waits_for_a_cta_that_starts_late():
    chip = replace(device.chip_by_number(100), shared=True)
    for head_dim, flags in ((64, {}), (128, {}), (128, dict(window_left=100)), (256, {})):
        spec = replace(AttentionSpec(torch.bfloat16, head_dim, head_dim, 4, 2, 0.1), **flags)
        assert tiles_for(spec, chip).row.schedule is Schedule.DYNAMIC


@pytest.mark.parametrize(
    "changes, rows, ctas",
    [
        (dict(), 4096, 2),
        (dict(), 257, 2),
        (dict(), 256, 1),
        (dict(varlen=True), 2049, 2),
        (dict(varlen=True), 2048, 1),
        (dict(window_left=5), 4096, 1),
        (dict(window_right=5), 4096, 1),
        (dict(window_right=0), 4096, 1),
        (dict(head_dim=192), 4096, 2),
        (dict(head_dim=192, window_right=0), 513, 2),
        (dict(head_dim=192, window_right=0), 512, 1),
        (dict(head_dim=192, window_right=5), 4096, 1),
        (dict(head_dim=192, window_right=0, window_left=99), 4096, 1),
        (dict(head_dim=192, window_right=0, varlen=True), 4096, 1),
        (dict(head_dim=192, head_dim_v=192), 4096, 2),
        (dict(head_dim=256, head_dim_v=256, window_right=0), 513, 2),
        (dict(head_dim=256, head_dim_v=256, window_right=0), 512, 1),
        (dict(head_dim=256, head_dim_v=256, window_right=0, window_left=99), 2048, 1),
        (dict(head_dim=256, head_dim_v=256, window_right=0, varlen=True), 2048, 1),
        (dict(head_dim=256, head_dim_v=256, cache=CacheSpec()), 4096, 1),
        (dict(head_dim_v=120), 4096, 1),
        (dict(cache=CacheSpec()), 4096, 1),
    ],
    ids=str,
)
def test_two_ctas_share_a_tile_where_it_is_full(changes, rows, ctas):
    spec = replace(AttentionSpec(torch.bfloat16, 128, 128, 4, 4, 0.1), **changes)
    assert tiles_for(spec, device.chip_by_number(100), ProblemSize(1, rows, 4096)).row.ctas == ctas


@pytest.mark.parametrize("number", [100, 103])
def test_every_head_dim_fits_the_chip(number):
    chip = device.chip_by_number(number)
    pairs = [(d, dv) for d in range(8, 129, 8) for dv in (8, d, 128)] + [(192, 128)]
    for head_dim, head_dim_v in pairs:
        spec = AttentionSpec(torch.bfloat16, head_dim, head_dim_v, 4, 2, 0.1)
        cfg = plan.configure(spec, chip)
        assert cfg.kv_stages >= 2
        assert smem_map(cfg, channels(cfg)).nbytes <= chip.smem_per_block


def test_a_pair_refuses_two_s_of_two_q_tiles():
    spec = AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1)
    pair = plan.configure(spec, device.chip_by_number(100))
    assert pair.ctas == 2
    with pytest.raises(ValueError, match="two Q tiles take one S each"):
        replace(pair, s_stages=2)


SCATTERED = {"cache": CacheSpec(page_size=5)}


@pytest.mark.parametrize(
    "problem, changes, complaint",
    [
        ({"heads_q": 6}, {"packed_heads": 3}, "3 packed heads do not divide 128"),
        (SCATTERED, {"direct_store": False}, "takes one Q tile, stores O directly"),
        (SCATTERED, {"q_tiles": 2}, "takes one Q tile, stores O directly"),
        (SCATTERED, {"per_sm": 2}, "takes one Q tile, stores O directly"),
        (SCATTERED, {"smem_bytes": 64 << 10}, "needs six stages"),
        ({}, {"split": True, "ctas": 1}, "parts are float32"),
    ],
)
def test_a_configuration_refuses(problem, changes, complaint):
    """What it refuses is one step away from what the table gives."""
    spec = replace(AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1), **problem)
    given = plan.configure(spec, device.chip_by_number(100))
    with pytest.raises(ValueError, match=complaint):
        replace(given, **changes)


@pytest.mark.parametrize("window", [(None, None), (None, 0), (400, 0)], ids=["full", "causal", "window"])
def test_loads_on_sm_103_find_the_largest_score(window, seed):
    """Of blocks without a mask; others have their maximum after it."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, rows, 2, 64, generator=generator).to(torch.bfloat16) for rows in (300, 700, 700))
    with emulate("sm_103a", sms=4, seed=seed) as gpu:
        out, lse = fa4.flash_attn_func(q, k, v, window_size=window, return_lse=True)
    executed = {opcode for launch in gpu.launches for opcode in launch.instructions}
    loads = "tcgen05.ld.red.sync.aligned.32x32b.x32.max.f32", "tcgen05.ld.sync.aligned.32x32b.x32.b32"
    assert executed.issuperset(loads)
    exact, exact_lse = fa4.flash_attn_func(q.double(), k.double(), v.double(), window_size=window, return_lse=True)
    same, _ = fa4.flash_attn_func(q, k, v, window_size=window, return_lse=True, backend="torch")
    assert (out - exact).abs().max() <= 2 * (same - exact).abs().max(), f"seed {seed}"
    torch.testing.assert_close(lse, exact_lse.float(), rtol=0, atol=1e-4)
