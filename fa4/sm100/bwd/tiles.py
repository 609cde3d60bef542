"""One row per case: what is tuned, not what follows from the shape. `evidence` says what chose the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ...device import Chip
from ...spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """A tuned row. polynomial: pairs of every 16 whose exp2 runs on the FMA units."""

    name: str
    polynomial: int
    evidence: str


BASE = BackwardTiles("base", 0, "products take 2.5 times the exponentials' cycles; not measured")


def tiles_for(spec: AttentionSpec, chip: Chip) -> BackwardTiles:
    """The row for a problem on a chip."""
    return BASE
