"""Rows that are added to sums by key, in order, on emulated chips: the bits of a loop."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from fa4.bwd.launchers import ORDERED_SUMS, OrderedSumsConfig
from fa4.emulator import emulate
from fa4.runtime.device import chip_of


@pytest.mark.parametrize(
    ("chip", "dtype", "columns"),
    [("sm_80", torch.float32, 128), ("sm_90a", torch.bfloat16, 8), ("sm_100a", torch.float16, 264)],
)
def test_sums_have_the_bits_of_a_loop(chip, dtype, columns, seed):
    """Keys have no row, one, and more than are in flight."""
    gen = torch.Generator().manual_seed(seed)
    counts = torch.tensor([0, 1, 8, 9, 30, 0, 3])
    heads, entries = 3, int(counts.sum())
    rows = torch.randn(entries + 5, heads, columns, generator=gen).to(dtype)
    order = torch.randperm(entries + 5, generator=gen)
    rows[order[entries:]] = torch.nan  # of no key
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    before = torch.randn(len(counts), heads, columns, generator=gen)
    total, expected = before.clone(), before.clone()
    for key in range(len(counts)):
        for i in range(starts[key], starts[key + 1]):
            expected[key] += rows[order[i]].float()
    with emulate(chip, sms=2, seed=seed):
        ORDERED_SUMS.launcher(OrderedSumsConfig(dtype, columns), chip_of(rows.device))(
            (rows, order.int(), starts, total)
        )
    assert torch.equal(total, expected), f"seed {seed}"
