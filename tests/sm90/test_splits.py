"""Few queries on the emulated Hopper: keys cut into parts, heads of a group as rows of a tile, and the joining."""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4 import cases, device
from fa4.cases import Case
from fa4.emulator.machine import SCHEDULES
from fa4.sm90.fwd.plan import Forward
from fa4.sm90.fwd.tiles import tiles_for
from fa4.spec import AttentionSpec, Extent
from tests.emulated import poison_unused
from tests.sm90.test_forward import KERNELS

# Parts, and a case. Those that share head dims, grouping and flags share one compiled kernel.
CASES = {
    "uneven_parts": (3, Case("", batch=2, seqlen_q=1, seqlen_k=700, head_dim=128, heads_q=8, heads_kv=2, causal=True)),
    "more_parts_than_blocks": (5, Case("", seqlen_q=1, seqlen_k=140, head_dim=128, heads_q=8, heads_kv=2, causal=True)),
    "many_parts": (40, Case("", seqlen_q=2, seqlen_k=2700, head_dim=128, heads_q=4, heads_kv=1, causal=True)),
    "group_of_five": (2, Case("", batch=2, seqlen_q=3, seqlen_k=300, heads_q=10, heads_kv=2, causal=True)),
    "group_of_five_whole": (1, Case("", batch=2, seqlen_q=3, seqlen_k=300, heads_q=10, heads_kv=2, sink=True)),
    "group_of_24_in_two_blocks": (2, Case("", seqlen_q=3, seqlen_k=300, heads_q=24, heads_kv=1, softcap=10.0)),
    "rows_without_keys": (3, Case("", seqlen_q=40, seqlen_k=20, heads_q=1, heads_kv=1, causal=True)),
    "packed_sequences": (
        4,
        Case("", lengths=((1, 300), (2, 5), (0, 40), (3, 0), (4, 333)), heads_q=8, heads_kv=2, causal=True, sink=True),
    ),
    "unused_rows": (
        3,
        Case(
            "",
            batch=3,
            seqlen_q=3,
            seqlen_k=300,
            head_dim=128,
            heads_kv=1,
            seqused=((3, 257), (1, 0), (0, 9)),
            sink=True,
        ),
    ),
    "two_teams": (3, Case("", seqlen_q=140, seqlen_k=600, head_dim=128, heads_q=2, heads_kv=1, causal=True)),
    "window_head_dim_256": (2, Case("", seqlen_q=20, seqlen_k=600, head_dim=256, heads_kv=1, window_size=(100, 50))),
}


def judge(name: str, seed: int, interleavings) -> None:
    splits, case = CASES[name]
    problem = poison_unused(cases.make(replace(case, name=name), seed))
    tiles = replace(tiles_for(problem.spec, problem.inputs.extent), splits=splits)
    results = [KERNELS.forward(problem, emulator_seed, schedule, tiles) for schedule, emulator_seed in interleavings]
    for out, lse in results:
        cases.assert_right(cases.judge_forward(problem, out, lse), f"{name}, seed {seed}")
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), f"{name}, seed {seed}"


# These have a kernel to themselves, and little that the others do not show.
SOAK_ONLY = {"many_parts", "group_of_24_in_two_blocks", "rows_without_keys", "window_head_dim_256"}


@pytest.mark.parametrize("name", sorted(CASES.keys() - SOAK_ONLY))
def test_parts_are_joined(name, seed):
    judge(name, seed, [(schedule, seed) for schedule in random.Random(seed).sample(SCHEDULES, 2)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_parts_are_joined_under_many_interleavings(name, seed):
    judge(name, seed, [(schedule, seed + i) for i in range(4) for schedule in SCHEDULES])


@pytest.mark.parametrize(
    "heads, batch, rows, keys, expected",
    [
        ((32, 8), 1, 1, 8192, 12),
        ((32, 8), 1, 1, 1 << 17, 12),
        ((32, 8), 1, 1, 1024, 8),
        ((32, 8), 1, 1, 100, 1),
        ((32, 8), 16, 1, 8192, 1),
        ((32, 8), 1, 100, 32768, 4),
        ((16, 16), 8, 4096, 4096, 1),
        ((8, 8), 1, 16384, 16384, 1),
        ((8, 8), 1, 1024, 1024, 1),
        ((8, 8), 1, 512, 16384, 4),
    ],
    ids=str,
)
def test_parts_of_a_problem(heads, batch, rows, keys, expected):
    """Enough to keep the memory busy where there are few rows, or every multiprocessor where there are more."""
    spec = AttentionSpec(torch.bfloat16, 128, 128, *heads, 0.1, window_right=0)
    made = Forward(spec, Extent(batch, rows, keys), device.chip_by_number(90))
    assert made.splits == expected and ("parts" in str(made)) == (expected > 1)


@pytest.mark.parametrize(
    "group, rows, teams, packed",
    [(5, 8, 1, 5), (5, 13, 3, 1), (8, 8, 1, 8), (8, 9, 3, 8), (1, 64, 1, 1), (24, 2, 1, 24)],
)
def test_heads_of_a_group_share_a_tile(group, rows, teams, packed):
    """All of them while one team's rows hold them, a number of heads being rounded up to a power of two."""
    spec = AttentionSpec(torch.bfloat16, 64, 64, 2 * group, 2, 0.1)
    cfg = Forward(spec, Extent(1, rows, 100), device.chip_by_number(90)).cfg
    assert (cfg.teams, cfg.packed) == (teams, packed)
