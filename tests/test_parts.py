"""Few queries on the emulated chips that cut keys into parts natively: the parts, and the joining."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.runtime.device import chip_by_number
from fa4.sm90.fwd import tiles as sm90_tiles
from fa4.sm100.fwd import tiles as sm100_tiles
from tests import parts
from tests.sm90.test_forward import KERNELS as SM90
from tests.sm100.test_forward import KERNELS as SM100

pytestmark = pytest.mark.rotates(2)

CHIPS = {"sm90": (SM90, 90, sm90_tiles), "sm100": (SM100, 100, sm100_tiles)}


def judge(backend: str, name: str, seed: int, interleavings) -> None:
    kernels, number, tiles = CHIPS[backend]

    def row(problem):
        return tiles.tiles_for(problem.spec, chip_by_number(number), problem.inputs.extent).row

    parts.judge(kernels, row, name, seed, interleavings)


@pytest.mark.parametrize("name", sorted(parts.CASES.keys() - parts.SOAK_ONLY))
@pytest.mark.parametrize("backend", CHIPS)
def test_parts_are_joined(backend, name, seed):
    judge(backend, name, seed, parts.two_of_the_schedules(seed))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", parts.CASES)
@pytest.mark.parametrize("backend", CHIPS)
def test_parts_are_joined_under_many_interleavings(backend, name, seed):
    judge(backend, name, seed, parts.many_interleavings(seed))
