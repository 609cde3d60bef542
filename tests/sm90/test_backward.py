"""The Hopper backward on the emulated chip: gradients of the named cases, whatever the order of events."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES

from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import jit
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, ProblemSize
from fa4.sm90.bwd.common.config import ByQueries
from fa4.sm90.bwd.common.launch_order import L2_GROUP_BYTES, LaunchOrder
from fa4.sm90.bwd.config import ByColumns
from fa4.sm90.bwd.kernel import ROLES, channels, smem_map
from fa4.sm90.bwd.plan import Sm90Backward, configure
from fa4.sm90.bwd.tiles import TILES, BackwardTiles, tiles_for
from fa4.sm90.bwd.wide import kernel as wide
from fa4.sm90.plan import Plan
from tests.emulated import Kernels, SharedBackwardTests, bits, check_gradients, check_gradients_under_many_interleavings
from tests.sm100.named import BACKWARD, CASES

pytestmark = pytest.mark.rotates(8)

CHIP = chip_by_number(90)
ROW = {rule.name: rule.row for rule in TILES}
EXTRA = (
    *BACKWARD,
    Case("softcap_d128", seqlen_q=150, seqlen_k=140, head_dim=128, softcap=15.0, logits=4.0),
    Case("head_dim_40_128", seqlen_q=130, seqlen_k=150, head_dim=40, head_dim_v=128),
    Case("softcap_d192", seqlen_q=150, seqlen_k=140, head_dim=192, head_dim_v=128, softcap=15.0, logits=4.0),
    Case("head_dim_64_256", seqlen_q=90, seqlen_k=150, head_dim=64, head_dim_v=256),
    Case("wide_causal_gqa", lengths=((170, 150), (20, 40)), heads_q=2, heads_kv=1, head_dim=256, causal=True),
    Case("wide_window", seqlen_q=150, seqlen_k=260, head_dim=208, head_dim_v=160, window_size=(70, 20)),
    Case(
        "wide_varlen",
        heads_q=2,
        head_dim=256,
        lengths=((70, 140), (60, 190), (7, 9), (0, 5), (9, 0)),
        seqused=((65, 130), (50, 130), (7, 3), (0, 2), (3, 0)),
        causal=True,
    ),
    Case(
        "wide_window_softcap",
        seqlen_q=130,
        seqlen_k=200,
        heads_kv=1,
        head_dim=192,
        head_dim_v=192,
        window_size=(90, 30),
        softcap=9.0,
    ),
    Case("wide_values", seqlen_q=70, seqlen_k=100, head_dim=136, head_dim_v=256, dtype=torch.float16),
    Case(
        "varlen_sink",
        heads_q=4,
        head_dim=128,
        lengths=((130, 140), (60, 290), (7, 9), (0, 5), (9, 0)),
        seqused=((129, 130), (50, 257), (7, 3), (0, 2), (3, 0)),
        causal=True,
        sink=True,
    ),
)
SERVED = {case.name: replace(case, heads_q=4) if case.sink else case for case in (*CASES.values(), *EXTRA)}
# Compiling takes most of a case's time; the soak runs the others.
QUICK = ("wide_window_softcap", "wide_causal_gqa", "head_dim_40_128", "window_softcap_gqa", "varlen_sink")
ROWS = ("d64", "d96", "d96_ordered", "d128", "d128_cut", "softcap", "d192", "d192_softcap")
KERNELS = Kernels("sm90", "sm_90a", Plan)


class TestShared(SharedBackwardTests):
    kernels = KERNELS


@pytest.mark.parametrize("name", QUICK)
def test_gradients_of_named_case(name, seed):
    problem = cases.make(SERVED[name], seed)
    check_gradients(KERNELS, problem, seed, SCHEDULES[seed % len(SCHEDULES)])


# Rows of "d192" are judged by the test below too, additions in order; that of "d128" there and by "head_dim_40_128".
SHOWN = ("d128", "d192")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.soak] * (x in SHOWN)) for x in ROWS])
def test_every_tile_row_is_right_in_any_order(name, seed):
    head_dim = {"d64": 64, "d96": 96, "d192": 192}.get(name.split("_")[0], 128)
    shape = dict(heads_q=2, heads_kv=2, head_dim=head_dim, head_dim_v=min(head_dim, 128))
    case = Case(name, seqlen_q=170, seqlen_k=200, **shape)
    problem = cases.make(replace(case, causal=head_dim != 96), seed)
    for schedule in SCHEDULES:
        check_gradients(KERNELS, problem, seed, schedule, ROW[name])


@pytest.mark.parametrize(
    ("window", "head_dim", "heads", "seqlen_q", "sms"),
    [
        ((None, None), 128, (2, 1), 220, 2),
        ((None, None), 64, (3, 3), 420, 5),
        ((None, 0), 192, (2, 1), 220, 2),
        ((None, 0), 128, (6, 2), 220, 2),
        ((150, 0), 64, (2, 2), 220, 2),
        ((150, None), 64, (2, 1), 220, 2),
        ((None, -150), 128, (2, 1), 360, 2),
        ((None, -150), 64, (2, 1), 260, 2),
    ],
    ids=[
        "group",
        "several_sections",
        "waves",
        "there_and_back",
        "descending",
        "ascending",
        "queries_that_meet_no_keys",
        "keys_that_no_query_meets",
    ],
)
def test_deterministic_gradients_are_equal_whatever_the_order_of_events(window, head_dim, heads, seqlen_q, sms, seed):
    """More key blocks than CTAs run at a time, so that groups of them follow each other."""
    heads = dict(heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim, head_dim_v=min(head_dim, 128))
    case = Case("ordered", seqlen_q=seqlen_q, seqlen_k=420, window_size=window, deterministic=True, **heads)
    problem = cases.make(case, seed)
    results = {bits(check_gradients(KERNELS, problem, seed, schedule, sms=sms)) for schedule in SCHEDULES}
    assert len(results) == 1, f"seed {seed}"


@pytest.mark.parametrize(
    ("head_dim", "heads", "chains"),
    [(64, (1, 1), 5), (256, (2, 1), 3), (96, (2, 2), 2)],
    ids=["d64", "d256_group", "d96"],
)
def test_few_pairs_add_to_several_sums(head_dim, heads, chains, seed, monkeypatch):
    """Key blocks of one pair in chains, of which some hold no block that meets a query."""
    monkeypatch.setattr(LaunchOrder, "chains", lambda *of: chains)
    shape = dict(heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim)
    for window in ((None, None), (60, None)):
        case = Case("chains", seqlen_q=300, seqlen_k=520, window_size=window, deterministic=True, **shape)
        problem = cases.make(case, seed)
        results = {bits(check_gradients(KERNELS, problem, seed, schedule, sms=4)) for schedule in SCHEDULES}
        assert len(results) == 1, f"seed {seed}"


def test_chains_shorten_the_lag_of_few_pairs():
    def chains(heads: int, batch: int, seqlen: int, keys: int = 0, **asked) -> int:
        spec = AttentionSpec(torch.bfloat16, 128, 128, heads, heads, 0.1, deterministic=True, needs_backward=True)
        return Sm90Backward(replace(spec, **asked), ProblemSize(batch, seqlen, keys or seqlen), CHIP).chains

    assert chains(1, 1, 16384) == 16 and chains(4, 1, 16384) > 1
    assert chains(16, 1, 16384) == chains(16, 4, 4096) == chains(16, 16, 1024) == chains(1, 1, 131072) == 1
    assert chains(4, 1, 32760, keys=512) == chains(1, 1, 16384, keys=1024) == 1 < chains(1, 1, 16384, keys=8192)
    assert chains(1, 1, 100) == chains(1, 1, 16384, batch_invariant=True) == 1 and chains(1, 1, 500) == 4
    assert chains(1, 1, 16384, window_right=0) == chains(1, 1, 16384, deterministic=False) == 1


IN_ORDER = (
    Case("full", seqlen_q=220, seqlen_k=420, head_dim=256),
    Case("causal_group", seqlen_q=220, seqlen_k=420, heads_q=3, heads_kv=1, head_dim=256, causal=True),
    Case("several_sections", seqlen_q=300, seqlen_k=420, heads_q=3, heads_kv=3, head_dim=192),
    Case("causal", seqlen_q=300, seqlen_k=420, head_dim=256, causal=True),
    Case("many_queries", seqlen_q=600, seqlen_k=300, head_dim=256),
    Case("queries_that_meet_no_keys", seqlen_q=360, seqlen_k=420, head_dim=256, window_size=(None, -150)),
    Case("descending", seqlen_q=220, seqlen_k=420, head_dim=160, head_dim_v=192, window_size=(150, 0)),
    Case("ascending", seqlen_q=220, seqlen_k=420, heads_kv=1, head_dim=192, window_size=(150, None)),
    Case("packed", head_dim=256, lengths=((170, 300), (20, 40), (0, 5), (9, 0), (300, 290)), padding=9),
    Case("packed_causal", head_dim=256, heads_kv=1, lengths=((170, 300), (20, 40), (0, 5), (9, 0)), causal=True),
    Case("sink", seqlen_q=130, seqlen_k=300, head_dim=256, softcap=9.0, sink=True),
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.soak] * (i > 2), id=case.name) for i, case in enumerate(IN_ORDER)]
)
def test_wide_gradients_in_order_are_equal_whatever_the_order_of_events(case, seed):
    problem = cases.make(replace(case, deterministic=True), seed)
    sms = 7 if case.heads_q == 3 else 4
    results = {bits(check_gradients(KERNELS, problem, seed, schedule, sms=sms)) for schedule in SCHEDULES}
    assert len(results) == 1, f"seed {seed}"


@pytest.mark.parametrize(
    ("window", "heads_kv"),
    [((None, None), 1), ((None, -150), 2)],
    ids=["neighbours_begin_apart", "queries_that_meet_no_keys"],
)
def test_whoever_comes_first_stores_and_others_add(window, heads_kv, seed):
    """More key blocks than CTAs run at a time; what nobody has stored would be read as it was allocated."""
    shape = dict(heads_q=2, heads_kv=heads_kv, head_dim=128, window_size=window)
    problem = cases.make(Case("unordered", seqlen_q=360, seqlen_k=420, **shape), seed)
    for schedule in SCHEDULES:
        check_gradients(KERNELS, problem, seed, schedule, sms=3)


def test_key_blocks_that_start_close_to_each_other_have_right_gradients(seed, monkeypatch):
    """As where the queries of all running heads exceed the L2: evenly spaced, the starts are two or three steps
    apart."""
    monkeypatch.setattr(LaunchOrder, "most_apart", property(lambda cfg: 1))
    # Compile keys do not tell this kernel from the usual one.
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: None)
    problem = cases.make(Case("close", seqlen_q=900, seqlen_k=420, heads_q=2, heads_kv=2, head_dim=128), seed)
    for schedule in SCHEDULES:
        check_gradients(KERNELS, problem, seed, schedule, sms=4)


@pytest.mark.parametrize(("row", "head_dim"), [("d128", 128), ("d128_parts", 128), ("d64", 64), ("d192", 192)])
def test_starts_are_so_close_that_l2_holds_the_queries_between_them(row, head_dim):
    cfg = config(head_dim, ROW[row])
    of_a_step = cfg.sms * cfg.tile_m * cfg.query_bytes
    assert cfg.staggered and cfg.most_apart == 2
    assert cfg.most_apart * of_a_step <= L2_GROUP_BYTES < (cfg.most_apart + 1) * of_a_step


@pytest.mark.parametrize(
    ("queries", "keys", "flags", "row"),
    [
        (16384, 1024, {}, "d128_few_keys"),
        (16384, 2048, {}, "d128_few_keys"),
        (16384, 4096, {}, "d128"),
        (16384, 1024, {"varlen": True}, "d128"),
        (16384, 1024, {"window_right": 0}, "d128_cut"),
        (16384, 1024, {"head_dim": 192}, "d192_few_keys"),
        (16384, 1024, {"head_dim": 64, "head_dim_v": 64}, "d64"),
    ],
)
def test_few_key_blocks_of_many_queries_add_in_order(queries, keys, flags, row):
    spec = AttentionSpec(torch.bfloat16, heads_q=16, heads_kv=16, softmax_scale=0.1, needs_backward=True,
                         **{"head_dim": 128, "head_dim_v": 128} | flags)  # fmt: skip
    assert tiles_for(spec, CHIP, ProblemSize(1, queries, keys)).name == row


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", SERVED)
def test_gradients_under_many_interleavings(name, seed):
    problems = [cases.make(replace(SERVED[name], deterministic=ordered), seed) for ordered in (False, True)]
    check_gradients_under_many_interleavings(KERNELS, problems, seed)


LONG = ProblemSize(1, 16384, 16384)


def config(head_dim: int, tiles: BackwardTiles):
    head_dim_v = min(head_dim, 128)
    spec = AttentionSpec(torch.bfloat16, head_dim, head_dim_v, 16, 16, head_dim**-0.5, needs_backward=True)
    return configure(spec, chip_by_number(90), has_dlse=False, tiles=tiles)


def config_of(spec: AttentionSpec):
    """By the row of the table."""
    return Sm90Backward(spec, LONG, chip_by_number(90)).config(has_dlse=False)


@pytest.mark.parametrize(
    ("head_dim", "name"),
    [(64, "d64"), (96, "d96"), (128, "d128"), (128, "d128_cut"), (192, "d192"), (192, "d192_softcap")],
)
def test_tables_fit_the_chip(head_dim, name):
    cfg = config(head_dim, ROW[name])
    table = channels(cfg)
    assert smem_map(cfg, table).nbytes <= cfg.smem_used <= 227 * 1024
    assert ROLES.threads == 384


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(256, 256), (136, 256), (256, 136), (192, 192)])
def test_tables_of_wide_heads_fit_the_chip(head_dim, head_dim_v):
    spec = AttentionSpec(torch.bfloat16, head_dim, head_dim_v, 16, 16, 0.1, needs_backward=True)
    for deterministic in (False, True):
        cfg = config_of(replace(spec, deterministic=deterministic))
        assert wide.smem_map(cfg, wide.channels(cfg)).nbytes <= cfg.smem_used <= 227 * 1024
    panels = [panel for consumer in range(2) for panel in cfg.dq_panels(consumer)]
    of_k = -(-head_dim // 64)
    assert panels == list(range(-(-of_k // cfg.ctas)))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(192, 128), (136, 128), (128, 192), (64, 256), (256, 64), (8, 256)]
)
def test_tables_of_128_keys_fit_the_chip_where_registers_do(head_dim, head_dim_v):
    spec = AttentionSpec(torch.bfloat16, head_dim, head_dim_v, 16, 16, 0.1, needs_backward=True)
    for softcap in (0.0, 9.0):
        cfg = config_of(replace(spec, softcap=softcap))
        assert smem_map(cfg, channels(cfg)).nbytes <= cfg.smem_used <= 227 * 1024
        assert cfg.row_blocks.placement.elements * 4 == 2 * cfg.dq_bytes


def test_what_cuts_blocks_or_takes_registers_has_lower_steps():
    spec = AttentionSpec(torch.bfloat16, 128, 128, 16, 16, 128**-0.5, needs_backward=True)
    assert tiles_for(spec, CHIP, LONG).name == "d128"
    assert tiles_for(replace(spec, window_right=0), CHIP, ProblemSize(2, 8192, 8192)).name == "d128_cut"
    assert tiles_for(replace(spec, window_right=0), CHIP, LONG).name == "d128_ordered"
    assert tiles_for(replace(spec, window_right=0), CHIP, ProblemSize(1, 32768, 32768)).name == "d128_long"
    grouped = replace(spec, window_right=0, heads_kv=4)
    assert tiles_for(grouped, CHIP, LONG).name == "d128_ordered"
    assert config_of(grouped).deterministic  # though nobody asked for it
    for other in (dict(varlen=True), dict(has_seqused_k=True), dict(window_left=9)):
        assert not config_of(replace(grouped, **other)).deterministic
    assert tiles_for(replace(spec, softcap=15.0), CHIP, LONG).name == "softcap"


def test_96_columns_have_an_order_if_causal_unless_lengths_vary():
    spec = AttentionSpec(torch.bfloat16, 96, 96, 16, 16, 96**-0.5, needs_backward=True)
    causal, short = replace(spec, window_right=0), ProblemSize(16, 1024, 1024)
    for extent in (short, LONG):
        assert tiles_for(causal, CHIP, extent).name == "d96_ordered" and tiles_for(spec, CHIP, extent).name == "d96"
    for other in (dict(varlen=True), dict(has_seqused_q=True), dict(window_left=9)):
        assert tiles_for(replace(causal, **other), CHIP, LONG).name == "d96"


def test_256_columns_have_an_order_unless_something_else_is_asked_for():
    spec = AttentionSpec(torch.bfloat16, 256, 256, 16, 4, 0.0625, needs_backward=True)
    for plain in (spec, replace(spec, window_right=0)):
        assert tiles_for(plain, CHIP, LONG).name == "d256_ordered" and config_of(plain).deterministic
    for other in ({"varlen": True}, {"has_seqused_q": True}, {"window_left": 9}, {"softcap": 9.0}):
        asked = replace(spec, **other)
        assert tiles_for(asked, CHIP, LONG).name == "d256" and not config_of(asked).deterministic


@pytest.mark.parametrize(("tile_m", "columns"), [(64, 128), (80, 128), (48, 192), (80, 64), (48, 256)])
def test_dq_in_columns_has_a_place_for_every_element(tile_m, columns):
    placement = ByColumns(tile_m, columns)
    places = {placement.offset(row, c // 64 * 64, c % 64) for row in range(tile_m) for c in range(columns)}
    assert places == set(range(placement.elements))


def test_dq_in_queries_has_a_place_for_every_element():
    placement = ByQueries(128, 48)
    places = {placement.offset(row, c // 32 * 32, c % 32) for row in range(128) for c in range(48)}
    assert places == set(range(placement.elements))


def test_one_tile_of_ds_is_refused():
    """Its step would wait for dQ of the step before, which is computed after it."""
    with pytest.raises(ValueError, match="ds_stages is 1"):
        config(128, BackwardTiles(64, ds_stages=1))


def test_tiles_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="there are 232448"):
        config(128, BackwardTiles(128))
