"""What Blackwell adds to the tables a kernel is built from, and the pages that show them."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import cutlass
import torch

from fa4.pipeline.picture import tables
from fa4.pipeline.smem import Tile
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec
from fa4.sm100.bwd import plan as backward_plan
from fa4.sm100.bwd.tiles import PAIR, SINGLE, BackwardTiles
from fa4.sm100.fwd import plan as forward_plan
from fa4.sm100.fwd.config import Schedule
from fa4.sm100.fwd.tiles import ForwardTiles
from fa4.sm100.mma import Major, SmemOperand, Umma
from fa4.sm100.tmem import TmemMap, alias_of, cols


def test_tmem_map_knows_its_spans():
    tmem = TmemMap(S=cols(0, 256), P=alias_of("S", 64, offset=64), O=cols(256, 256))
    assert (tmem.S, tmem.P, tmem.O) == (0, 64, 256)


@pytest.mark.parametrize(
    "spans, complaint",
    [
        (dict(S=cols(0, 128), O=cols(100, 128)), "S overlap|O and S"),
        (dict(S=cols(400, 128)), "leaves the 512 columns"),
        (dict(S=cols(0, 64), P=alias_of("S", 64, offset=32)), "does not fit"),
        (dict(P=alias_of("S", 64)), "not declared before"),
    ],
)
def test_tmem_map_refuses(spans, complaint):
    with pytest.raises(ValueError, match=complaint):
        TmemMap(**spans)


def test_descriptor_steps_follow_the_panels():
    tile = Tile(128, 96)
    assert (tile.panels, tile.panel_bytes, tile.nbytes) == (2, 16384, 32768)
    k_major = SmemOperand(tile, Major.K)
    # 16 elements are 32 bytes within a panel; after 64 elements comes the next panel. Units of 16 bytes.
    assert [k_major.step(k) for k in range(6)] == [0, 2, 4, 6, 1024, 1026]
    mn_major = SmemOperand(tile, Major.MN)
    assert [mn_major.step(k) for k in range(3)] == [0, 128, 256]  # 16 rows of 128 bytes


def test_instruction_descriptor_fields():
    tile = Tile(128, 128)
    pv = Umma(cutlass.BFloat16, n=96, k=128, b=SmemOperand(tile, Major.MN))
    fields = pv.instruction
    assert fields >> 4 & 3 == 1  # fp32 accumulator
    assert (fields >> 7 & 7, fields >> 10 & 7) == (1, 1)  # bfloat16 operands
    assert (fields >> 15 & 1, fields >> 16 & 1) == (0, 1)  # A K-major, B MN-major
    assert (fields >> 17 & 63, fields >> 24 & 31) == (96 // 8, 128 // 16)
    assert Umma(cutlass.Float16, n=64, k=40, b=SmemOperand(tile, Major.K)).steps == 3


ROOT = Path(__file__).parents[2]


def test_the_architecture_shows_the_forwards_roles_and_picture():
    page, parts = (ROOT / "docs" / "architecture.md").read_text(), tables("sm100.fwd").split("\n\n")
    for part in (parts[0], next(part for part in parts if part.startswith("```mermaid"))):
        assert part in page, "run `python -m fa4.pipeline.picture sm100.fwd` and paste its roles and picture"


def _spec(dims: tuple[int, int]) -> AttentionSpec:
    return AttentionSpec(torch.bfloat16, *dims, 4, 2, 0.1)


# head dims and CTAs -> K/V stages, whether O is staged over Q, bytes between the places of two O, columns of O.
FORWARD = {
    ((64, 64), 1): (8, False, 16384, 64),
    ((128, 128), 1): (3, False, 32768, 128),
    ((128, 128), 2): (6, False, 32768, 128),
    ((192, 128), 1): (2, True, 49152, 128),
    ((192, 128), 2): (2, False, 32768, 128),
    ((128, 64), 1): (4, False, 16384, 64),
    ((8, 104), 1): (4, False, 32768, 128),
}


@pytest.mark.parametrize("dims, ctas", FORWARD, ids=str)
def test_what_the_forward_makes_of_its_memory(dims, ctas):
    tiles = ForwardTiles(polynomial=3, schedule=Schedule.SINGLE, ctas=ctas)
    cfg = forward_plan.configure(_spec(dims), chip_by_number(100), tiles)
    assert (cfg.kv_stages, cfg.out_store.name == "TMA_OVER_Q", cfg.o_step, cfg.o_columns) == FORWARD[dims, ctas]
    # A product takes columns in sixteens; the first part of P is three quarters of a block, for speed alone.
    assert (cfg.head_dim_v_padded, cfg.p_head, cfg.rows) == (-(-dims[1] // 16) * 16, 96, 256 * ctas)


# head dims and tile row -> queries of a step, stages of Q and dO, columns of dQ, whether it lies over dP, transposed.
BACKWARD = {
    ((64, 64), SINGLE): (128, 2, 2, 64, False, False),
    ((40, 40), SINGLE): (128, 2, 2, 64, False, False),
    ((128, 128), SINGLE): (128, 2, 1, 128, True, False),
    ((128, 64), SINGLE): (128, 2, 2, 128, True, False),
    ((8, 104), SINGLE): (128, 2, 2, 32, True, False),
    ((128, 128), PAIR): (128, 1, 1, 64, True, False),
    ((192, 128), SINGLE): (64, 2, 2, 64, True, True),
}


@pytest.mark.parametrize("dims, tiles", BACKWARD, ids=str)
def test_what_the_backward_makes_of_its_memory(dims, tiles):
    cfg = backward_plan.configure(_spec(dims), chip_by_number(100), has_dlse=True, tiles=tiles)
    numbers = cfg.tile_m, cfg.q_stages, cfg.do_stages, cfg.dq_columns, cfg.dq_over_dp, cfg.dq_transposed
    assert numbers == BACKWARD[dims, tiles]
    assert (cfg.columns, cfg.columns_v) == tuple(-(-d // 32) * 32 for d in dims)


def test_each_column_of_a_tile_row_reaches_the_configuration():
    """Most decide about speed alone: results would not show it."""
    chip = chip_by_number(100)
    row = ForwardTiles(polynomial=3, schedule=Schedule.DYNAMIC, ctas=1, q_tiles=1, sawtooth=True, rescale_threshold=5.0)
    cfg = forward_plan.configure(_spec((64, 64)), chip, row)
    columns = ("polynomial", "schedule", "ctas", "q_tiles", "sawtooth", "rescale_threshold")
    assert [getattr(cfg, name) for name in columns] == [getattr(row, name) for name in columns]
    row = BackwardTiles(2, 7)
    cfg = backward_plan.configure(_spec((128, 128)), chip, has_dlse=False, tiles=row)
    assert (cfg.ctas, cfg.polynomial, cfg.smem_bytes) == (2, 7, chip.smem_per_block)
