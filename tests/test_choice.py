"""Tables of tuned values: the first rule that holds gives the row, and every rule is reached and told of."""

import dataclasses
import re

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from fa4.runtime import dispatch
from fa4.runtime.choice import OTHERWISE, Choice, Condition, Rule, choose, given
from fa4.runtime.conditions import TuningCase, head_dims, keys
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.spec import AttentionSpec, CacheSpec, ProblemSize
from fa4.sm80 import tiles as sm80
from fa4.sm90.bwd import tiles as sm90_backward
from fa4.sm90.fwd import tiles as sm90_forward
from fa4.sm90.fwd.plan import Sm90Forward
from fa4.sm100.bwd import tiles as sm100_backward
from fa4.sm100.fwd import tiles as sm100_forward
from fa4.sm120.fwd import tiles as sm120_forward
from tests.configurations.kernels import TARGETS, _refusals
from tests.configurations.problems import Problem, families

TABLES = {
    "sm80": (sm80.FORWARD, sm80.BACKWARD),
    "sm90": (sm90_forward.TILES, sm90_forward.SCHEDULES, sm90_forward.L2_SHARES, sm90_backward.TILES),
    "sm100": (sm100_forward.TILES, sm100_forward.POLYNOMIALS, sm100_forward.SCHEDULES, sm100_backward.TILES),
    "sm120": (sm120_forward.TILES, sm120_forward.SCHEDULES),
}
EVERY = {"options": 1, "shapes": 61, "caches": 29, "eight bits": 5}
SPEC = AttentionSpec(torch.bfloat16, 64, 64, 4, 4, 0.1)
LONG = ProblemSize(4, 1 << 14, 1 << 14)
TRAINED = dataclasses.replace(SPEC, head_dim=128, head_dim_v=128, heads_q=16, heads_kv=16, needs_backward=True)
# What no enumerated call asks for: many queries on pages, no mask beside other kernels, parts of grids, and few keys of
# many queries.
MORE = (
    Problem(dataclasses.replace(SPEC, head_dim=96, cache=CacheSpec(page_size=128), has_seqused_k=True), LONG),
    Problem(dataclasses.replace(SPEC, head_dim=128), LONG, shared=True),
    Problem(dataclasses.replace(SPEC, window_right=0), LONG, sampled=True),
    Problem(TRAINED, ProblemSize(1, 1 << 14, 1 << 10)),
    Problem(TRAINED, ProblemSize(1, 1 << 15, 1 << 9), sampled=True),
)


@pytest.mark.parametrize("backend", TABLES)
def test_every_rule_has_a_name_a_text_and_evidence(backend):
    for table in TABLES[backend]:
        names = [rule.name for rule in table]
        assert len(set(names)) == len(names)
        assert all(rule.name and rule.when.text and rule.evidence for rule in table)


@pytest.mark.parametrize("backend", TABLES)
def test_some_problem_reaches_every_rule(backend):
    """Of the calls that `tests.configurations` enumerates, on each of the backend's chips."""
    missing = {id(rule): rule.name for table in TABLES[backend] for rule in table}
    for number in [number for number, name in TARGETS if name == backend]:
        for family, problems in [("more", MORE), *families().items()]:
            for problem in problems[:: EVERY.get(family, 1)]:
                chip = problem.chip(number)
                rows = [row for row in dispatch.BACKENDS if row.name == backend]
                served = next((row for row in rows if not _refusals(row, problem, chip)), None)
                if served is not None:
                    plan = served.plan(problem.spec, problem.extent, chip)
                    directions = [plan._forward, *([plan._backward] if problem.spec.needs_backward else [])]
                    for direction in directions:
                        for rule in direction.choice.rules if direction.choice else ():  # or no table
                            missing.pop(id(rule), None)
                if not missing:
                    return
    assert not list(missing.values())


def case(**changes) -> TuningCase:
    return TuningCase(dataclasses.replace(SPEC, **changes), chip_by_number(90), ProblemSize(1, 4096, 4096))


def test_the_first_rule_that_holds_gives_the_row():
    table = [Rule("few", keys(0, 100), 1, "-"), Rule("narrow", head_dims(64), 2, "-"), Rule("all", OTHERWISE, 3, "-")]
    assert [choose(table, case(head_dim=d)).row for d in (64, 72)] == [2, 3]
    with pytest.raises(LookupError):
        choose(table[:1], case())


def test_conditions_say_what_they_are_made_of():
    narrow, varlen = head_dims(64), Condition("varlen", lambda case: case.spec.varlen)
    for changes in ({}, {"varlen": True}, {"head_dim": 72}, {"head_dim": 72, "varlen": True}):
        x, y = narrow.holds(case(**changes)), varlen.holds(case(**changes))
        assert (narrow & varlen).holds(case(**changes)) == (x and y)
        assert (narrow | varlen).holds(case(**changes)) == (x or y)
        assert (~varlen).holds(case(**changes)) != y and (~~narrow).holds(case(**changes)) == x
    assert (narrow & ~varlen).text == "head dims <= 64, no varlen"
    assert (~narrow | varlen).text == "(head dims above 64 or varlen)"
    assert keys(512, 1024).text == "512 to 1024 keys" and keys(0, 9).text == "at most 9 keys"
    assert [keys(512, 4096).holds(case()), keys(4097).holds(case()), keys(4096).holds(case())] == [True, False, True]
    assert head_dims(192, 128).holds(case(head_dim=192)) and not head_dims(192, 128).holds(case(head_dim_v=192))


def test_a_row_of_the_caller_is_told_as_such():
    choice = given(7)
    assert isinstance(choice, Choice) and choice.row == 7 and "the caller" in choice.reason


@pytest.mark.parametrize("number, head_dim", [(80, 64), (80, 128), (90, 64), (90, 128), (100, 64), (100, 128)])
def test_explain_prints_the_conditions_that_held(number, head_dim):
    x = torch.empty(1, 4096, 8, head_dim, dtype=torch.bfloat16, requires_grad=True)
    with emulating(chip_by_number(number)):
        explanation = fa4.explain(x, x, x, causal=True)
    forward, backward = explanation.tiles.split("; backward ")
    table = {80: "sm80", 90: "sm90", 100: "sm100"}[number]
    tables = TABLES[table]
    assert any(f"{rule.name} for {rule.when.text}: {rule.evidence}" in forward for rule in tables[0])
    assert any(f"{rule.name} for {rule.when.text}: {rule.evidence}" in backward for rule in tables[-1])
    assert re.search(f"head dims <= {head_dim}|all others", explanation.tiles)


def test_rows_follow_from_the_chips_own_numbers():
    """Hopper GPUs with fewer multiprocessors, and with another L2."""
    h100 = chip_by_number(90)
    small = dataclasses.replace(h100, sms=66)
    causal, extent = dataclasses.replace(SPEC, window_right=0, heads_q=32, heads_kv=32), ProblemSize(1, 1024, 1024)
    chosen = [sm90_forward.tiles_for(causal, chip, extent).row.consumers for chip in (h100, small)]
    assert chosen == [2, 4]  # 128 tiles of 256 rows
    long = ProblemSize(1, 1 << 16, 1 << 16)
    groups = [
        Sm90Forward(causal, long, dataclasses.replace(h100, l2=l2 << 20)).sizes.l2_group for l2 in (25, 50, 200, 800)
    ]
    assert groups == sorted(groups) and groups[0] == 1 < groups[-1]
