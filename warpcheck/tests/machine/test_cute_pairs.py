"""Pairs in CuTe DSL (`pairs.cute_pairs`): nothing is told of the right kernel, the mistake of the other is."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck_cases.pairs.cute_pairs import CutePair, pairs, told

EVERY = pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair.id)


@pytest.mark.parametrize("name, chip", sorted({(pair.kernel.__name__, pair.chip) for pair in pairs()}))
def test_nothing_is_told_of_the_right_kernel(name: str, chip: str, seed: int) -> None:
    pair = next(pair for pair in pairs() if (pair.kernel.__name__, pair.chip) == (name, chip))
    assert told(pair, "", seed=seed) == [], f"seed {seed}"


@EVERY
def test_the_mistake_is_told(pair: CutePair) -> None:
    assert told(pair, pair.mistake)


def test_there_are_enough() -> None:
    assert len(pairs()) >= 15 and len({pair.id for pair in pairs()}) == len(pairs())
