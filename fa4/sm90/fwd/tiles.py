"""Tile table of the forward: one row per case, with the tuned values only. `evidence` says why a row was chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...fwd.rows import padded_heads_of
from ...runtime.spec import AttentionSpec, ProblemSize
from ..wgmma import ROWS
from .config import Schedule

MANY_KEYS = 16 << 10
MULTIPROCESSORS = 132  # of an H100
LONG = 48 << 10  # keys; above (with half as many queries) the hardware schedules causal tiles


@dataclass(frozen=True, slots=True)
class ForwardTiles:
    """Row of tuned values; for the columns see `Sm90ForwardConfig`. l2_group: (head, sequence) pairs of an L2 group, if
    they fill whole rounds of the grid; None: the fewest that do. l2_group_bytes: bytes of K and V in an L2 group, for a
    grid with one CTA per tile. splits: parts of the keys; None: as many as keep the chip busy."""

    name: str
    consumers: int
    tile_n: int
    evidence: str
    most_stages: int = 4
    kv8_stages: int = 0
    schedule: Schedule = Schedule.PERSISTENT
    ping_pong: bool = True
    ctas: int = 1
    rescale_threshold: float = 8.0
    l2_group: int | None = None
    l2_group_bytes: int = 25 << 20  # half of an H100's L2; the rest is for Q and O
    splits: int | None = None


_MEASURED = "measured on an H100 beside other rows, as bench.tune does"
NARROW = ForwardTiles("head_dim <= 64", 3, 128, _MEASURED)
NARROW_SHORT = ForwardTiles("head_dim <= 64, short causal", 2, 128, _MEASURED, ping_pong=False, l2_group=66)
# H100, 16k tokens, TFLOP/s of this row, of the rows above: causal 512 keys 284, 252; 4k 479, 462; 16k 485, 513; full
# 512 421, 377; 2k 488, 489; 4k 487, 495. It needs a work tile per multiprocessor: a tile of 256 rows takes 1.7x as long
# as one of 128.
NARROW_MANY = ForwardTiles("head_dim <= 64, many short rows", 4, 64, _MEASURED)
MIDDLE = ForwardTiles("head_dim <= 96", 3, 96, _MEASURED)
USUAL = ForwardTiles("head_dim <= 128", 2, 128, _MEASURED)
# H100, (192, 128) causal, TFLOP/s of this row, of USUAL: 16k keys 706, 688; 4k 579, 609.
USUAL_LONG = ForwardTiles("head_dim <= 192, long causal", 3, 64, _MEASURED)
USUAL_SHORT = ForwardTiles("head_dim <= 128, short causal", 2, 64, _MEASURED, l2_group=1)
WIDE = ForwardTiles("head_dim <= 192", 2, 112, _MEASURED)
WIDEST = ForwardTiles("head_dim <= 256", 2, 64, _MEASURED)
# Few queries: memory-bound. Two small blocks of K and of V in flight are faster than three or more.
_FEW = {"consumers": 1, "most_stages": 2, "ping_pong": False, "evidence": _MEASURED}
FEW_NARROW = ForwardTiles("few queries, head_dim <= 64", tile_n=128, **_FEW)
FEW = ForwardTiles("few queries, head_dim <= 128", tile_n=64, **_FEW)
FEW_WIDE = ForwardTiles("few queries, head_dim <= 256", tile_n=32, **_FEW)
# 8-bit K and V: the convert warpgroup needs registers; the bytes need smem beside the converted tiles.
FP8 = ForwardTiles("8-bit keys, head_dim <= 128", 2, 128, _MEASURED, kv8_stages=1, ping_pong=False)
# Rows that TMA cannot load: the convert role loads them.
FP8_FETCHED = replace(FP8, name="fetched 8-bit keys, head_dim <= 128", kv8_stages=0)
FP8_FEW = ForwardTiles("few queries, 8-bit keys, head_dim <= 128", tile_n=128, kv8_stages=2, **_FEW)
# Beside a gather warpgroup there are registers for one consumer only, with any number of queries.
FP8_GATHERED = replace(FP8_FEW, tile_n=64, kv8_stages=4)
FP8_WIDE = ForwardTiles("8-bit keys, head_dim <= 256", tile_n=32, kv8_stages=4, **_FEW)
# Beside a gather warpgroup, a CTA starts with too few registers for a product with so many columns.
FP8_WIDE_FETCHED = replace(FP8_WIDE, name="fetched 8-bit keys, head_dim <= 256", kv8_stages=0, evidence="by reasoning")
# Rows copied one by one; for the third stage see `gather`.
_GATHERED = {"name": "gathered rows", "most_stages": 3, "evidence": "by reasoning"}
GATHER = replace(USUAL, tile_n=64, **_GATHERED)
GATHER_FEW = replace(FEW, tile_n=128, **_GATHERED | {"evidence": _MEASURED})
GATHER_WIDE = replace(FEW_WIDE, **_GATHERED)


def are_few(spec: AttentionSpec, extent: ProblemSize) -> bool:
    """True if all query rows of a key/value head fit in one consumer, or if results must not depend on the batch."""
    return spec.batch_invariant or extent.max_seqlen_q * padded_heads_of(spec.group) <= ROWS


def tiles_for(spec: AttentionSpec, extent: ProblemSize) -> ForwardTiles:
    """Return the table row for a problem."""
    is_fp8 = spec.cache is not None and spec.cache.has_8bit_kv
    is_gathered = spec.cache is not None and spec.cache.is_scattered
    choose = (
        _fp8_row
        if is_fp8
        else _gathered_row
        if is_gathered
        else _few_queries_row
        if are_few(spec, extent)
        else _many_queries_row
    )
    row = choose(spec, extent)
    has_pieces = spec.cache is not None and spec.cache.pieces(row.tile_n) > 1 and spec.cache.pieces(USUAL.tile_n) == 1
    if has_pieces and not (is_fp8 or is_gathered):
        row = replace(USUAL if max(spec.head_dim, spec.head_dim_v) <= 128 else WIDEST, name="whole blocks in a page")
    if not spec.varlen:
        return row
    # Uneven lengths: the hardware schedules tiles as CTAs retire.
    has_several_tiles = extent.max_seqlen_q * spec.group > row.consumers * ROWS
    return replace(row, schedule=Schedule.PACKED if has_several_tiles else Schedule.SINGLE)


def _fp8_row(spec: AttentionSpec, extent: ProblemSize) -> ForwardTiles:
    if max(spec.head_dim, spec.head_dim_v) > 128:
        return FP8_WIDE_FETCHED if spec.cache.is_scattered and spec.head_dim_v > 192 else FP8_WIDE
    if not are_few(spec, extent):
        return FP8_FETCHED if spec.cache.is_scattered else FP8
    return FP8_GATHERED if spec.cache.is_scattered else FP8_FEW


def _gathered_row(spec: AttentionSpec, extent: ProblemSize) -> ForwardTiles:
    if max(spec.head_dim, spec.head_dim_v) > 128:
        return GATHER_WIDE
    return GATHER_FEW if are_few(spec, extent) else GATHER


def _few_queries_row(spec: AttentionSpec, extent: ProblemSize) -> ForwardTiles:
    widest = max(spec.head_dim, spec.head_dim_v)
    return FEW_NARROW if widest <= 64 else FEW if widest <= 128 else FEW_WIDE


def _many_queries_row(spec: AttentionSpec, extent: ProblemSize) -> ForwardTiles:
    """Return the row for many queries. With few keys left of the diagonal, smaller tiles waste less work beyond it."""
    widest, keys = max(spec.head_dim, spec.head_dim_v), extent.max_seqlen_k
    if spec.has_blocks:
        fits = widest <= 128 or (spec.head_dim <= 192 and spec.head_dim_v <= 128)
        return replace(USUAL if fits else WIDEST, schedule=Schedule.SINGLE, name="lists of blocks")
    is_masked = spec.window_right is not None
    row = _head_dim_row(spec, extent, is_masked)
    if _uses_cta_pairs(row, spec, extent):
        # TFLOP/s with ping-pong, without: 1k keys 537, 530; 16k 651, 669; (192, 128) 4k 639, 656.
        ping_pong = is_masked or widest > 192 or (widest <= 128 and keys < MANY_KEYS)
        return replace(row, name=f"{row.name}, pairs", ctas=2, ping_pong=ping_pong)
    if is_masked and spec.window_left is None and keys > LONG and extent.max_seqlen_q > LONG // 2:
        # H100, 64k keys, TFLOP/s of this row, of a persistent grid: d128 675, 574; d64 540, 510; (192, 128) 706, 650;
        # d256 738, 707; d128 with 32/8 heads 663, 563. At 32k keys the persistent grid is faster: 672 vs 645.
        return replace(row, name=f"{row.name}, long causal", schedule=Schedule.SINGLE, l2_group_bytes=12 << 20)
    return row


def _uses_cta_pairs(row: ForwardTiles, spec: AttentionSpec, extent: ProblemSize) -> bool:
    """True if two CTAs share the loads of key blocks. This takes less energy, so an H100 at its power limit runs at a
    higher clock. H100, TFLOP/s with pairs, without: d128 full 1k 537, 511; 16k 669, 641; (192, 128) full 16k 702, 681;
    d256 16k 733, 711; d128 causal 16k 639, 600. No gain: d256 full 1k 576, 579; d64 full 16k 528, 526; d128 causal 4k
    539, 538."""
    keys, is_masked = extent.max_seqlen_k, spec.window_right is not None
    if row not in ((USUAL,) if is_masked else (USUAL, WIDEST)) or max(spec.head_dim, spec.head_dim_v) <= 96:
        return False
    if spec.lengths_vary or spec.mods is not None or spec.cache is not None or spec.window_left is not None:
        return False
    if not (MANY_KEYS <= keys <= LONG if is_masked else keys >= (4096 if row == WIDEST else 1024)):
        return False
    blocks = -(-extent.max_seqlen_q // (row.consumers * ROWS))
    wastes_little = blocks % 2 == 0 or blocks >= 32  # the second CTA of the last pair may have no rows
    return wastes_little and _fills_chip(2 * row.consumers * ROWS, spec, extent)


def _fills_chip(rows: int, spec: AttentionSpec, extent: ProblemSize) -> bool:
    """True if there is at least one work tile of `rows` rows per multiprocessor."""
    return -(-extent.max_seqlen_q // rows) * spec.heads_q * extent.batch >= MULTIPROCESSORS


def _head_dim_row(spec: AttentionSpec, extent: ProblemSize, is_masked: bool) -> ForwardTiles:
    widest, keys = max(spec.head_dim, spec.head_dim_v), extent.max_seqlen_k
    if widest <= 64:
        is_short = keys <= (4096 if is_masked else 1024) and spec.mods is None and not spec.varlen
        if is_short and _fills_chip(NARROW_MANY.consumers * ROWS, spec, extent):
            return NARROW_MANY
        return NARROW_SHORT if is_masked and keys <= 1024 else NARROW
    if widest <= 96:
        return USUAL if extent.max_seqlen_q <= 1024 else MIDDLE
    if spec.head_dim <= 192 and spec.head_dim_v <= 128:
        if spec.head_dim > 128:
            is_plain = spec.window_left is None and spec.mods is None and not spec.varlen
            return USUAL_LONG if is_masked and is_plain and MANY_KEYS <= keys <= LONG else USUAL
        return USUAL_SHORT if is_masked and keys <= 512 else USUAL
    if widest <= 192 and not spec.has_dropout:  # dropout bits come in words of 32 keys
        return WIDE
    return WIDEST
