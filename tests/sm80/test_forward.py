"""The portable forward: tiles for every head dim, code for every flag, when keys are split. Named cases: tests/gpu."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4 import cases
from fa4.cases import Case
from fa4.device import chip_by_number
from fa4.fwd.splits import choose_splits
from fa4.sm80.forward import ForwardKernel
from fa4.sm80.tiles import forward_tiles


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
_SPLIT = {**_EVERYTHING, "sink_dtype": None, "split": True}


@pytest.mark.parametrize("number", [80, 90, 120])
@pytest.mark.parametrize("fields", [_PLAIN, _EVERYTHING, _SPLIT], ids=["plain", "everything", "split"])
def test_compiles_without_a_gpu(number, fields):
    chip = chip_by_number(number)
    tiles = forward_tiles(fields["head_dim"], fields["head_dim_v"], chip, 4096)
    kernel = ForwardKernel(tiles=tiles, **fields)
    assert hash(kernel) == hash(dataclasses.replace(kernel))  # it is a cache key
    assert callable(kernel.compile(chip))


def test_splits_fill_an_idle_chip_and_leave_a_busy_one_alone():
    spec = cases.make(Case("any", seqlen_k=8), 0).spec
    assert choose_splits(spec, tiles=8, seqlen_k=8192, tile_n=64, slots=264) == 32  # 4 blocks of keys each
    assert choose_splits(spec, tiles=100, seqlen_k=8192, tile_n=64, slots=264) == 2
    assert choose_splits(spec, tiles=200, seqlen_k=8192, tile_n=64, slots=264) == 1
    assert choose_splits(spec, tiles=1, seqlen_k=100, tile_n=64, slots=264) == 1
