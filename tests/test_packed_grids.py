"""Grids of packed sequences follow from their rows, also where the caller gives no bound of their lengths."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a compiler")

import fa4
from fa4.emulator import emulate

pytestmark = pytest.mark.rotates(3)

SEQUENCES, ROWS, HEADS, TILE = 16, 32, 2, 64  # no kernel here has tiles of fewer rows


@pytest.mark.parametrize("chip", ["sm_80", "sm_90a", "sm_100a"])
def test_without_a_bound_of_lengths_a_grid_has_few_ctas_without_work(chip, seed):
    generator = torch.Generator().manual_seed(seed)
    total = SEQUENCES * ROWS
    q, dout = (torch.randn(total, HEADS, 64, generator=generator).bfloat16() for _ in range(2))
    q.requires_grad_()
    bounds = torch.arange(0, total + 1, ROWS, dtype=torch.int32)
    with emulate(chip, sms=4, seed=seed) as gpu:
        out = fa4.flash_attn_varlen_func(q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        out.backward(dout)
    grids = [launch.grid[0] * launch.grid[1] for launch in gpu.launches]
    assert len(grids) >= 4 and max(grids) <= HEADS * (total // TILE + SEQUENCES)
