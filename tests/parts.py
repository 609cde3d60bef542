"""Problems of few queries whose keys are cut into parts, for the kernels of every chip that does so natively."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from warpcheck.machine import SCHEDULES

from fa4.oracle import cases
from fa4.oracle.cases import Case, Problem
from tests.emulated import Kernels, poison_unused

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
            heads_kv=1,
            seqused=((3, 257), (1, 0), (0, 9)),
            sink=True,
        ),
    ),
    "two_tiles": (3, Case("", seqlen_q=140, seqlen_k=600, head_dim=128, heads_q=2, heads_kv=1, causal=True)),
    "window_head_dim_256": (2, Case("", seqlen_q=20, seqlen_k=600, head_dim=256, heads_kv=1, window_size=(100, 50))),
}

# These have a kernel to themselves, and little that the others do not show.
SOAK_ONLY = {"many_parts", "group_of_five", "group_of_24_in_two_blocks", "rows_without_keys", "window_head_dim_256"}


def two_of_the_schedules(seed: int) -> list[tuple[str, int]]:
    return [(schedule, seed) for schedule in random.Random(seed).sample(SCHEDULES, 2)]


def many_interleavings(seed: int) -> list[tuple[str, int]]:
    return [(schedule, seed + i) for i in range(4) for schedule in SCHEDULES]


def judge(
    kernels: Kernels,
    tiles_for: Callable[[Problem], Any],
    name: str,
    seed: int,
    interleavings: Iterable[tuple[str, int]],
) -> None:
    """A case is right, with the row of tiles that `tiles_for` gives cut into its parts, and its bits are the same under
    all interleavings."""
    splits, case = CASES[name]
    problem = poison_unused(cases.make(replace(case, name=name), seed))
    tiles = replace(tiles_for(problem), splits=splits)
    results = [kernels.forward(problem, emulator_seed, schedule, tiles) for schedule, emulator_seed in interleavings]
    for out, lse in results:
        cases.assert_right(cases.judge_forward(problem, out, lse), f"{name}, seed {seed}")
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), f"{name}, seed {seed}"
