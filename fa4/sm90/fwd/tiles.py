"""Tile tables of the forward: tuned values, each row with its condition and its evidence."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from ...fwd.consumers import FEW, SEVERAL_TILES
from ...fwd.variant import Schedule
from ...pipeline.roles import ROWS_PER_WARP
from ...runtime.choice import OTHERWISE, Choice, Condition, Rule, choose
from ...runtime.conditions import (
    BLOCKS,
    CACHE,
    CAUSAL,
    DROPOUT,
    FP8,
    FULL,
    NVFP4,
    RIGHT,
    SAMPLED,
    SCATTERED,
    TRACED,
    VARLEN,
    VARYING,
    TuningCase,
    head_dims,
    keys,
    window,
)
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, ProblemSize
from ..wgmma import ROWS


@dataclass(frozen=True, slots=True)
class TileShape:
    """Columns of the table of tiles; `Sm90ForwardConfig` explains them. l2_group: (head, sequence) pairs of an L2
    group, if they fill whole rounds of the grid; None: the fewest that do. splits: see `splits_for`; None: as many as
    keep the chip busy. packs_heads: tiles have rows of all query heads of a group, even of many queries. one_block: see
    `Sm90ForwardConfig`."""

    consumers: int
    tile_n: int
    most_stages: int = 4
    kv8_stages: int = 0
    ping_pong: bool = True
    ctas: int = 1
    rescale_threshold: float = 8.0
    l2_group: int | None = None
    splits: int | None = None
    packs_heads: bool = False
    one_block: bool = False


@dataclass(frozen=True, slots=True)
class ForwardTiles(TileShape):
    """Tuned values of a problem. l2_share: share of the L2 for K and V of an L2 group, for a grid with one CTA per
    tile."""

    schedule: Schedule = Schedule.COUNTED
    l2_share: float = 0.5


def _fills_chip(case: TuningCase) -> bool:
    """True if there is at least one work tile of 256 rows per multiprocessor."""
    return -(-case.extent.max_seqlen_q // 256) * case.spec.heads_q * case.extent.batch >= case.chip.sms


def _wastes_little(case: TuningCase) -> bool:
    """True unless the second CTA of the last of few pairs would have no rows."""
    blocks = -(-case.extent.max_seqlen_q // 128)
    return blocks % 2 == 0 or blocks >= 32


def _whole_blocks(tile_n: int) -> Condition:
    """Blocks of 128 keys then come in one copy each, and blocks of tile_n keys in pieces."""

    def holds(case: TuningCase) -> bool:
        cache = case.spec.cache
        return cache is not None and cache.pieces(128) == 1 < cache.pieces(tile_n)

    return Condition(f"pages hold whole blocks of 128 keys, not of {tile_n}", holds)


MANY_KEYS = 16 << 10
LONG = 48 << 10  # keys
SHORT_QUERIES = Condition("at most 1024 queries", lambda case: case.extent.max_seqlen_q <= 1024)
LONG_QUERIES = Condition("2048 queries or more", lambda case: case.extent.max_seqlen_q >= 2048)
MANY_TILES = Condition("tiles of 256 rows fill the chip", _fills_chip)
PLAIN = ~TRACED & ~VARLEN
# In a narrow window, rows of several heads see fewer keys together than as many rows of one head.
EVEN = Condition("an even group of query heads", lambda case: case.spec.group % 2 == 0)
# A consumer then has 8 queries.
EIGHT = Condition("eight packed heads", lambda case: math.gcd(case.spec.group, ROWS_PER_WARP) == 8)
BANDED = EVEN & ~TRACED & ~CACHE & MANY_TILES & keys(2048)
SQUARE = Condition("as many queries as keys", lambda case: case.extent.max_seqlen_q == case.extent.max_seqlen_k)
DENSE = ~TRACED & ~VARYING & ~CACHE & MANY_TILES
DENSE_CAUSAL = CAUSAL & SQUARE & DENSE
# Two CTAs share the loads of key blocks. This takes less energy, so a chip at its power limit runs at a higher clock.
PAIRED = FULL & DENSE & Condition("few idle CTAs in pairs", _wastes_little)

_REASONED, _ROWS = "by reasoning", "measured on an H100 beside other rows, as bench.tune does"
# Two small blocks of K and of V in flight are faster than three or more.
_FEW = {tile_n: TileShape(1, tile_n, 2, ping_pong=False) for tile_n in (32, 64, 128)}
_NARROW_MANY, _USUAL, _WIDEST = TileShape(4, 64), TileShape(2, 128), TileShape(2, 64)
# Numbers in the evidence: TFLOP/s on an H100 with 16k tokens; in brackets, of other rows.
TILES = (
    # 4-bit K and V: the convert role loads them with their scales.
    Rule("4-bit keys, head_dim <= 256", NVFP4 & ~head_dims(128), _FEW[32], _REASONED),
    Rule("4-bit keys, head_dim <= 128", NVFP4 & ~FEW, TileShape(2, 128, ping_pong=False), _REASONED),
    Rule("few queries, 4-bit keys, head_dim <= 128", NVFP4, TileShape(1, 128, 3, ping_pong=False),
         "predicted, d128: 18.4 cycles a key and SM; with two stages 5 % more, with blocks of 64 keys 14 %"),
    # 8-bit K and V: the convert warpgroup needs registers; the bytes need smem beside the converted tiles.
    Rule("fetched 8-bit keys, head_dim <= 256",
         FP8 & SCATTERED & Condition("head_dim_v > 192", lambda case: case.spec.head_dim_v > 192),
         _FEW[32],
         "a CTA with a gather warpgroup starts with too few registers for a product of more columns"),
    Rule("8-bit keys, head_dim <= 256", FP8 & ~head_dims(128), TileShape(1, 32, 2, 4, ping_pong=False), _ROWS),
    # Rows that TMA cannot load: the convert role loads them.
    Rule("fetched 8-bit keys, head_dim <= 128", FP8 & SCATTERED & ~FEW, TileShape(2, 128, ping_pong=False), _ROWS),
    Rule("8-bit keys, head_dim <= 128", FP8 & ~FEW, TileShape(2, 128, 4, 1, ping_pong=False), _ROWS),
    Rule("few queries, gathered 8-bit keys", FP8 & SCATTERED, TileShape(1, 64, 2, 4, ping_pong=False), _ROWS),
    Rule("few queries, 8-bit keys, head_dim <= 128", FP8, TileShape(1, 128, 2, 2, ping_pong=False), _ROWS),
    # Rows copied one by one: beside a gather warpgroup there are registers for few columns; stages: see `gather`.
    Rule("gathered rows, head_dim <= 256", SCATTERED & ~head_dims(128), TileShape(1, 32, 3, ping_pong=False),
         _REASONED),
    Rule("few queries, gathered rows", SCATTERED & FEW, TileShape(1, 128, 3, ping_pong=False), _ROWS),
    Rule("gathered rows, head_dim <= 64", SCATTERED & head_dims(64), TileShape(2, 128),
         "4k queries of 128 heads, lists of 2k of 32k rows: 353 (304 with three stages, 298 with 64 keys)"),
    Rule("gathered rows", SCATTERED, TileShape(2, 64),
         "d128, the same: 509 (437 with three stages, 441 with 96 keys and three)"),
    # Few queries: memory-bound.
    Rule("few queries, head_dim <= 64", FEW & head_dims(64), _FEW[128], _ROWS),
    Rule("few queries, head_dim <= 128", FEW & head_dims(128), _FEW[64], _ROWS),
    Rule("few queries, head_dim <= 256", FEW, _FEW[32], _ROWS),
    Rule("lists of blocks", BLOCKS & head_dims(192, 128), _USUAL, _ROWS),
    Rule("lists of blocks, head_dim <= 256", BLOCKS, _WIDEST, _ROWS),
    Rule("head_dim <= 64, window in a block",
         head_dims(64) & BANDED & EIGHT & ~VARYING & window(129),
         TileShape(4, 136, ping_pong=False, packs_heads=True, one_block=True),
         "H200, 64/8 heads, 128 keys, 4k, 16k, 32k tokens: 232, 279, 295 (blocks of 64 keys 174, 203, 210; three "
         "warpgroups 205, 250, 261; two 176, 202, 208)"),
    Rule("head_dim <= 64, narrow window", head_dims(64) & BANDED & window(1024),
         TileShape(4, 64, ping_pong=False, packs_heads=True),
         "8k tokens, 64/8 heads, windows of 128, 256, 512, 1024 keys: 189, 278, 363, 404 (133, 214, 310, 392)"),
    Rule("head_dim <= 128, window", head_dims(128) & ~head_dims(96) & BANDED & window(4096),
         TileShape(3, 64, packs_heads=True),
         "8k tokens, 32/8 heads, windows of 128, 512, 1024, 4096 keys: 231, 473, 529, 679 (206, 408, 490, 623)"),
    Rule("head_dim <= 256, narrow window", ~head_dims(192) & BANDED & window(512), TileShape(2, 64, packs_heads=True),
         "8k tokens, 16/8 heads, 512 keys: 502 (474 with one head a tile)"),
    # A tile of 256 rows takes 1.7x as long as one of 128.
    Rule("head_dim <= 64, many short masked rows", head_dims(64) & RIGHT & keys(0, 4096) & PLAIN & MANY_TILES,
         _NARROW_MANY, "causal 512 keys 284 (252), 4k 479 (462), 16k 485 (513)"),
    Rule("head_dim <= 64, many short rows", head_dims(64) & ~RIGHT & keys(0, 1024) & PLAIN & MANY_TILES,
         _NARROW_MANY, "full 512 keys 421 (377), 2k 488 (489), 4k 487 (495)"),
    # With few keys left of the diagonal, smaller tiles waste less work beyond it.
    Rule("head_dim <= 64, short causal", head_dims(64) & RIGHT & keys(0, 1024), TileShape(2, 128, ping_pong=False),
         "causal 1k 331 (302 by three warpgroups)"),
    Rule("head_dim <= 64", head_dims(64), TileShape(3, 128), _ROWS),
    Rule("head_dim <= 96, few queries", head_dims(96) & SHORT_QUERIES, _USUAL, _ROWS),
    Rule("head_dim <= 96, whole blocks in a page", head_dims(96) & _whole_blocks(96), _USUAL, _REASONED),
    Rule("head_dim <= 96", head_dims(96), TileShape(3, 96), _ROWS),
    # Three warpgroups share each block of keys, so K and V are loaded a third less often, and small blocks waste less
    # beyond the diagonal. Why it is faster than pairs, which load them half as often as one CTA, is not measured.
    Rule("head_dim <= 128, causal groups", head_dims(128) & DENSE_CAUSAL & EVEN & keys(0, LONG),
         TileShape(3, 64, packs_heads=True),
         "causal 1k, 2k, 4k, 8k, 16k, 32k, 32/8 heads: 512, 561, 626, 676, 697, 701 (488, 545, 580, 620, 634, 668); "
         "one head a tile: 434, 550, 597, 663, 697, 721. H200, 67 to 1013 keys: 0.71 to 0.92 of the others' time; 17 "
         "to 62 keys: 1.04 to 1.10"),
    Rule("head_dim <= 128, short causal", head_dims(128) & RIGHT & keys(0, 512) & ~EVEN,
         TileShape(2, 64, l2_group=1), "causal 512 keys 317 (303 in L2 groups that fill rounds)"),
    Rule("head_dim <= 128, long rows", head_dims(128) & FULL & DENSE & LONG_QUERIES & keys(2048), TileShape(3, 64),
         "H200, full 2k, 4k, 8k, 16k: 656, 665, 675, 676 (pairs of CTAs of two warpgroups 641, 647, 661, 660; these "
         "alone 634, 653, 668, 669, in ping-pong 625, 639, 654, 654); 1k 583 (596; 603, 598)"),
    Rule("head_dim <= 128, long causal", head_dims(128) & DENSE_CAUSAL & keys(8 << 10, LONG),
         TileShape(3, 64), "causal 8k, 16k, 32k, 16 heads: 626, 689, 710 (620, 632, 645 in pairs); 4k: 579 (585)"),
    Rule("head_dim <= 192, long causal",
         head_dims(192, 128) & ~head_dims(128) & CAUSAL & PLAIN & keys(MANY_KEYS, LONG), TileShape(3, 64),
         "causal 16k 706 (688 by two warpgroups with 128 keys); 4k 579 (609)"),
    Rule("head_dim <= 128", head_dims(192, 128), _USUAL,
         "H200, (192, 128), full 1k, 4k, 16k: 607, 683, 713 (without ping-pong 592, 670, 691; pairs of CTAs 597, 671, "
         "687; three warpgroups with 64 keys 627, 671, 677)"),
    # Dropout bits come in words of 32 keys.
    Rule("head_dim <= 192, whole blocks in a page", head_dims(192) & ~DROPOUT & _whole_blocks(112), _WIDEST, _REASONED),
    Rule("head_dim <= 192", head_dims(192) & ~DROPOUT, TileShape(2, 112), _ROWS),
    Rule("head_dim <= 256, pairs", PAIRED & keys(MANY_KEYS), TileShape(2, 64, ctas=2),
         "full 16k 733 (711 alone); 4k 688 (684); 1k 576 (579). H200, 4k to 10k: 0.92 to 1.00 of one CTA's speed"),
    Rule("head_dim <= 256", OTHERWISE, _WIDEST, _ROWS),
)  # fmt: skip

LONG_CAUSAL = CAUSAL & keys(LONG + 1) & Condition("long queries", lambda case: case.extent.max_seqlen_q > LONG // 2)
LONG_CAUSAL = LONG_CAUSAL & ~FP8 & ~SCATTERED & ~FEW & ~BLOCKS
SCHEDULES = (
    Rule("packed", VARLEN & SEVERAL_TILES, Schedule.PACKED, "d128: 466 us; 514 us by a persistent grid"),
    Rule("single, varlen", VARLEN, Schedule.SINGLE, "as several tiles, which need no search for their sequence"),
    Rule("single, block mask", BLOCKS, Schedule.SINGLE, "tiles differ in length by what the mask lists"),
    # At 32k keys the persistent grid is faster: 672 (645).
    Rule("single, long causal", LONG_CAUSAL, Schedule.SINGLE, "64k keys, TFLOP/s (persistent grid): d128 675 (574), "
         "d64 540 (510), (192, 128) 706 (650), d256 738 (707); d128 with 32/8 heads 663 (563)"),
    Rule("persistent", FEW | CACHE, Schedule.PERSISTENT,
         "a CTA has one tile, which the counter would delay by a microsecond"),
    Rule("persistent, to predict a time", SAMPLED, Schedule.PERSISTENT,
         "by a counter, the CTAs that run would take the tiles of all others"),
    Rule("counted", OTHERWISE, Schedule.COUNTED,
         "beside a kernel on 8 of 132 SMs of an H200: 0.94 to 1.14 of the speed that 124 SMs should have (tiles by "
         "index 0.52 to 0.64). Alone, pairs of CTAs: 0.99 to 1.03 of the speed of tiles by index"),
)  # fmt: skip
L2_SHARES = (
    Rule("quarter of L2", LONG_CAUSAL, 0.24, "12 MB on an H100: d128 64k 675 TFLOP/s, with 25 MB 637"),
    Rule("half of L2", OTHERWISE, 0.5, "the rest is for Q and O"),
)


def tiles_for(spec: AttentionSpec, chip: Chip, extent: ProblemSize) -> Choice[ForwardTiles]:
    """Return the tuned values of a problem on a chip."""
    tiles = choose(TILES, TuningCase(spec, chip, extent))
    case = TuningCase(spec, chip, extent, tiles.row.consumers * ROWS)
    schedule, l2_share = choose(SCHEDULES, case), choose(L2_SHARES, case)
    columns = asdict(tiles.row) | {"schedule": schedule.row, "l2_share": l2_share.row}
    return Choice(ForwardTiles(**columns), (tiles, schedule, l2_share))
