"""The portable backward: tiles for every head dim, code for every flag. Gradients on a GPU: tests/gpu."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.runtime.device import chip_by_number
from fa4.sm80.backward import KERNEL
from fa4.sm80.config import Sm80BackwardConfig
from fa4.sm80.tiles import BACKWARD, HeadDims, backward_tiles

_FLAGS = (
    *("has_left", "has_right", "has_softcap", "has_sink", "has_dlse", "deterministic"),
    *("varlen", "has_seqused_q", "has_seqused_k"),
)


@pytest.mark.parametrize("number", [80, 86, 90, 120])
def test_every_head_dim_has_tiles_that_fit_the_chip(number):
    chip = chip_by_number(number)
    for head_dim in range(8, 577, 8):
        for head_dim_v in (8, head_dim, 256, 512, 576):
            assert backward_tiles(head_dim, head_dim_v, chip).row.fits(HeadDims(head_dim, head_dim_v, chip))


# Which row of the table a head dim gets: with an A100's shared memory, and with an A40's.
ROWS = {
    (8, 8): (0, 2), (64, 64): (0, 1), (64, 72): (1, 3), (72, 64): (2, 3), (96, 96): (2, 3), (128, 128): (1, 4),
    (136, 128): (7, 8), (160, 160): (7, 8), (192, 192): (6, 9), (256, 256): (8, 10), (264, 264): (12, 14),
    (384, 256): (12, 13), (512, 512): (13, 14), (576, 512): (13, 15),
}  # fmt: skip


@pytest.mark.parametrize("dims, rows", ROWS.items(), ids=str)
def test_the_row_of_a_head_dim(dims, rows):
    """The first whose warps divide the head dims: up to its limit, that included."""
    chosen = [backward_tiles(*dims, chip_by_number(number)) for number in (80, 86)]
    assert [choice.rules for choice in chosen] == [(BACKWARD[row],) for row in rows]


def test_hopper_holds_more_rows_of_wide_heads():
    rows = [backward_tiles(dim, dim, chip_by_number(90)).rules for dim in (320, 384, 512)]
    assert rows == [(BACKWARD[11],), (BACKWARD[11],), (BACKWARD[12],)]


def test_a_chip_with_too_little_shared_memory_has_no_tiles():
    small = dataclasses.replace(chip_by_number(80), smem_per_block=16 << 10)
    with pytest.raises(ValueError, match=r"head_dim \(256, 128\) has no backward tiles on"):
        backward_tiles(256, 128, small)


# That kernels compile for sm_80 is what all tests on the emulated chip show.
@pytest.mark.parametrize(
    ("everything", "number"),
    [(True, 120), *(pytest.param(*of, marks=pytest.mark.soak) for of in ((False, 120), (False, 90), (True, 90)))],
)
def test_compiles_without_a_gpu(everything, number):
    chip = chip_by_number(number)
    head_dim, head_dim_v = (72, 40) if everything else (64, 64)
    cfg = Sm80BackwardConfig(
        torch_dtype=torch.float16 if everything else torch.bfloat16,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        group=4 if everything else 1,
        tiles=backward_tiles(head_dim, head_dim_v, chip).row,
        **dict.fromkeys(_FLAGS, everything),
    )
    assert hash(cfg) == hash(dataclasses.replace(cfg))  # it is a cache key
    assert callable(KERNEL.compile(cfg, chip))
