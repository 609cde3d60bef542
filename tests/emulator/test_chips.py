"""fa4's table of chips and warpcheck's, each a distribution's own, say the same."""

import dataclasses

import pytest
from warpcheck.machine.chips import CHIPS

from fa4.runtime.chips import CHIPS as KNOWN


@pytest.mark.parametrize("facts", CHIPS.values(), ids=CHIPS)
def test_both_tables_of_chips_have_the_same_numbers(facts):
    known = KNOWN[facts.number]
    shared = {field.name for field in dataclasses.fields(facts)} & {field.name for field in dataclasses.fields(known)}
    assert shared == {"number", "target", "gpu", "smem_per_sm", "l2"}
    for name in (*shared, "smem_per_block"):
        assert getattr(facts, name) == getattr(known, name), name
