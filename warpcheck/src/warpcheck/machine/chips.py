"""The chips that the machine models, by the name of their target, from the package's one table."""

from __future__ import annotations

from fa4.chips import CHIPS as KNOWN
from fa4.chips import ChipFacts

RESERVED_SHARED = 1024  # bytes that the system keeps of every block's shared memory
_MODELLED = (80, 86, 89, 90, 100, 103)

CHIPS = {KNOWN[number].target: KNOWN[number] for number in _MODELLED}


def chip_facts(chip: str) -> ChipFacts:
    """The record of `chip`. Raises ValueError naming the modelled chips."""
    if chip not in CHIPS:
        raise ValueError(f"chip is {chip!r}, expected one of {', '.join(CHIPS)}")
    return CHIPS[chip]
