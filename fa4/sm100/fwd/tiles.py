"""Tile tables of the forward: tuned values, each row with its condition and its evidence. None is measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from ...fwd.variant import padded_heads_of
from ...runtime.choice import OTHERWISE, Choice, Condition, Rule, choose
from ...runtime.conditions import (
    BLOCKS,
    CACHE,
    E4M3,
    FP8,
    FULL,
    LEFT,
    MANY,
    MXFP8,
    NVFP4,
    SCATTERED,
    SHARED,
    VARLEN,
    TuningCase,
    head_dims,
    keys,
)
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, Operands, ProblemSize
from ..tensor_memory import LANES
from .config import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """Columns of the table of tiles; `Sm100ForwardConfig` explains them. splits: parts of split-KV, None for as many as
    fill the chip."""

    ctas: int = 1
    q_tiles: int = 2
    s_stages: int = 1
    sawtooth: bool = False
    rescale_threshold: float = 8.0
    tile_n: int = 128
    direct_store: bool = False
    per_sm: int = 1
    splits: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTiles(TileShape):
    """Tuned values of a problem: a row of each table. polynomial: see `Sm100ForwardConfig`."""

    polynomial: int
    schedule: Schedule


def are_few(spec: AttentionSpec, extent: ProblemSize) -> bool:
    """True if one Q tile holds all query rows of a kv head. Also true for `batch_invariant`: the order of a row's sums
    must not depend on the number of queries of other sequences. False with scales of blocks, for which there is one
    schedule."""
    if spec.has_blocks or spec.operands is Operands.MXFP8:
        return False
    return spec.batch_invariant or extent.max_seqlen_q * padded_heads_of(spec.group) <= LANES


def _fills_pair(case: TuningCase) -> bool:
    """True if both CTAs of a pair have rows. Half of a pair's tile is padding on average at the end of a varlen
    sequence, and masked above a causal diagonal: then the longest sequence must fill several tiles, more of them where
    no pair takes over the next."""
    spec = case.spec
    rows = case.extent.max_seqlen_q * math.gcd(spec.group, LANES)
    takes_over = spec.window_right == 0 and spec.window_left is None and not spec.varlen
    return rows > (4 if takes_over else 16 if spec.varlen or spec.window_right is not None else 2) * LANES


def _cuts_tiles(case: TuningCase) -> bool:
    return case.spec.mods.block[0] % (2 * LANES) > 0  # type: ignore[union-attr, index]


FEW = Condition("few query rows", lambda case: are_few(case.spec, case.extent), "many query rows")
MEMORY_BOUND = FP8 | SCATTERED | FEW
D128 = Condition("head dims 128", lambda case: case.spec.head_dim == case.spec.head_dim_v == 128)
MLA = Condition("head dims (192, 128)", lambda case: (case.spec.head_dim, case.spec.head_dim_v) == (192, 128))
WIDE = ~MLA & Condition("a head dim above 128", lambda case: max(case.spec.head_dim, case.spec.head_dim_v) > LANES)
CUT_TILES = Condition("blocks of no whole 256 queries", _cuts_tiles)
FILLED = ~CACHE & Condition("rows fill pairs", _fills_pair)
NARROW_V = Condition("head_dim_v <= 64", lambda case: case.spec.head_dim_v <= 64)
SMEM_P = E4M3 & ~WIDE & ~(BLOCKS & CUT_TILES)  # of many queries: `Sm100ForwardConfig.p_in_smem`
DIAGONAL = Condition("causal", lambda case: case.spec.window_right == 0)

_FEW = TileShape(q_tiles=1, tile_n=64, direct_store=True)
# With Q of 192 columns, a staged O would leave a pair two K/V stages instead of five.
_MLA_PAIR = TileShape(ctas=2, direct_store=True)
# An O of 256 columns fills half of tensor memory, so there is one Q tile. It has two S.
_WIDE = TileShape(q_tiles=1, s_stages=2, tile_n=64, direct_store=True)
_WIDE_PAIR = TileShape(ctas=2, q_tiles=1, s_stages=2, direct_store=True)
# All evidence is predicted (`python -m fa4.emulator.timing fwd`, TFLOP/s at 16k) or counted, none is measured.
TILES = (
    # Shared-memory bandwidth is the limit, with any number of queries: a loaded byte moves six bytes (one in, one to
    # the converting warps, two from them, two to the product). A second CTA per SM would add nothing.
    Rule("4-bit keys", NVFP4, _FEW, "as for 8-bit keys, without their bytes in shared memory"),
    Rule("8-bit keys", FP8, _FEW, "as much of K and V in flight as there is room for"),
    Rule("gathered rows", SCATTERED, _FEW, "as for few queries"),
    # With key blocks of 64, registers and tensor memory suffice for two CTAs per SM, if O and the stages leave room.
    Rule("few queries", FEW & head_dims(128), TileShape(q_tiles=1, tile_n=64, direct_store=True, per_sm=2),
         "64 KB or more of K and V in flight a CTA"),
    Rule("few queries, wide", FEW, _FEW, "128 KB or more of K and V in flight"),
    Rule("pairs above 128", WIDE & FILLED & ~BLOCKS, _WIDE_PAIR,
         "d = 256 full 2028; causal 512, 1k, 2k, 16k: 775, 1159, 1496, 2069 (one CTA 764, 999, 1189; 16k without "
         "taking over 1916)"),
    Rule("one CTA above 128", WIDE, _WIDE, "half of a pair's rows would be empty, or a block mask cuts them"),
    Rule("block mask, 128 rows", BLOCKS & CUT_TILES,
         TileShape(q_tiles=1), "a work tile is a block of queries of the block mask"),
    Rule("block mask", BLOCKS, TileShape(), "a work tile is a block of queries of the block mask, or a part of one"),
    Rule("scales of blocks, no staged O", MXFP8 & MLA, TileShape(tile_n=96, direct_store=True), "as for e4m3"),
    Rule("scales of blocks, narrow v", MXFP8 & NARROW_V, TileShape(), "d = 64 full 1212, 96 keys 1105"),
    Rule("scales of blocks", MXFP8, TileShape(tile_n=96), "128 keys would leave no tensor memory for scales"),
    Rule("e4m3, no staged O", E4M3 & MLA, TileShape(direct_store=True),
         "(192, 128) full 3024, causal 2476; O staged 2369 and 2224"),
    Rule("e4m3", E4M3, TileShape(), "P in shared memory: d = 128 full 2690, pairs with P over S 1782"),
    Rule("pairs", FULL & D128 & FILLED, TileShape(ctas=2), "only sequence ends are masked"),
    Rule("wide pairs", FULL & MLA & FILLED, _MLA_PAIR, "only sequence ends are masked"),
    Rule("wide causal pairs", DIAGONAL & ~LEFT & ~VARLEN & MLA & FILLED, _MLA_PAIR,
         "512, 1k, 2k, 16k: 636, 972, 1271, 1787; one CTA with its two K/V stages 680, 918, 1143, 1466"),
    Rule("long causal pairs", DIAGONAL & ~LEFT & ~VARLEN & D128 & FILLED & keys(32 << 10), TileShape(ctas=2),
         "16k, 32k, 64k: 1595, 1644, 1679; one CTA 1582, 1609, 1634"),
    Rule("one CTA", OTHERWISE, TileShape(), "two Q tiles ping-pong"),
)  # fmt: skip
# Pairs of every 16 (words, if P is in shared memory) whose exp2 runs on the FMA units. Products of head dims above 64
# take longer than all exponentials, but do not hide them: a tile's softmax overlaps the products of the other tile
# only, which take half as long as the exponentials of both tiles. Evidence: machine code of CUDA 13's assembler.
POLYNOMIALS = (
    Rule("exp2 0/16", MEMORY_BOUND | Condition("sm_103", lambda case: case.chip.number == 103), 0,
         "the special-function unit is no bound; that of sm_103 is twice as fast"),
    Rule("scales of blocks, exp2 11/16", MXFP8 & NARROW_V, 11,
         "d = 64 full 1315, causal 1122; by 10/16 1212 and 1071"),
    Rule("e4m3, exp2 10/16", SMEM_P, 10,
         "a line costs less than a polynomial: d = 128 full 2690, by 11/16 2604; causal 2100, by 11/16 2014"),
    Rule("exp2 6/16", OTHERWISE, 6,
         "shortest latency from S to P, 16k by 4/16, 5/16, 6/16: d = 64 full 844, 959, 1003, causal 866, 933, 944; "
         "d = 128 full 1606, 1595, 1748, causal 1573, 1572, 1626; (192, 128), 10 heads, full 1837, 1866, 1927"),
)  # fmt: skip
# For 32k tokens on 148 SMs, a simulation ends 6 to 20% after the ideal time if CTAs stride through the tiles, and 1 to
# 3% if CTAs get tiles one by one. A tile then takes 3,800 cycles in a CTA that stays, 9,900 in a new CTA.
SCHEDULES = (
    Rule("single", MEMORY_BOUND | BLOCKS | VARLEN, Schedule.SINGLE,
         "tiles differ in length, some are empty: the hardware starts the next CTA when one ends"),
    # With a window bounded on both sides, all tiles but the first and last ones have the same length.
    Rule("persistent", (FULL | LEFT) & ~SHARED, Schedule.PERSISTENT,
         "all tiles have one length: d = 64 full 976, dynamic 934; d = 128 1752, 1722; (192, 128) 1856, 1857; "
         "d = 256 2028, 2025"),
    Rule("dynamic", OTHERWISE, Schedule.DYNAMIC,
         "tiles differ in length, or CTAs start late: a CTA or pair takes the next, longest first, while the previous "
         "one ends. Pairs, d = 256 causal 4k, 16k: 1767, 2069 (single 1483, 1916); (192, 128): 1516, 1787 (1372, "
         "1744)"),
)  # fmt: skip


def tiles_for(spec: AttentionSpec, chip: Chip, extent: ProblemSize = MANY) -> Choice[ForwardTiles]:
    """Return the tuned values of a problem on a chip."""
    case = TuningCase(spec, chip, extent)
    tiles, polynomial, schedule = choose(TILES, case), choose(POLYNOMIALS, case), choose(SCHEDULES, case)
    row = ForwardTiles(**asdict(tiles.row), polynomial=polynomial.row, schedule=schedule.row)
    return Choice(row, (tiles, polynomial, schedule))
