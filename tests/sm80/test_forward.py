"""The portable forward: tiles for every head dim, code for every flag, when keys are split. Named cases: tests/gpu."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.fwd.splits import choose_splits
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number
from fa4.sm80.config import Sm80ForwardConfig
from fa4.sm80.forward import KERNEL
from fa4.sm80.plan import Plan
from fa4.sm80.tiles import FORWARD, forward_tiles


@pytest.mark.parametrize("number", [80, 86, 90, 120])
def test_every_head_dim_has_tiles_that_fit_the_chip(number):
    chip = chip_by_number(number)
    for head_dim in range(8, 577, 8):
        for head_dim_v in (8, head_dim, 256, 576):
            for rows in (1, 4096):
                tiles = forward_tiles(head_dim, head_dim_v, chip, rows).row
                assert tiles.smem_bytes(head_dim, head_dim_v) <= chip.smem_per_block
                assert tiles.tile_m % (16 * tiles.warps) == 0
                assert tiles.tile_n % (8 * tiles.warps) == 0  # rows that all threads copy at once, 4 a row


@pytest.mark.parametrize(
    "number, dims, rows, row",
    [
        (80, (128, 128), 65, FORWARD[3]),
        (80, (128, 128), None, FORWARD[3]),
        (86, (128, 128), 65, FORWARD[2]),
        (120, (128, 128), None, FORWARD[2]),
        (120, (64, 64), None, FORWARD[3]),
        (80, (128, 136), 65, FORWARD[4]),
        (80, (256, 256), 65, FORWARD[4]),
        (86, (256, 256), 65, FORWARD[5]),
        (80, (128, 128), 64, FORWARD[0]),
        (80, (136, 128), 64, FORWARD[1]),
        (86, (256, 256), 1, FORWARD[1]),
        (80, (264, 64), 64, FORWARD[6]),
        (90, (512, 512), 65, FORWARD[7]),
        (80, (512, 512), 65, FORWARD[8]),
        (90, (576, 512), 65, FORWARD[8]),
        (86, (320, 320), 1, FORWARD[6]),
        (86, (576, 512), 1, FORWARD[9]),
    ],
)
def test_the_row_of_a_head_dim(number, dims, rows, row):
    """An A100's shared memory and an A40's; up to 64 rows a head have rules of their own."""
    assert forward_tiles(*dims, chip_by_number(number), rows).rules == (row,)


def test_a_chip_with_too_little_shared_memory_has_no_tiles():
    small = dataclasses.replace(chip_by_number(80), smem_per_block=16 << 10)
    for rows in (1, 4096):
        with pytest.raises(ValueError, match=r"head_dim \(256, 128\) has no forward tiles on"):
            forward_tiles(256, 128, small, rows)


@pytest.mark.parametrize(
    "shape, packed, splits",
    [
        (dict(seqlen_q=32, heads_q=4, heads_kv=2), True, 1),
        (dict(seqlen_q=33, heads_q=4, heads_kv=2), False, 1),
        (dict(seqlen_q=32), False, 1),  # nobody to share rows with
        (dict(seqlen_q=1, heads_q=8, heads_kv=2, seqlen_k=8192), True, 22),
    ],
    ids=str,
)
def test_heads_are_packed_and_keys_split_where_rows_are_few(shape, packed, splits):
    problem = cases.make(Case("few", head_dim=128, **shape), 0, "meta")
    plan = Plan(problem.spec, problem.inputs.extent, chip_by_number(80))
    assert ("packed heads" in plan.describe(), plan.splits) == (packed, splits)


_FLAGS = ("has_left", "has_right", "has_softcap", "has_sink", "varlen", "has_seqused_q", "has_seqused_k")


# That kernels compile for sm_80 is what all tests on the emulated chip show.
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("everything", 120),
        *(pytest.param(name, 90, marks=pytest.mark.soak) for name in ("plain", "everything", "split")),
        *(pytest.param(name, 120, marks=pytest.mark.soak) for name in ("plain", "split")),
    ],
)
def test_compiles_without_a_gpu(name, number):
    chip, everything = chip_by_number(number), name != "plain"
    head_dim, head_dim_v, group = (72, 40, 4) if everything else (64, 64, 1)
    cfg = Sm80ForwardConfig(
        torch_dtype=torch.float16 if everything else torch.bfloat16,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        group=group,
        packed_heads=group,
        tiles=forward_tiles(head_dim, head_dim_v, chip, 4096).row,
        split=name == "split",
        **dict.fromkeys(_FLAGS, everything) | {"has_sink": name == "everything"},
    )
    assert hash(cfg) == hash(dataclasses.replace(cfg))  # it is a cache key
    assert callable(KERNEL.compile(cfg, chip))


def test_splits_fill_an_idle_chip_and_leave_a_busy_one_alone():
    spec = cases.make(Case("any", seqlen_k=8), 0).spec
    assert choose_splits(spec, tiles=8, seqlen_k=8192, tile_n=64, slots=264, busy=0.5) == 19  # 7 blocks of keys each
    assert choose_splits(spec, tiles=100, seqlen_k=8192, tile_n=64, slots=264, busy=0.5) == 2
    assert choose_splits(spec, tiles=200, seqlen_k=8192, tile_n=64, slots=264, busy=0.5) == 1
    assert choose_splits(spec, tiles=1, seqlen_k=100, tile_n=64, slots=264) == 1


def test_splits_that_are_asked_for_or_that_no_batch_may_change():
    spec = cases.make(Case("any", seqlen_k=8), 0).spec
    sizes = dict(seqlen_k=8192, tile_n=64, slots=264)
    asked, fixed = dataclasses.replace(spec, num_splits=5), dataclasses.replace(spec, batch_invariant=True)
    assert [choose_splits(asked, tiles=tiles, **sizes) for tiles in (1, 1000)] == [5, 5]
    assert [choose_splits(fixed, tiles=tiles, **sizes) for tiles in (1, 1000)] == [16, 16]
    assert choose_splits(fixed, tiles=1, seqlen_k=1100, tile_n=64, slots=264) == 2
    assert choose_splits(fixed, tiles=1, seqlen_k=511, tile_n=64, slots=264) == 1
