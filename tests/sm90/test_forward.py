"""The Hopper forward on the emulated chip: named cases against the oracle, under several interleavings."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import Checks

from fa4.core.order import Order
from fa4.emulator import emulate
from fa4.fwd import plan as fwd_plan
from fa4.fwd.variant import Schedule
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import counters, device
from fa4.runtime.spec import AttentionSpec, CacheSpec, ProblemSize
from fa4.sm90.fwd.kernel import channels, smem_map
from fa4.sm90.fwd.plan import Sm90Forward, configure
from fa4.sm90.fwd.tiles import ForwardTiles, tiles_for
from fa4.sm90.plan import Plan
from fa4.torch_ops.run import forward
from tests.emulated import SOAK_ONLY, Kernels, SharedForwardTests, check_forward, check_forward_under_many_interleavings
from tests.sm90.named import CASES

pytestmark = pytest.mark.rotates(6)

KERNELS = Kernels("sm90", "sm_90a", Plan)
CHIP = device.chip_by_number(90)
USUAL = ForwardTiles(2, 128)
# Here these have kernels to themselves, too: other tile widths of what other cases show, flags that are read by code
# which the Blackwell kernels share and are tested with, and few queries, which test_splits.py shows.
LIKE_OTHERS = {
    "few_queries_many_keys_varlen",
    "gqa",
    "gqa_packed_short_queries",
    "group_of_twelve_is_packed_by_four",
    "head_dim_192",
    "head_dim_256_many",
    "head_dim_v_200",
    "head_dim_v_larger",
    "mqa",
    "one_by_one",
    "seqused_keys_only",
    "seqused_queries_only",
    "varlen_different_k",
    "varlen_with_empty",
}


class TestShared(SharedForwardTests):
    kernels, row = KERNELS, "many short masked rows"


@pytest.mark.parametrize("name", sorted(CASES.keys() - SOAK_ONLY - LIKE_OTHERS))
def test_case(name, seed):
    check_forward(KERNELS, CASES[name], seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_case_under_many_interleavings(name, seed):
    check_forward_under_many_interleavings(KERNELS, CASES[name], seed)


def test_schedules_blocks_and_thresholds(seed):
    """The row of the table, and one that differs in who works when, in blocks, and in rescaling at every growth."""
    case = Case("long", seqlen_q=300, seqlen_k=400, head_dim=128, causal=True)
    problem = cases.make(case, seed)
    usual = tiles_for(problem.spec, CHIP, problem.inputs.extent).row
    assert usual.ping_pong and usual.consumers == 2 and usual.tile_n == 64
    assert usual.schedule is Schedule.COUNTED
    others = replace(usual, schedule=Schedule.SINGLE, rescale_threshold=0.0, tile_n=80, consumers=3)
    for row in (usual, others, replace(usual, schedule=Schedule.PERSISTENT)):
        out, lse = KERNELS.forward(problem, seed, "random", row)
        cases.assert_right(cases.judge_forward(problem, out, lse), f"{row}, seed {seed}")


@pytest.mark.parametrize("ctas", [1, 2])
def test_tiles_are_taken_by_a_counter_that_ends_at_zero(ctas, seed, monkeypatch):
    """Twice by the same one. One CTA at a time runs in odd orders: the first one takes all tiles. A pair takes them
    together."""
    counter = torch.zeros(counters.NUMBERS, dtype=torch.int32)
    monkeypatch.setattr(fwd_plan, "tile_counter", lambda q, chip: counter)
    case = Case("many tiles", batch=2, seqlen_q=600, seqlen_k=500, heads_q=3, heads_kv=1, head_dim=64)
    problem = cases.make(case, seed)
    row = ForwardTiles(2, 128, ping_pong=False, ctas=ctas)
    for order in (seed, seed + 1):
        out, lse = KERNELS.forward(problem, order, "random", row)
        cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {order}")
        assert not counter.any()


PAIRS = (  # where both CTAs have rows, one has none, keys end in the other's half of a block
    Case("pairs", batch=2, seqlen_q=300, seqlen_k=400, heads_q=4, heads_kv=2, head_dim=128, sink=True),
    Case("one of a pair", seqlen_q=90, seqlen_k=150, head_dim=128, softcap=20.0),
    Case("half a block", batch=3, seqlen_q=260, seqlen_k=300, head_dim=192, head_dim_v=128),
    Case("causal", seqlen_q=500, seqlen_k=500, head_dim=128, causal=True),
    Case("in turns", seqlen_q=300, seqlen_k=200, heads_q=3, heads_kv=3, head_dim=256),
)


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.name)
def test_pairs_of_ctas_share_keys(case, seed):
    problem = cases.make(case, seed)
    row = replace(tiles_for(problem.spec, CHIP, ProblemSize(1, 4096, 4096)).row, ctas=2, schedule=Schedule.COUNTED)
    out, lse = KERNELS.forward(problem, seed, "random", row)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


def test_the_row_of_long_causal_192_128(seed):
    problem = cases.make(Case("long", seqlen_q=300, seqlen_k=330, head_dim=192, head_dim_v=128, causal=True), seed)
    out, lse = KERNELS.forward(problem, seed, "random", ForwardTiles(3, 64))
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


GROUPS = (  # row, case
    (ForwardTiles(4, 64, ping_pong=False, packs_heads=True),
     Case("narrow", batch=2, seqlen_q=150, seqlen_k=170, heads_q=8, heads_kv=1, head_dim=64, window_size=(40, 0),
          sink=True)),
    (ForwardTiles(4, 64, ping_pong=False, packs_heads=True),
     Case("narrow_packed", lengths=((90, 130), (0, 40), (77, 60)), heads_q=4, heads_kv=2, head_dim=64,
          window_size=(30, 9))),
    (ForwardTiles(3, 64, packs_heads=True),
     Case("window", seqlen_q=200, seqlen_k=330, heads_q=4, heads_kv=1, head_dim=128, window_size=(90, 0), softcap=9.0)),
    (ForwardTiles(3, 64, packs_heads=True),
     Case("causal", seqlen_q=260, seqlen_k=260, heads_q=12, heads_kv=2, head_dim=112, head_dim_v=128, causal=True)),
    (ForwardTiles(3, 64), Case("causal_alone", seqlen_q=400, seqlen_k=400, head_dim=128, causal=True)),
    (ForwardTiles(2, 64, packs_heads=True),
     Case("wide", seqlen_q=140, seqlen_k=150, heads_q=4, heads_kv=2, head_dim=256, window_size=(50, 0))),
)  # fmt: skip


@pytest.mark.parametrize(("row", "case"), GROUPS, ids=lambda x: getattr(x, "name", ""))
def test_heads_of_a_group_share_tiles(row, case, seed):
    problem = cases.make(case, seed)
    out, lse = KERNELS.forward(problem, seed, "random", row)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"{row}, seed {seed}")


@pytest.mark.parametrize(
    "case",
    [
        Case("keys_of_several_teams", batch=2, seqlen_q=300, seqlen_k=400, causal=True),
        Case("teams_without_rows", seqlen_q=260, seqlen_k=700, causal=True),
        Case("rows_without_keys", seqlen_q=400, seqlen_k=100, causal=True),
        Case("no_mask", seqlen_q=520, seqlen_k=300),
        Case("window", seqlen_q=500, seqlen_k=530, window_size=(70, 20), softcap=20.0),
    ],
    ids=lambda case: case.name,
)
def test_each_of_four_teams_works_on_the_keys_that_it_sees(case, seed):
    """In turns, which teams that pass a block over take too, and without."""
    problem = cases.make(case, seed)
    for row in (ForwardTiles(4, 64), ForwardTiles(4, 64, ping_pong=False)):
        out, lse = KERNELS.forward(problem, seed, "random", row)
        cases.assert_right(cases.judge_forward(problem, out, lse), f"{row}, seed {seed}")


def test_no_cta_ends_while_its_stores_read_shared_memory(seed):
    problem = cases.make(Case("short", seqlen_q=130, seqlen_k=130, head_dim=64, causal=True), seed)
    with emulate(KERNELS.chip, sms=2, seed=seed, checks=Checks(leftovers=True)):
        forward(problem.inputs, problem.spec, KERNELS.made(problem.spec, problem.inputs))


def test_every_head_dim_fits_the_chip():
    chip = device.chip_by_number(90)
    dims = range(8, 257, 8)
    for head_dim, head_dim_v in [(d, dv) for d in dims for dv in dims]:
        for window_right, seqlen in ((None, 4096), (0, 1024)):
            spec = AttentionSpec(torch.bfloat16, head_dim, head_dim_v, 4, 2, 0.1, window_right=window_right)
            cfg = configure(spec, ProblemSize(1, seqlen, seqlen), chip)
            assert cfg.stages >= 1
            assert smem_map(cfg, channels(cfg)).nbytes <= chip.smem_per_block


@pytest.mark.parametrize(
    "dims, seqlen, causal, expected",
    [
        ((64, 64), 1024, True, (2, 128)),  # fewer work tiles of 256 rows than multiprocessors
        ((64, 64), 2048, True, (3, 128)),
        ((64, 64), 512, False, (3, 128)),
        ((96, 96), 1024, False, (2, 128)),
        ((96, 96), 4096, True, (3, 96)),
        ((128, 128), 512, True, (2, 128)),  # an even group of heads, and tiles that do not fill the chip
        ((128, 128), 1024, True, (2, 128)),
        ((192, 128), 512, True, (2, 128)),
        ((192, 128), 8192, True, (2, 128)),
        ((192, 128), 16384, True, (3, 64)),
        ((192, 128), 16384, False, (2, 128)),
        ((192, 192), 512, True, (2, 112)),
        ((256, 256), 1024, True, (2, 64)),
        ((256, 256), 4096, False, (2, 64)),
    ],
    ids=str,
)
def test_the_row_of_a_problem(dims, seqlen, causal, expected):
    spec = AttentionSpec(torch.bfloat16, *dims, 4, 2, 0.1, window_right=0 if causal else None)
    tiles = tiles_for(spec, CHIP, ProblemSize(1, seqlen, seqlen)).row
    assert (tiles.consumers, tiles.tile_n) == expected and tiles.schedule is Schedule.COUNTED
    packed = tiles_for(replace(spec, varlen=True), CHIP, ProblemSize(1, seqlen, seqlen)).row
    usual = (2, 128) if dims == (192, 128) else expected
    assert (packed.consumers, packed.tile_n, packed.schedule) == (*usual, Schedule.PACKED)
    # One tile holds all the rows of a head there: nothing is gained by counting them.
    short = tiles_for(replace(spec, varlen=True, heads_q=128), CHIP, ProblemSize(1, 2, 2)).row
    assert short.schedule is Schedule.SINGLE
    long = tiles_for(spec, CHIP, ProblemSize(1, 65536, 65536)).row
    assert long.schedule is (Schedule.SINGLE if causal else Schedule.COUNTED)


@pytest.mark.parametrize(
    "seqlen, batch, causal, expected",
    [
        (1024, 16, True, 4),
        (2048, 8, True, 4),
        (4096, 4, True, 4),
        (8192, 8, True, 3),
        (1024, 16, False, 4),
        (2048, 16, False, 3),
        (512, 2, False, 3),
        (512, 2, True, 2),
    ],
)
def test_many_short_rows_are_four_teams(seqlen, batch, causal, expected):
    """Where their work tiles, of twice as many rows, are one for each multiprocessor."""
    spec = AttentionSpec(torch.bfloat16, 64, 64, 32, 32, 0.1, window_right=0 if causal else None)
    assert tiles_for(spec, CHIP, ProblemSize(batch, seqlen, seqlen)).row.consumers == expected


@pytest.mark.parametrize(
    "dims, rows, keys, heads, changes, expected",
    [
        ((256, 256), 16384, 16384, 16, {}, 2),
        ((256, 256), 2048, 16384, 32, {}, 2),
        ((256, 256), 8192, 8192, 32, {}, 1),
        ((256, 256), 1024, 16384, 16, {}, 1),  # 64 pairs of tiles do not keep a chip busy for two rounds
        ((256, 256), 1100, 16384, 64, {}, 1),  # the ninth tile would be a pair, too
        ((256, 256), 4200, 16384, 16, {}, 2),
        ((256, 256), 16384, 16384, 16, {"window_right": 0}, 1),
        ((256, 256), 16384, 16384, 16, {"window_left": 100}, 1),
        ((256, 256), 16384, 16384, 16, {"varlen": True}, 1),
        ((256, 256), 16384, 16384, 16, {"has_seqused_k": True}, 1),
        ((192, 128), 16384, 16384, 16, {}, 1),
        ((128, 128), 16384, 16384, 16, {}, 1),
    ],
    ids=str,
)
def test_what_pairs_of_ctas_work_on(dims, rows, keys, heads, changes, expected):
    spec = replace(AttentionSpec(torch.bfloat16, *dims, heads, heads, 0.1), **changes)
    assert tiles_for(spec, CHIP, ProblemSize(1, rows, keys)).row.ctas == expected


@pytest.mark.parametrize(
    "rows, keys, heads, changes, consumers",
    [
        (2048, 2048, 32, {}, 3),
        (16384, 4096, 4, {}, 3),
        (1024, 4096, 64, {}, 2),
        (4096, 1024, 64, {}, 2),
        (4096, 4096, 4, {}, 2),  # 64 tiles of 256 rows do not fill the chip
        (4096, 4096, 16, {"varlen": True}, 2),
        (4096, 4096, 16, {"has_seqused_k": True}, 2),
    ],
    ids=str,
)
def test_long_rows_without_a_mask_are_three_teams(rows, keys, heads, changes, consumers):
    spec = replace(AttentionSpec(torch.bfloat16, 128, 128, heads, heads, 0.1), **changes)
    assert tiles_for(spec, CHIP, ProblemSize(1, rows, keys)).row.consumers == consumers


@pytest.mark.parametrize(
    "dims, seqlen, heads, changes, expected",
    [
        (64, 8192, (64, 8), dict(window_left=127), (4, 136, 8)),
        (64, 8192, (64, 8), dict(window_left=255), (4, 64, 8)),
        (64, 8192, (64, 8), dict(window_left=2047), (3, 128, 1)),
        (64, 8192, (32, 32), dict(window_left=127), (3, 128, 1)),
        (64, 8192, (24, 8), dict(window_left=127), (3, 128, 1)),  # three heads fill no tile
        (128, 8192, (32, 8), dict(window_left=511), (3, 64, 4)),
        (128, 8192, (32, 8), dict(window_left=511, varlen=True), (3, 64, 4)),
        (128, 8192, (32, 8), dict(window_left=511, cache=CacheSpec(page_size=128)), (2, 128, 1)),
        (256, 8192, (16, 8), dict(window_left=511), (2, 64, 2)),
        (256, 8192, (16, 8), dict(window_left=1023), (2, 64, 1)),
        (128, 8192, (32, 8), {}, (3, 64, 4)),
        (128, 8192, (32, 8), dict(varlen=True), (2, 128, 1)),
        (128, 32768, (32, 8), {}, (3, 64, 4)),
        (128, 512, (32, 8), {}, (3, 64, 4)),
        (128, 512, (16, 16), {}, (2, 64, 1)),
        (64, 1024, (64, 8), dict(window_left=127), (4, 64, 1)),
        (128, 8192, (16, 16), {}, (3, 64, 1)),
        (128, 4096, (32, 32), {}, (2, 128, 1)),
        (128, 1024, (32, 8), {}, (3, 64, 4)),
        (128, 65536, (32, 8), {}, (2, 128, 1)),
    ],
    ids=str,
)
def test_heads_that_share_tiles(dims, seqlen, heads, changes, expected):
    """Of causal problems: consumers, keys of a block and packed heads."""
    spec = replace(AttentionSpec(torch.bfloat16, dims, dims, *heads, 0.1, window_right=0), **changes)
    plan = Sm90Forward(spec, ProblemSize(4, seqlen, seqlen), CHIP)
    assert (plan.cfg.consumers, plan.cfg.tile_n, plan.cfg.packed_heads) == expected


@pytest.mark.parametrize(
    "changes, rows, expected",
    [
        ({}, 4096, Schedule.COUNTED),
        ({"varlen": True}, 4096, Schedule.PACKED),
        ({}, 16, Schedule.PERSISTENT),  # memory-bound: a CTA has one tile, and the counter would take a microsecond
        ({"cache": CacheSpec(page_size=128)}, 4096, Schedule.PERSISTENT),
    ],
    ids=str,
)
def test_the_schedule_of_a_problem(changes, rows, expected):
    spec = AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1, window_right=0, **changes)
    for chip in (CHIP, replace(CHIP, shared=True)):
        assert Sm90Forward(spec, ProblemSize(1, rows, 4096), chip).cfg.schedule is expected
    # The CTAs of a part of a grid would take the tiles of all others by a counter.
    sampled = Sm90Forward(spec, ProblemSize(1, rows, 4096), replace(CHIP, sampled=True)).cfg.schedule
    assert sampled is (Schedule.PERSISTENT if expected is Schedule.COUNTED else expected)


def test_a_place_is_free_when_the_warps_of_both_ctas_of_a_pair_have_read_it():
    spec = AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1)
    for ctas in (1, 2):
        table = channels(configure(spec, ProblemSize(1, 4096, 4096), CHIP, replace(USUAL, ctas=ctas)))
        place = table["schedule_all_place"]
        assert (table.full_arrivals(place), table.free_arrivals(place)) == (1, 10 * ctas)


def test_counters_of_caches_are_refused():
    spec = AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1, cache=CacheSpec(page_size=128))
    with pytest.raises(ValueError, match="take no tiles by a counter"):
        configure(spec, ProblemSize(1, 4096, 4096), CHIP, USUAL)


@pytest.mark.parametrize("changes", [{"varlen": True}, {"has_seqused_k": True}, {"cache": CacheSpec(page_size=128)}])
def test_pairs_without_keys_to_share_are_refused(changes):
    spec = AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1, **changes)
    with pytest.raises(ValueError, match="a pair of CTAs shares"):
        configure(spec, ProblemSize(1, 4096, 4096), device.chip_by_number(90), replace(USUAL, ctas=2))


def test_tiles_that_do_not_fit_are_refused():
    spec = AttentionSpec(torch.bfloat16, 256, 256, 4, 2, 0.1)
    with pytest.raises(ValueError, match="128 x 256 tiles of head_dim 256 exceed"):
        configure(spec, ProblemSize(1, 4096, 4096), device.chip_by_number(90), replace(USUAL, tile_n=256))


def test_warpgroups_that_registers_do_not_serve_are_refused():
    chip, extent = device.chip_by_number(90), ProblemSize(1, 4096, 4096)
    # No such row of registers; O alone takes more than a thread starts with.
    for dims, consumers in ((64, 5), (256, 4)):
        spec = AttentionSpec(torch.bfloat16, 64, dims, 4, 2, 0.1)
        with pytest.raises(ValueError, match=f"too few for {consumers} warpgroups with O of 64 x {dims} each"):
            configure(spec, extent, chip, replace(USUAL, consumers=consumers, tile_n=32))


def test_rows_that_are_copied_take_at_least_three_stages():
    spec = AttentionSpec(torch.bfloat16, 128, 128, 4, 2, 0.1, cache=CacheSpec(page_size=5))
    chip, extent = device.chip_by_number(90), ProblemSize(1, 4096, 4096)
    gather = tiles_for(spec, chip, extent).row
    assert configure(spec, extent, chip, gather).stages == 4
    assert configure(spec, extent, chip, replace(gather, most_stages=3)).stages == 3
    with pytest.raises(ValueError, match="take three stages"):
        configure(spec, extent, chip, replace(gather, most_stages=2))


@pytest.mark.parametrize(
    "dims, usual, page_size, expected",
    [
        ((96, 96), 96, 128, 128),
        ((96, 96), 96, 96, 96),
        ((96, 96), 96, 64, 96),
        ((192, 192), 112, 256, 64),
        ((192, 192), 112, 112, 112),
    ],
)
def test_blocks_that_a_page_holds_whole_are_preferred(dims, usual, page_size, expected):
    """Where pages hold whole blocks of 128 keys and none of the usual row: such blocks come in one copy each."""
    spec, extent = AttentionSpec(torch.bfloat16, *dims, 4, 2, 0.1), ProblemSize(1, 4096, 4096)
    assert tiles_for(spec, CHIP, extent).row.tile_n == usual
    choice = tiles_for(replace(spec, cache=CacheSpec(page_size=page_size)), CHIP, extent)
    assert choice.row.tile_n == expected and ("whole blocks in a page" in choice.name) is (expected != usual)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
def test_every_cta_gets_the_same_share_of_a_causal_problem(seqlen, head_dim):
    """Going to and fro through sections of whole rounds: no CTA has 1 % more key blocks than the average. Of 512 keys
    half a tile is 3 %."""
    chip, heads = device.chip_by_number(90), 2048 // head_dim
    extent = ProblemSize(16384 // seqlen, seqlen, seqlen)
    spec = AttentionSpec(torch.bfloat16, head_dim, head_dim, heads, heads, 0.1, window_right=0)
    made = Sm90Forward(spec, extent, chip)
    blocks = -(-seqlen // made.cfg.rows)
    sizes = made.sizes
    order = Order(blocks, heads, extent.batch, sizes.l2_group, descending=True, most_l2_groups=sizes.most_l2_groups)
    places = chip.sms // made.cfg.ctas
    work = [0] * places
    for i in range(order.tiles):
        lap, place = divmod(i, places)
        end = min(seqlen, (order.at(i).block + 1) * made.cfg.rows)
        work[places - 1 - place if lap % 2 else place] += -(-end // made.cfg.tile_n)
    allowed = {(64, 512): 1.035, (96, 512): 1.025, (128, 512): 1.035, (256, 512): 1.035}.get((head_dim, seqlen), 1.01)
    assert max(work) <= allowed * sum(work) / places


@pytest.mark.parametrize("group, rows, packed", [(3, 75, 1), (6, 75, 2), (96, 60, 32), (128, 20, 64), (8, 300, 1)])
def test_three_consumers_pack_a_power_of_two_of_heads(group, rows, packed):
    """TMA stores O by 16 rows, of whole queries. A group of three in few rows could not be compiled."""
    spec = AttentionSpec(torch.bfloat16, 64, 64, group, 1, 0.1)
    found = Sm90Forward(spec, ProblemSize(1, rows, 145), device.chip_by_number(90), replace(USUAL, consumers=3))
    assert found.cfg.packed_heads == packed
