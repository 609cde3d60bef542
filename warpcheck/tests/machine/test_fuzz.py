"""Random pipelines that are right by construction: none is called wrong, and each planted omission is found."""

import random
import secrets

import pytest
from warpcheck_cases.fuzz import CHIP, Tally, judge, orders, run
from warpcheck_cases.pipelines import FILLS, PEER_FILLS, Pipeline, Ring, Writer, drawn, written

COUNT = 45  # seeds 0 to 44, fixed: they draw every way to fill a ring


def checked(tally: Tally) -> None:
    assert not tally.false_alarms, tally.false_alarms
    assert not tally.missed, tally.missed
    assert not tally.unexplained, tally.unexplained


def test_pipelines_and_some_omissions():
    tally = Tally()
    for seed in range(COUNT):
        judge(seed, tally, omissions=3)
    checked(tally)
    assert tally.pipelines == COUNT and tally.planted > 2 * COUNT


def test_every_omission_of_a_pipeline_with_three_rings():
    seed = next(seed for seed in range(1000) if len(drawn(random.Random(seed)).rings) == 3)
    tally = Tally()
    program = judge(seed, tally, omissions=None)
    checked(tally)
    assert tally.planted + tally.redundant == sum(len(site.broken) for site in program.sites.values()) > 50


def test_the_seeds_draw_every_kind():
    pipelines = [drawn(random.Random(seed)) for seed in range(COUNT)]
    rings = [ring for pipeline in pipelines for ring in pipeline.rings]
    assert {ring.fill for ring in rings} == {*FILLS, *PEER_FILLS}
    for flag in ("named", "elected", "scrubbed", "tail"):
        assert {getattr(ring, flag) for ring in rings} == {True, False}, flag
    assert {pipeline.cluster for pipeline in pipelines} == {1, 2}
    assert {pipeline.stage > 0 for pipeline in pipelines} == {True, False}


def test_the_largest_pipeline_has_named_barriers_enough():
    rings = tuple(Ring(fill, depth=2, named=True) for fill in ("cp_async", "generic", "generic"))
    assert Writer(Pipeline(rings, warps=(2, 2, 2, 2), tiles=6, stage=3), CHIP).last_group <= 15


def test_an_omission_takes_one_instruction_out():
    program = written(drawn(random.Random(3)), CHIP)
    index, site = next(iter(program.sites.items()))
    assert program.ptx.replace(site.code, "", 1) == program.without(index, "removed")


@pytest.mark.parametrize(
    "rings, needed",
    [
        ((Ring("remote", 2, tail=True),), True),
        ((Ring("remote", 2, tail=True), Ring("generic", 2)), True),
        ((Ring("remote", 2, tail=True), Ring("remote", 2)), False),  # its tile comes after the place
        ((Ring("st_async", 2, tail=True), Ring("generic", 2), Ring("st_async", 2)), False),
        ((Ring("generic", 2), Ring("remote", 2, tail=True)), True),
    ],
    ids=["last", "then in the CTA", "then remote", "then in the CTA and st_async", "last of two"],
)
def test_the_barrier_before_the_end_is_needed_where_a_place_is_given_back_last(rings, needed):
    program = written(Pipeline(rings, warps=(1,) * (len(rings) + 1), tiles=3, stage=0, cluster=2), CHIP)
    index, site = next((i, site) for i, site in program.sites.items() if site.what == "cluster barrier before the end")
    assert bool(site.redundant) is not needed
    told = [run(program.pipeline, program.without(index, "removed"), order).kind for order in orders(0, 6)]
    assert any(told) is needed, told


@pytest.mark.soak
@pytest.mark.timeout(7200)  # seven minutes of one core
def test_ten_thousand_pipelines():
    first = secrets.randbelow(2**40)
    print("first seed", first)
    tally = Tally()
    for seed in range(first, first + 10_000):
        judge(seed, tally)
    print(tally)
    checked(tally)
