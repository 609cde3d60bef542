"""One row per case: what is tuned, not what follows from the shape. `evidence` says what chose the numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...fwd.rows import slots_of
from ...spec import AttentionSpec, ProblemSize
from ..wgmma import ROWS
from .config import Schedule

MANY_KEYS = 16 << 10
MULTIPROCESSORS = 132  # of an H100
LONG = 48 << 10  # keys, and half as many queries, from which on the hardware hands out a causal problem's tiles


@dataclass(frozen=True, slots=True)
class ForwardTiles:
    """A tuned row; see `Config` for what the columns mean. section: pairs of head and sequence that advance together
    where these are whole rounds, None for the fewest that are; where each tile has its CTA, as many as have
    l2_group_bytes of K and V. splits: parts that keys are cut into, None for as many as keep the chip busy."""

    name: str
    consumers: int
    tile_n: int
    evidence: str
    most_stages: int = 4
    byte_stages: int = 0
    schedule: Schedule = Schedule.PERSISTENT
    ping_pong: bool = True
    ctas: int = 1
    rescale_threshold: float = 8.0
    l2_group: int | None = None
    l2_group_bytes: int = 25 << 20  # half of an H100's L2: the rest is for Q and out
    splits: int | None = None


_MEASURED = "measured on an H100 beside other rows, as bench.tune does"
NARROW = ForwardTiles("head_dim <= 64", 3, 128, _MEASURED)
NARROW_SHORT = ForwardTiles("head_dim <= 64, short causal", 2, 128, _MEASURED, ping_pong=False, l2_group=66)
# On an H100, 16k tokens, TFLOP/s beside the rows above: causal 512 284, 252; 1k 386, 334; 2k 453, 436; 4k 479, 462;
# 16k 485, 513; full 512 421, 377; 1k 476, 435; 2k 488, 489; 4k 487, 495. With fewer work tiles than multiprocessors
# smaller ones are earlier done: one of 256 rows takes 1.7 times as long as one of 128.
NARROW_MANY = ForwardTiles("head_dim <= 64, many short rows", 4, 64, _MEASURED)
MIDDLE = ForwardTiles("head_dim <= 96", 3, 96, _MEASURED)
USUAL = ForwardTiles("head_dim <= 128", 2, 128, _MEASURED)
# (192, 128), causal: 16k keys on an H100 706 TFLOP/s, beside 688 of the usual row, 4k 579 beside 609.
USUAL_LONG = ForwardTiles("head_dim <= 192, long causal", 3, 64, _MEASURED)
USUAL_SHORT = ForwardTiles("head_dim <= 128, short causal", 2, 64, _MEASURED, l2_group=1)
WIDE = ForwardTiles("head_dim <= 192", 2, 112, _MEASURED)
WIDEST = ForwardTiles("head_dim <= 256", 2, 64, _MEASURED)
# Few queries: memory is what takes time. Two small blocks of K and of V in flight read it faster than three or more.
_FEW = {"consumers": 1, "most_stages": 2, "ping_pong": False, "evidence": _MEASURED}
FEW_NARROW = ForwardTiles("few queries, head_dim <= 64", tile_n=128, **_FEW)
FEW = ForwardTiles("few queries, head_dim <= 128", tile_n=64, **_FEW)
FEW_WIDE = ForwardTiles("few queries, head_dim <= 256", tile_n=32, **_FEW)
# K and V of 8 bits: a warpgroup that converts takes registers, and bytes a place beside what is made of them.
BYTES = ForwardTiles("8-bit keys, head_dim <= 128", 2, 128, _MEASURED, byte_stages=1, ping_pong=False)
# Rows that TMA does not bring: those who convert fetch them.
BYTES_FETCHED = replace(BYTES, name="fetched 8-bit keys, head_dim <= 128", byte_stages=0)
BYTES_FEW = ForwardTiles("few queries, 8-bit keys, head_dim <= 128", tile_n=128, byte_stages=2, **_FEW)
# Beside a warpgroup that copies rows one by one, registers are left for one that computes, however many queries.
BYTES_GATHERED = replace(BYTES_FEW, tile_n=64, byte_stages=4)
BYTES_WIDE = ForwardTiles("8-bit keys, head_dim <= 256", tile_n=32, byte_stages=4, **_FEW)
# Beside a warpgroup that copies rows a CTA starts with too few registers for a product of so many columns.
BYTES_WIDE_FETCHED = replace(
    BYTES_WIDE, name="fetched 8-bit keys, head_dim <= 256", byte_stages=0, evidence="by reasoning"
)
# Rows copied one by one: see `gather` for the third stage.
_GATHERED = {"name": "gathered rows", "most_stages": 3, "evidence": "by reasoning"}
GATHER = replace(USUAL, tile_n=64, **_GATHERED)
GATHER_FEW = replace(FEW, tile_n=128, **_GATHERED | {"evidence": _MEASURED})
GATHER_WIDE = replace(FEW_WIDE, **_GATHERED)


def are_few(spec: AttentionSpec, extent: ProblemSize) -> bool:
    """Whether one team has room for all query rows of a key/value head; or, where results must not depend on the batch,
    is to work on them whatever their number."""
    return spec.batch_invariant or extent.max_seqlen_q * slots_of(spec.group) <= ROWS


def tiles_for(spec: AttentionSpec, extent: ProblemSize) -> ForwardTiles:
    """The row for a problem."""
    has_bytes = spec.cache is not None and spec.cache.has_bytes
    gathers = spec.cache is not None and spec.cache.is_scattered
    of = _of_bytes if has_bytes else _of_gathered if gathers else _of_few if are_few(spec, extent) else _of_many
    row = of(spec, extent)
    in_pieces = spec.cache is not None and spec.cache.pieces(row.tile_n) > 1 and spec.cache.pieces(USUAL.tile_n) == 1
    if in_pieces and not (has_bytes or gathers):
        row = replace(USUAL if max(spec.head_dim, spec.head_dim_v) <= 128 else WIDEST, name="whole blocks in a page")
    if not spec.varlen:
        return row
    # Uneven lengths: the hardware hands out tiles as CTAs retire.
    several = extent.max_seqlen_q * spec.group > row.consumers * ROWS
    return replace(row, schedule=Schedule.PACKED if several else Schedule.SINGLE)


def _of_bytes(spec: AttentionSpec, extent: ProblemSize) -> ForwardTiles:
    if max(spec.head_dim, spec.head_dim_v) > 128:
        return BYTES_WIDE_FETCHED if spec.cache.is_scattered and spec.head_dim_v > 192 else BYTES_WIDE
    if not are_few(spec, extent):
        return BYTES_FETCHED if spec.cache.is_scattered else BYTES
    return BYTES_GATHERED if spec.cache.is_scattered else BYTES_FEW


def _of_gathered(spec: AttentionSpec, extent: ProblemSize) -> ForwardTiles:
    if max(spec.head_dim, spec.head_dim_v) > 128:
        return GATHER_WIDE
    return GATHER_FEW if are_few(spec, extent) else GATHER


def _of_few(spec: AttentionSpec, extent: ProblemSize) -> ForwardTiles:
    widest = max(spec.head_dim, spec.head_dim_v)
    return FEW_NARROW if widest <= 64 else FEW if widest <= 128 else FEW_WIDE


def _of_many(spec: AttentionSpec, extent: ProblemSize) -> ForwardTiles:
    """Where few keys lie left of the diagonal, what a tile computes beyond it counts: smaller tiles waste less."""
    widest, keys = max(spec.head_dim, spec.head_dim_v), extent.max_seqlen_k
    if spec.has_blocks:
        fits = widest <= 128 or (spec.head_dim <= 192 and spec.head_dim_v <= 128)
        return replace(USUAL if fits else WIDEST, schedule=Schedule.SINGLE, name="lists of blocks")
    is_masked = spec.window_right is not None
    row = _of_width(spec, extent, is_masked)
    if _pays_in_pairs(row, spec, extent):
        # With turns, without: 1k keys 537, 530; 2k 594, 583; 16k 651, 669, with 32/8 heads 652, 685; (192, 128) 4k 639,
        # 656, 16k 696, 702.
        ping_pong = is_masked or widest > 192 or (widest <= 128 and keys < MANY_KEYS)
        return replace(row, name=f"{row.name}, pairs", ctas=2, ping_pong=ping_pong)
    if is_masked and spec.window_left is None and keys > LONG and extent.max_seqlen_q > LONG // 2:
        # 64k keys on an H100, TFLOP/s, beside a persistent grid: d128 675, 574; d64 540, 510; (192, 128) 706, 650; d256
        # 738, 707; d128 with 32/8 heads 663, 563. At 32k that was faster, 672 beside 645.
        return replace(row, name=f"{row.name}, long causal", schedule=Schedule.SINGLE, l2_group_bytes=12 << 20)
    return row


def _pays_in_pairs(row: ForwardTiles, spec: AttentionSpec, extent: ProblemSize) -> bool:
    """Whether two CTAs should bring each block of keys once for both. That takes less energy, so that an H100 at its
    power limit runs at a higher clock.

    TFLOP/s there, beside CTAs alone: d128 full 1k 537, 511; 2k 594, 555; 4k 623, 592; 16k 669, 641; with 32/8 heads 8k
    649, 604; 16k 685, 650; (192, 128) full 4k 656, 632; 16k 702, 681; d256 4k 688, 684; 16k 733, 711; d128 causal 16k
    639, 600. Nothing is gained at d256 full 1k, 576, 579; d64 full 16k, 528, 526; d128 causal 4k, 539, 538.
    """
    keys, is_masked = extent.max_seqlen_k, spec.window_right is not None
    if row not in ((USUAL,) if is_masked else (USUAL, WIDEST)) or max(spec.head_dim, spec.head_dim_v) <= 96:
        return False
    if spec.lengths_vary or spec.mods is not None or spec.cache is not None or spec.window_left is not None:
        return False
    if not (MANY_KEYS <= keys <= LONG if is_masked else keys >= (4096 if row == WIDEST else 1024)):
        return False
    blocks = -(-extent.max_seqlen_q // (row.consumers * ROWS))
    wastes_little = blocks % 2 == 0 or blocks >= 32  # the second CTA of the last pair may have no rows
    return wastes_little and _fill_a_chip(2 * row.consumers * ROWS, spec, extent)


def _fill_a_chip(rows: int, spec: AttentionSpec, extent: ProblemSize) -> bool:
    """Whether work tiles of so many rows are one at least for each multiprocessor."""
    return -(-extent.max_seqlen_q // rows) * spec.heads_q * extent.batch >= MULTIPROCESSORS


def _of_width(spec: AttentionSpec, extent: ProblemSize, is_masked: bool) -> ForwardTiles:
    widest, keys = max(spec.head_dim, spec.head_dim_v), extent.max_seqlen_k
    if widest <= 64:
        is_short = keys <= (4096 if is_masked else 1024) and spec.mods is None and not spec.varlen
        if is_short and _fill_a_chip(NARROW_MANY.consumers * ROWS, spec, extent):
            return NARROW_MANY
        return NARROW_SHORT if is_masked and keys <= 1024 else NARROW
    if widest <= 96:
        return USUAL if extent.max_seqlen_q <= 1024 else MIDDLE
    if spec.head_dim <= 192 and spec.head_dim_v <= 128:
        if spec.head_dim > 128:
            is_plain = spec.window_left is None and spec.mods is None and not spec.varlen
            return USUAL_LONG if is_masked and is_plain and MANY_KEYS <= keys <= LONG else USUAL
        return USUAL_SHORT if is_masked and keys <= 512 else USUAL
    if widest <= 192 and not spec.has_dropout:  # its words are those of 32 keys
        return WIDE
    return WIDEST
