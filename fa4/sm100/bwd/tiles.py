"""Tile table of the backward: tuned choices. `evidence` says what the numbers are based on."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """A tuned row.

    ctas: 1, or 2 for a CTA pair. polynomial: pairs of every 16 whose exp2 runs on the FMA units.
    """

    name: str
    ctas: int
    polynomial: int
    evidence: str


SINGLE = BackwardTiles("single", 1, 0, "products take 2.5x the cycles of the exponentials; not measured")
PAIR = BackwardTiles("pair", 2, 0, "a third less shared-memory traffic than single by count; not measured")


def tiles_for(spec: AttentionSpec, chip: Chip) -> BackwardTiles:
    """Return the row for a problem on a chip. Pairs need head dims that fill 128 columns, so that halves are panels."""
    if spec.mods is not None and spec.mods.block is not None and spec.mods.block[1] % 256:
        return SINGLE  # a pair would own keys of two blocks of the block mask
    halves_are_panels = all(96 < head_dim <= 128 for head_dim in (spec.head_dim, spec.head_dim_v))
    return PAIR if halves_are_panels and chip.sms >= 2 else SINGLE
