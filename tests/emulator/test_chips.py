"""fa4's table of chips and warpcheck's, each a distribution's own, say the same."""

import dataclasses

import pytest
from warpcheck.machine.chips import CHIPS

from fa4.runtime.chips import CHIPS as KNOWN


@pytest.mark.parametrize("facts", CHIPS.values(), ids=CHIPS)
def test_both_tables_of_chips_have_the_same_numbers(facts):
    known = KNOWN[facts.number]
    for field in dataclasses.fields(facts):
        assert getattr(facts, field.name) == getattr(known, field.name), field.name
    assert (facts.capability, facts.smem_per_block) == (known.capability, known.smem_per_block)
