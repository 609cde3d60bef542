"""What is tuned, not what follows from the shape. `evidence` says what chose the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...device import Chip
from ...fwd.rows import slots_of
from ...spec import AttentionSpec, ProblemSize
from ..tmem import LANES
from .config import Schedule


@dataclass(frozen=True, slots=True)
class ForwardTiles:
    """A tuned row; see `Config` for what the columns mean. splits: parts that keys are cut into, None for as many as
    keep the chip busy."""

    name: str
    polynomial: int
    schedule: Schedule
    evidence: str
    ctas: int = 1
    q_tiles: int = 2
    sawtooth: bool = False
    rescale_threshold: float = 8.0
    tile_n: int = 128
    directly: bool = False
    per_sm: int = 1
    splits: int | None = None


# Of few queries. A key block of 64 leaves softmax registers, and each CTA tensor memory, for two CTAs on a
# multiprocessor, as long as O and the stages leave room.
_FEW = {"polynomial": 0, "schedule": Schedule.SINGLE, "q_tiles": 1, "tile_n": 64, "directly": True}
FEW = ForwardTiles("few queries", evidence="64 KB or more of K and V in flight a CTA; predicted", per_sm=2, **_FEW)
FEW_WIDE = ForwardTiles("few queries, wide", evidence="128 KB or more of K and V in flight; predicted", **_FEW)
# Of keys of 8 bits, however many queries. A multiprocessor's shared memory is what takes time: of each byte it moves
# six (in, to the warps that convert it, two from them, two to the product), so that a CTA more would add nothing.
BYTES = ForwardTiles("8-bit keys", evidence="as much of K and V in flight as there is room for; predicted", **_FEW)
# Rows that a warpgroup copies one by one, however many queries.
GATHER = ForwardTiles("gathered rows", evidence="as those of few queries; predicted", **_FEW)

_EXP2 = {  # polynomial -> why, by which unit of which chip bounds the loop
    0: "the special-function unit is no bound",
    4: "the way from S to P, on which the other tile's products wait, is shortest",
    5: "head_dim_v <= 64: exp2 takes twice the product's cycles",
    6: "the way from S to P is shortest, of blocks that no mask cuts",
}
_SCHEDULES = {
    Schedule.PERSISTENT: "tiles of one length",
    Schedule.SINGLE: "tiles of many lengths, packed or of pairs: the hardware hands out the next, longest first, as "
    "CTAs retire",
    Schedule.DYNAMIC: "tiles of many lengths: a CTA that stays takes the next, longest first, while its last one ends",
}


def are_few(spec: AttentionSpec, extent: ProblemSize) -> bool:
    """Whether one Q tile has room for all query rows of a key/value head, or has to be taken, because what a sequence's
    sums are made of must not depend on how many queries others have."""
    if spec.has_blocks:
        return False
    return spec.batch_invariant or extent.max_seqlen_q * slots_of(spec.group) <= LANES


def tiles_for(spec: AttentionSpec, chip: Chip, extent: ProblemSize | None = None) -> ForwardTiles:
    """The row for a problem on a chip; of many queries where nothing is said of the extent.

    Its columns are independent of each other: the share of exp2 follows from the chip and the head dims, the schedule
    from how much the tiles differ in length, pairs from the shape. None of it was measured.
    """
    if spec.cache is not None and (spec.cache.has_bytes or spec.cache.is_scattered):
        return BYTES if spec.cache.has_bytes else GATHER
    if extent is not None and are_few(spec, extent):
        return FEW if spec.head_dim <= 128 and spec.head_dim_v <= 128 else FEW_WIDE
    rows = None if extent is None else extent.max_seqlen_q * math.gcd(spec.group, LANES)
    ctas = 2 if _fills_pairs(spec, rows) else 1
    name, schedule = _schedule(spec, ctas)
    polynomial = _polynomial(spec, chip)
    if spec.mods is not None and spec.mods.block is not None:
        # A work tile is one block of queries, or part of one.
        evidence = f"exp2: {_EXP2[polynomial]}; schedule: {_SCHEDULES[Schedule.SINGLE]}; predicted, not measured"
        q_tiles = 1 if spec.mods.block[0] % (2 * LANES) else 2
        return ForwardTiles("lists of blocks", polynomial, Schedule.SINGLE, evidence, q_tiles=q_tiles)
    # Beside Q of 192 columns staged O would leave a pair two stages of K and V; without it there are five.
    directly = ctas == 2 and spec.head_dim > 128
    evidence = f"exp2: {_EXP2[polynomial]}; schedule: {_SCHEDULES[schedule]}; predicted, not measured"
    return ForwardTiles(name, polynomial, schedule, evidence, ctas, directly=directly)


def _polynomial(spec: AttentionSpec, chip: Chip) -> int:
    """Of every 16 pairs, those whose exp2 the FMA units take. sm_103 has twice the special-function units. Products
    that take longer than all exponentials, those of (192, 128), do not hide them: a tile's S is in softmax while the
    other tile's products run, which take half as long as both tiles' exponentials (`python -m fa4.emulator.timing fwd`
    with 0 and 4: 1804 and 1919 TFLOP/s predicted for (192, 128), full, 16k; d128 with 4 and 6: 1609 and 1720 for full,
    1575 and 1562 for causal, 16k)."""
    if chip.number == 103:
        return 0
    if spec.head_dim_v <= 64:
        return 5
    is_full = spec.window_left is None and spec.window_right is None
    return 6 if is_full and spec.head_dim <= 128 else 4


def _schedule(spec: AttentionSpec, ctas: int) -> tuple[str, Schedule]:
    """Causal tiles differ in length as packed sequences do. For 32k tokens on 148 multiprocessors a simulation of this
    order of tiles puts the last CTA's end 6 to 20% past the ideal when each strides through the tiles, and 1 to 3%
    when they are handed out one by one; a CTA that stays then takes 3,800 cycles a tile where a new one takes 9,900
    (`python -m fa4.emulator.timing fwd --causal`). Packed tiles, some of which are empty, are left to new CTAs, and so
    are tiles of pairs, which do not take over work."""
    if spec.varlen:
        return "varlen", Schedule.SINGLE
    if spec.window_left is None and spec.window_right is None:
        return "full", Schedule.PERSISTENT
    # A window bounded on both sides gives all tiles but the first and last the same length.
    if spec.window_left is not None:
        return "window", Schedule.PERSISTENT
    return "causal", Schedule.DYNAMIC if ctas == 1 else Schedule.SINGLE


def _fills_pairs(spec: AttentionSpec, rows: int | None) -> bool:
    """Whether two CTAs share a tile: where nothing is masked but ends of sequences, head dims are whole panels for
    each, and there are rows for both. Of packed sequences each leaves half a tile idle at its end, and a causal tile
    of two half a tile more above the diagonal, so that the longest must fill several. Causal ones of (192, 128) alone:
    one CTA has room for two stages of K and V (predicted at 4k and 16k: 1312 and 1466 TFLOP/s by one CTA, 1386 and
    1768 by pairs; of d128 at 16k 1637 and 1555)."""
    masked = spec.window_left is not None or spec.window_right is not None
    is_causal = spec.window_left is None and spec.window_right == 0
    if spec.cache is not None or spec.head_dim not in (128, 192) or spec.head_dim_v != 128:
        return False
    if masked and not (is_causal and spec.head_dim == 192 and not spec.varlen):
        return False
    least = (16 if spec.varlen or masked else 2) * LANES
    return rows is None or rows > least
