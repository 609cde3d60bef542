"""One row per case: what is tuned, not what follows from the shape. `evidence` says what chose the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ...device import Chip
from ...spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """A tuned row. tile_m: query rows of a step. q_stages: tiles of Q in shared memory. stages: of dO and of dS.
    overlapped: products of a step run beside the next one's P and dS; see `overlapped`."""

    name: str
    tile_m: int
    q_stages: int
    stages: int
    overlapped: bool
    evidence: str


D64 = BackwardTiles("d64", 128, 2, 2, False, "full 4k, causal 4k on an H100: 478, 466 TFLOP/s; 96 overlapped: 445, 417")
D96 = BackwardTiles("d96", 64, 3, 2, True, "full, causal 4k on an H100: 465, 422 TFLOP/s; 80 in order: 424, 382")
D128 = BackwardTiles("d128", 64, 3, 2, True, "full 4k, 16k on an H100: 558, 597 TFLOP/s; 80 in order: 497, 530")
SOFTCAP = BackwardTiles("softcap", 64, 2, 2, False, "its slope needs the scores beside P, and these the registers")

D192 = BackwardTiles("d192", 64, 3, 3, False, "(192, 128) full, causal 4k on an H100: 366, 322; portable 249, 238")
D256 = BackwardTiles("d256", 64, 2, 2, False, "full, causal 4k on an H100: 397, 355 TFLOP/s; portable 260, 252")


def _panels(columns: int) -> int:
    return -(-columns // 64)


def tiles_for(spec: AttentionSpec, chip: Chip) -> BackwardTiles:
    """The row for a problem on a chip."""
    largest = max(spec.head_dim, spec.head_dim_v)
    if largest > 128:
        return D192 if _panels(spec.head_dim) + _panels(spec.head_dim_v) <= 6 else D256
    if largest <= 64:
        return D64
    if spec.softcap > 0 or (spec.mods is not None and spec.mods.score is not None):
        return SOFTCAP
    return D96 if largest <= 96 else D128
