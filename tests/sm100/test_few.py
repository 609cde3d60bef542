"""Few queries on the emulated Blackwell chip: one Q tile, keys cut into parts, and the joining."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.pipeline.roles import RoleTable
from fa4.runtime import device
from fa4.runtime.spec import AttentionSpec, CacheSpec, ProblemSize
from fa4.sm100 import tmem
from fa4.sm100.fwd.kernel import channels, roles, smem_map, tmem_map
from fa4.sm100.fwd.plan import Sm100Forward

CHIP = device.chip_by_number(100)


DECODE = ProblemSize(1, 1, 8192)


def made(dims=(128, 128), heads=(32, 8), extent=DECODE, **changes) -> Sm100Forward:
    return Sm100Forward(AttentionSpec(torch.bfloat16, *dims, *heads, 0.1, window_right=0, **changes), extent, CHIP)


@pytest.mark.parametrize(
    "heads, extent, splits",
    [
        ((32, 8), DECODE, 32),
        ((32, 8), ProblemSize(1, 1, 1 << 17), 37),
        ((32, 8), ProblemSize(1, 1, 100), 1),
        ((32, 8), ProblemSize(128, 1, 8192), 1),
        ((32, 8), ProblemSize(1, 512, 32768), 2),  # a chunk of a prefill: two Q tiles, and parts
        ((8, 8), ProblemSize(1, 16384, 16384), 1),
    ],
    ids=str,
)
def test_parts_of_a_problem(heads, extent, splits):
    plan = made(heads=heads, extent=extent)
    assert plan.splits == splits and ("parts" in str(plan)) == (splits > 1)


@pytest.mark.parametrize(
    "dims, per_sm, in_flight",
    [((64, 64), 2, 88), ((96, 96), 2, 64), ((128, 128), 2, 64), ((192, 128), 1, 168), ((256, 256), 1, 128)],
    ids=str,
)
def test_keys_and_values_fill_what_memory_queries_leave(dims, per_sm, in_flight):
    """KiB on their way to a CTA at a time; two CTAs share a multiprocessor where heads are not wide."""
    cfg = made(dims).cfg
    assert (cfg.per_sm, cfg.kv_stages * cfg.kv_stage_bytes >> 10) == (per_sm, in_flight)
    nbytes = smem_map(cfg, channels(cfg)).nbytes
    assert per_sm * (nbytes + 1024) <= CHIP.smem_per_block + 1024
    assert tmem_map(cfg).end <= tmem.COLUMNS // per_sm


def test_ctas_that_share_a_multiprocessor_share_its_registers():
    """What warpgroups ask of setmaxnreg is given from what the CTA got at launch."""
    table = roles(made().cfg)
    assert table.per_sm == 2 and table.launch_regs() == 80
    with pytest.raises(ValueError, match="each of 3 CTAs of an SM has 21504"):
        RoleTable(table.roles, 3)


def test_tensor_memory_is_shared_evenly():
    spans = tmem.TmemMap(S=tmem.cols(0, 200), O=tmem.cols(200, 100))
    with pytest.raises(ValueError, match="300 tmem columns does not fit a share of 256"):
        tmem.TensorMemory(0, per_sm=2).place(spans, None)


@pytest.mark.parametrize(
    "page_size, rows, pieces", [(8, 1, 8), (16, 1, 4), (48, 1, 4), (64, 1, 1), (256, 1, 1), (16, 512, 8), (64, 512, 2)]
)
def test_a_block_of_keys_comes_in_the_pieces_that_pages_hold(page_size, rows, pieces):
    cfg = made(extent=ProblemSize(1, rows, 4096), cache=CacheSpec(page_size=page_size), has_seqused_k=True).cfg
    assert cfg.k_tile.pieces == cfg.v_tile.pieces == pieces
    assert cfg.k_tile.piece_rows * pieces == cfg.tile_n and page_size % cfg.k_tile.piece_rows == 0


@pytest.mark.parametrize("rows", [1, 3, 500])
def test_parts_of_a_batch_invariant_problem_follow_from_the_cache_alone(rows):
    """And so do tiles, whatever number of queries others have."""
    plan = made(extent=ProblemSize(rows, rows, 8192), batch_invariant=True)
    assert (plan.cfg.rows, plan.cfg.tile_n, plan.splits, plan.cfg.fixed_parts) == (128, 64, 16, True)
    assert plan.sizes.part_blocks == 8
