"""Few queries on the emulated Hopper: keys cut into parts, heads of a group as rows of a tile, and the joining."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.runtime import device
from fa4.runtime.spec import AttentionSpec, ProblemSize
from fa4.sm90.fwd.plan import Sm90Forward


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
    made = Sm90Forward(spec, ProblemSize(batch, rows, keys), device.chip_by_number(90))
    assert made.splits == expected and ("parts" in str(made)) == (expected > 1)


@pytest.mark.parametrize(
    "group, rows, consumers, packed",
    [(5, 8, 1, 5), (5, 13, 3, 1), (8, 8, 1, 8), (8, 9, 3, 8), (1, 64, 1, 1), (24, 2, 1, 24)],
)
def test_heads_of_a_group_share_a_tile(group, rows, consumers, packed):
    """All of them while one team's rows hold them, a number of heads being rounded up to a power of two."""
    spec = AttentionSpec(torch.bfloat16, 64, 64, 2 * group, 2, 0.1)
    cfg = Sm90Forward(spec, ProblemSize(1, rows, 100), device.chip_by_number(90)).cfg
    assert (cfg.consumers, cfg.packed_heads) == (consumers, packed)
