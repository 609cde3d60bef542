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
NARROW_SHORT = ForwardTiles("head_dim <= 64, short causal", 2, 128, _MEASURED, ping_pong=False)
MIDDLE = ForwardTiles("head_dim <= 96", 3, 96, _MEASURED)
USUAL = ForwardTiles("head_dim <= 128", 2, 128, _MEASURED)
USUAL_SHORT = ForwardTiles("head_dim <= 128, short causal", 2, 64, _MEASURED)
WIDE = ForwardTiles("head_dim <= 192", 2, 112, _MEASURED)
WIDEST = ForwardTiles("head_dim <= 256", 2, 80, _MEASURED)
WIDEST_SHORT = ForwardTiles("head_dim <= 256, short causal", 2, 64, _MEASURED)


def tiles_for(spec: AttentionSpec, extent: Extent) -> ForwardTiles:
    """The row for a problem."""
    row = _by_shape(spec, extent.max_seqlen_q)
    # Uneven lengths: the hardware hands out tiles as CTAs retire.
    return replace(row, schedule=Schedule.SINGLE) if spec.varlen else row


def _by_shape(spec: AttentionSpec, rows: int) -> ForwardTiles:
    """Where few keys lie left of the diagonal, what a tile computes beyond it counts: smaller tiles waste less."""
    widest, is_masked = max(spec.head_dim, spec.head_dim_v), spec.window_right is not None
    if widest <= 64:
        return NARROW_SHORT if is_masked and rows <= 1024 else NARROW
    if widest <= 96:
        return USUAL if rows <= 1024 else MIDDLE
    if spec.head_dim <= 192 and spec.head_dim_v <= 128:
        return USUAL_SHORT if is_masked and rows <= 512 and spec.head_dim <= 128 else USUAL
    if widest <= 192:
        return WIDE
    return WIDEST_SHORT if is_masked and rows <= 1024 else WIDEST
