"""Tile table of the forward: tuned choices. `evidence` says what the numbers are based on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...fwd.rows import padded_heads_of
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, ProblemSize
from ..tmem import LANES
from .config import Schedule


@dataclass(frozen=True, slots=True)
class ForwardTiles:
    """A tuned row; `Sm100ForwardConfig` explains the fields. splits: parts of split-KV, None for as many as fill the
    chip."""

    name: str
    polynomial: int
    schedule: Schedule
    evidence: str
    ctas: int = 1
    q_tiles: int = 2
    sawtooth: bool = False
    rescale_threshold: float = 8.0
    tile_n: int = 128
    direct_store: bool = False
    per_sm: int = 1
    splits: int | None = None


# Few queries. With key blocks of 64, registers and tensor memory suffice for two CTAs per SM, if O and the K/V stages
# leave room.
_FEW = {"polynomial": 0, "schedule": Schedule.SINGLE, "q_tiles": 1, "tile_n": 64, "direct_store": True}
FEW = ForwardTiles("few queries", evidence="64 KB or more of K and V in flight a CTA; predicted", per_sm=2, **_FEW)
FEW_WIDE = ForwardTiles("few queries, wide", evidence="128 KB or more of K and V in flight; predicted", **_FEW)
# 8-bit keys, any number of queries. Shared-memory bandwidth is the limit: a loaded byte moves six bytes (one in, one to
# the converting warps, two from them, two to the product). A second CTA per SM would add nothing.
BYTES = ForwardTiles("8-bit keys", evidence="as much of K and V in flight as there is room for; predicted", **_FEW)
# Gathered rows, any number of queries.
GATHER = ForwardTiles("gathered rows", evidence="as for few queries; predicted", **_FEW)

_EXP2 = {  # polynomial -> reason
    0: "the special-function unit is no bound",
    4: "shortest latency from S to P, which the products of the other tile wait for",
    5: "head_dim_v <= 64: exp2 takes twice the cycles of the product",
    6: "shortest latency from S to P in unmasked blocks",
}
_SCHEDULES = {
    Schedule.PERSISTENT: "all tiles have one length",
    Schedule.SINGLE: "tiles differ in length, varlen or pairs: the hardware starts the next CTA when one ends",
    Schedule.DYNAMIC: "tiles differ in length: a CTA takes the next, longest first, while the previous one ends",
}


def are_few(spec: AttentionSpec, extent: ProblemSize) -> bool:
    """True if one Q tile holds all query rows of a kv head. Also true for `batch_invariant`: the order of a row's sums
    must not depend on the number of queries of other sequences."""
    if spec.has_blocks:
        return False
    return spec.batch_invariant or extent.max_seqlen_q * padded_heads_of(spec.group) <= LANES


def tiles_for(spec: AttentionSpec, chip: Chip, extent: ProblemSize | None = None) -> ForwardTiles:
    """Return the row for a problem on a chip; without `extent`, for many queries.

    The fields are independent: the exp2 share follows from the chip and the head dims, the schedule from how much tiles
    differ in length, pairs from the shape. All are predicted, none is measured.
    """
    if spec.cache is not None and (spec.cache.has_8bit_kv or spec.cache.is_scattered):
        return BYTES if spec.cache.has_8bit_kv else GATHER
    if extent is not None and are_few(spec, extent):
        return FEW if spec.head_dim <= 128 and spec.head_dim_v <= 128 else FEW_WIDE
    rows = None if extent is None else extent.max_seqlen_q * math.gcd(spec.group, LANES)
    ctas = 2 if _takes_pair(spec, rows) else 1
    name, schedule = _schedule(spec, ctas)
    polynomial = _polynomial(spec, chip)
    if spec.mods is not None and spec.mods.block is not None:
        # A work tile is a block of queries of the block mask, or a part of one.
        evidence = f"exp2: {_EXP2[polynomial]}; schedule: {_SCHEDULES[Schedule.SINGLE]}; predicted, not measured"
        q_tiles = 1 if spec.mods.block[0] % (2 * LANES) else 2
        return ForwardTiles("block mask", polynomial, Schedule.SINGLE, evidence, q_tiles=q_tiles)
    # With Q of 192 columns, a staged O would leave a pair two K/V stages instead of five.
    direct_store = ctas == 2 and spec.head_dim > 128
    evidence = f"exp2: {_EXP2[polynomial]}; schedule: {_SCHEDULES[schedule]}; predicted, not measured"
    return ForwardTiles(name, polynomial, schedule, evidence, ctas, direct_store=direct_store)


def _polynomial(spec: AttentionSpec, chip: Chip) -> int:
    """Pairs of every 16 whose exp2 runs on the FMA units; 0 on sm_103, whose special-function units are twice as fast.

    At (192, 128) the products take longer than all exponentials, but do not hide them. A tile's softmax overlaps the
    products of the other tile only, which take half as long as the exponentials of both tiles. Predicted TFLOP/s at 16k
    (`python -m fa4.emulator.timing fwd`), (192, 128), full: 1804 for 0, 1919 for 4; d = 128: 1609 for 4 and 1720 for 6,
    causal 1575 and 1562.
    """
    if chip.number == 103:
        return 0
    if spec.head_dim_v <= 64:
        return 5
    is_full = spec.window_left is None and spec.window_right is None
    return 6 if is_full and spec.head_dim <= 128 else 4


def _schedule(spec: AttentionSpec, ctas: int) -> tuple[str, Schedule]:
    """Return (name, schedule). Causal and varlen tiles differ in length.

    For 32k tokens on 148 SMs, a simulation ends 6 to 20% after the ideal time if CTAs stride through the tiles, and 1
    to 3% if CTAs get tiles one by one. A tile then takes 3,800 cycles in a CTA that stays, 9,900 in a new CTA
    (`python -m fa4.emulator.timing fwd --causal`). Varlen uses new CTAs because some tiles are empty; pairs do because
    they cannot take over work.
    """
    if spec.varlen:
        return "varlen", Schedule.SINGLE
    if spec.window_left is None and spec.window_right is None:
        return "full", Schedule.PERSISTENT
    # With a window bounded on both sides, all tiles but the first and last ones have the same length.
    if spec.window_left is not None:
        return "window", Schedule.PERSISTENT
    return "causal", Schedule.DYNAMIC if ctas == 1 else Schedule.SINGLE


def _takes_pair(spec: AttentionSpec, rows: int | None) -> bool:
    """True if a CTA pair shares a tile: only sequence ends are masked, head dims split into whole panels, and both CTAs
    have rows.

    Half of a pair's tile is padding on average at the end of a varlen sequence, and masked above a causal diagonal. So
    the longest sequence must fill several tiles. Causal pairs are limited to (192, 128), where a single CTA has only
    two K/V stages (predicted at 16k: 1466 TFLOP/s by one CTA, 1768 by pairs; at d = 128 1637 and 1555).
    """
    has_band = spec.window_left is not None or spec.window_right is not None
    is_causal = spec.window_left is None and spec.window_right == 0
    if spec.cache is not None or spec.head_dim not in (128, 192) or spec.head_dim_v != 128:
        return False
    if has_band and not (is_causal and spec.head_dim == 192 and not spec.varlen):
        return False
    min_rows = (16 if spec.varlen or has_band else 2) * LANES
    return rows is None or rows > min_rows
