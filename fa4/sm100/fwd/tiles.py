"""One row per case: what is tuned, not what follows from the shape. `evidence` says what chose the numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...device import Chip
from ...spec import AttentionSpec
from .config import CTA_ROWS, Schedule


@dataclass(frozen=True, slots=True)
class ForwardTiles:
    """A tuned row; see `Config` for what the columns mean."""

    name: str
    polynomial: int
    schedule: Schedule
    evidence: str
    ctas: int = 1
    sawtooth: bool = False
    rescale_threshold: float = 8.0


_ARITHMETIC = "the share that brings exp2 to 1792 of the 2048 cycles the products take; not measured"
FULL = ForwardTiles("full", 2, Schedule.PERSISTENT, _ARITHMETIC)
CAUSAL = ForwardTiles("causal", 2, Schedule.PERSISTENT, _ARITHMETIC)
NARROW = ForwardTiles("narrow", 4, Schedule.PERSISTENT, "head_dim_v <= 64: exp2 takes twice the product's cycles")
WIDE = ForwardTiles("wide", 0, Schedule.PERSISTENT, "head_dim > 128: the products' 2560 cycles hide exp2's 2048")
VARLEN = ForwardTiles("varlen", 2, Schedule.SINGLE, "uneven lengths: the hardware hands out tiles as CTAs retire")
FAST_EXP2 = ForwardTiles("sm_103", 0, Schedule.PERSISTENT, "its special-function units are twice as fast")


def tiles_for(spec: AttentionSpec, chip: Chip, rows: int | None = None) -> ForwardTiles:
    """The row for a problem on a chip; `rows` is how many query rows a head has, None for many."""
    row = _by_shape(spec, chip)
    is_full = spec.window_left is None and spec.window_right is None
    is_dense = not (spec.varlen or spec.has_seqused_k)
    if is_full and is_dense and spec.head_dim == spec.head_dim_v == 128 and (rows is None or rows > CTA_ROWS):
        return replace(row, name=f"{row.name}, pairs", ctas=2)
    return row


def _by_shape(spec: AttentionSpec, chip: Chip) -> ForwardTiles:
    if chip.number == 103:
        return FAST_EXP2
    if spec.varlen:
        return VARLEN
    if spec.head_dim_v <= 64:
        return NARROW
    if spec.head_dim > 128:
        return WIDE
    return CAUSAL if spec.window_left is not None or spec.window_right is not None else FULL
