"""One row per case: what is tuned, not what follows from the shape. `evidence` says what chose the numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...spec import AttentionSpec, Extent
from .config import Schedule


@dataclass(frozen=True, slots=True)
class ForwardTiles:
    """A tuned row; see `Config` for what the columns mean."""

    name: str
    teams: int
    tile_n: int
    evidence: str
    schedule: Schedule = Schedule.PERSISTENT
    ping_pong: bool = True
    rescale_threshold: float = 8.0


_MEASURED = "measured on an H100 beside other rows, 16k tokens"
NARROW = ForwardTiles("head_dim <= 64", 3, 128, _MEASURED)
NARROW_SHORT = ForwardTiles(
    "head_dim <= 64, short causal", 2, 128, f"{_MEASURED}; 192 rows waste more", ping_pong=False
)
MIDDLE = ForwardTiles("head_dim <= 96", 3, 96, _MEASURED)
USUAL = ForwardTiles("head_dim <= 128", 2, 128, _MEASURED)
WIDE = ForwardTiles("head_dim_v > 128", 2, 112, "registers: S, P and O in 240 a thread")
WIDEST = ForwardTiles("head_dim > 192", 2, 80, _MEASURED)
SHORT_ROWS = 2048  # up to which causal rows of 192 see too many keys that they hide


def tiles_for(spec: AttentionSpec, extent: Extent) -> ForwardTiles:
    """The row for a problem."""
    row = _by_shape(spec, extent)
    # Uneven lengths: the hardware hands out tiles as CTAs retire.
    return replace(row, schedule=Schedule.SINGLE) if spec.varlen else row


def _by_shape(spec: AttentionSpec, extent: Extent) -> ForwardTiles:
    widest = max(spec.head_dim, spec.head_dim_v)
    if widest <= 64:
        return NARROW_SHORT if spec.window_right is not None and extent.max_seqlen_q <= SHORT_ROWS else NARROW
    if widest <= 96:
        return MIDDLE
    if spec.head_dim <= 192 and spec.head_dim_v <= 128:
        return USUAL
    return WIDE if widest <= 192 else WIDEST
