"""Where each chip adds up a block's dQ: an element has its own place, and `bwd.kernels.finish` may read it in fours."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.runtime.device import chip_by_number
from fa4.sm80.config import Fragments
from fa4.sm80.tiles import backward_tiles, padded
from fa4.sm100.bwd.config import Chunks, Columns

FRAGMENTS = sorted(
    {
        (tiles.tile_m, padded(head_dim), tiles.warps_q)
        for number in (80, 86)
        for head_dim in range(8, 257, 8)
        for tiles in [backward_tiles(head_dim, head_dim, chip_by_number(number)).row]
    }
)
PLACEMENTS = [
    *(Fragments(*shape) for shape in FRAGMENTS),
    *(Chunks(128, columns, ctas) for ctas in (1, 2) for columns in (64, 128)),
    Chunks(128, 96, 1),
    Columns(64, 192),
]


def place(placement, row: int, column: int) -> int:
    first = column // (32 * placement.rows) * (32 * placement.rows)
    return placement.offset(row, first, column - first)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_element_has_its_own_place(placement):
    places = {place(placement, row, column) for row in range(placement.tile_m) for column in range(placement.columns)}
    assert places == set(range(placement.elements)) and placement.elements == placement.tile_m * placement.columns


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_eight_columns_lie_in_runs_of_four_wherever_they_start(placement):
    of_first = None
    for row in range(0, placement.tile_m, placement.rows):
        for column in range(0, placement.columns, 8):
            start = place(placement, row, column)
            piece = [place(placement, row + r, column + c) - start for r in range(placement.rows) for c in range(8)]
            of_first = of_first or piece
            assert piece == of_first, (row, column)
            assert start % 4 == 0
    ordered = sorted(of_first)
    assert all(ordered[i : i + 4] == list(range(ordered[i], ordered[i] + 4)) for i in range(0, len(ordered), 4))


@pytest.mark.parametrize("warps", [(2, 2), (4, 2), (2, 4)], ids=str)
def test_fragments_are_those_of_the_tensor_core(warps):
    """What a thread's i-th accumulator of dQ is, asked of the tiled product itself while a function is traced."""
    import cutlass
    import cutlass.cute as cute

    from fa4.sm80.tensor_core import tiled_mma

    rows, columns, threads = 128, 64, 32 * warps[0] * warps[1]
    placement, seen = Fragments(rows, columns, warps), []

    @cute.jit
    def trace():
        mma = tiled_mma(cutlass.BFloat16, *warps)
        for thread in cutlass.range_constexpr(0, threads, 5):
            own = mma.get_slice(thread).partition_C(cute.make_identity_tensor((rows, columns)))
            for i in cutlass.range_constexpr(0, cute.size(own), 3):
                seen.append((thread, i, *(int(x) for x in own[i])))

    cute.compile(trace)
    assert seen
    assert all(place(placement, row, column) == i * threads + thread for thread, i, row, column in seen)
