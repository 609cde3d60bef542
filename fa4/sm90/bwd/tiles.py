"""One row per case: what is tuned, not what follows from the shape. `evidence` says what chose the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ...device import Chip
from ...spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """A tuned row. tile_m: query rows of a step. stages: tiles of Q, dO and dS in shared memory."""

    name: str
    tile_m: int
    stages: int
    evidence: str


D64 = BackwardTiles("d64", 128, 2, "the widest that registers hold; no other measured")
D128 = BackwardTiles("d128", 80, 2, "full 4k, 16k on an H100: 535, 584 TFLOP/s, of 64 queries 521, 552")
D128_CUT = BackwardTiles("d128_cut", 64, 2, "causal 4k, 16k on an H100: 467, 561 TFLOP/s, of 80 queries 462, 573")


def tiles_for(spec: AttentionSpec, chip: Chip) -> BackwardTiles:
    """The row for a problem on a chip. Where a mask cuts blocks, lower steps waste less of them; a softcap's slope
    takes the registers of higher ones."""
    if max(spec.head_dim, spec.head_dim_v) <= 64:
        return D64
    is_plain = spec.window_left is None and spec.window_right is None and spec.softcap == 0
    return D128 if is_plain else D128_CUT
