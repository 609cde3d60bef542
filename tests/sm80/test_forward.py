"""The portable forward: tiles for every head dim, code for every flag, and on a GPU the named cases."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4 import cases
from fa4.device import chip_by_number
from fa4.sm80.forward import ForwardKernel
from fa4.sm80.tiles import forward_tiles

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the kernel on a CUDA device")


@pytest.mark.parametrize("number", [80, 86, 90, 120])
def test_every_head_dim_has_tiles_that_fit_the_chip(number):
    chip = chip_by_number(number)
    for head_dim in range(8, 257, 8):
        for head_dim_v in (8, head_dim, 256):
            for rows in (1, 4096):
                tiles = forward_tiles(head_dim, head_dim_v, chip, rows)
                assert tiles.smem_bytes(head_dim, head_dim_v) <= chip.smem_per_block
                assert tiles.tile_m % (16 * tiles.warps) == 0


_PLAIN = dict(
    dtype=torch.bfloat16,
    head_dim=64,
    head_dim_v=64,
    group=1,
    packed=False,
    varlen=False,
    has_seqused_q=False,
    has_seqused_k=False,
    has_left=False,
    has_right=False,
    has_softcap=False,
    sink_dtype=None,
)
_EVERYTHING = dict(
    dtype=torch.float16,
    head_dim=72,
    head_dim_v=40,
    group=4,
    packed=True,
    varlen=True,
    has_seqused_q=True,
    has_seqused_k=True,
    has_left=True,
    has_right=True,
    has_softcap=True,
    sink_dtype=torch.bfloat16,
)


@pytest.mark.parametrize("number", [80, 90, 120])
@pytest.mark.parametrize("fields", [_PLAIN, _EVERYTHING], ids=["plain", "everything"])
def test_compiles_without_a_gpu(number, fields):
    chip = chip_by_number(number)
    tiles = forward_tiles(fields["head_dim"], fields["head_dim_v"], chip, 4096)
    kernel = ForwardKernel(tiles=tiles, **fields)
    assert hash(kernel) == hash(dataclasses.replace(kernel))  # it is a cache key
    assert callable(kernel.compile(chip))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES.values(), ids=str)
def test_named_case_on_the_gpu(case, seed):
    problem = cases.make(case, seed, device="cuda")
    out, lse = problem.call(backend="sm80")
    cases.assert_right(cases.judge_forward(problem, out, lse), f"{case} (seed {seed})")
