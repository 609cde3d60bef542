"""What Blackwell adds to the tables a kernel is built from, and the pages that show them."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import cutlass

from fa4.pipeline.smem import Tile
from fa4.sm100.fwd.__main__ import tables
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


def test_the_forwards_page_shows_its_tables():
    page = (ROOT / "docs" / "blackwell-forward.md").read_text()
    assert tables() in page, "run `python -m fa4.sm100.fwd` and paste it into docs/blackwell-forward.md"


def test_the_readme_shows_the_forwards_roles_and_picture():
    readme, parts = (ROOT / "README.md").read_text(), tables().split("\n\n")
    for part in (parts[0], next(part for part in parts if part.startswith("```mermaid"))):
        assert part in readme, "run `python -m fa4.sm100.fwd` and paste its roles and picture into README.md"
