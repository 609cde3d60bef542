"""One row per case: what is tuned, not what follows from the shape. `evidence` says what chose the numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...spec import AttentionSpec, ProblemSize


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """A tuned row. tile_m: query rows of a step. q_stages, stages: tiles of Q and of dO in shared memory. ds_stages: of
    dS, and of P where that goes there. tile_n: keys of a CTA; 64 are `wide`'s. ctas: 2 for a pair that shares a
    `wide` step's dQ. multicast: CTAs of a pair that load Q and dO together. claims: where additions have no order, the
    first to come stores dQ, and nobody clears its sum. ordered: they have one even where none is asked for. together:
    pairs of head and sequence that advance together where they have one and key blocks ascend; None for the number that
    `Steps.following` computes."""

    name: str
    tile_m: int
    q_stages: int
    stages: int
    ds_stages: int
    evidence: str
    tile_n: int = 128
    ctas: int = 1
    multicast: int = 1
    first_writer: bool = False
    ordered: bool = False
    together: int | None = None


D64 = BackwardTiles(
    "d64", 128, 2, 2, 2, "full, causal 4k on an H100: 518, 473 TFLOP/s; cleared 520, 458", first_writer=True
)
D96 = BackwardTiles("d96", 64, 2, 2, 2, "full, causal 4k on an H100: 538, 472 TFLOP/s; with 3, 2, 3 tiles: 493, 434")
# The first in turn stores; three warps add, where without an order one does.
D96_ORDERED = BackwardTiles("d96_ordered", 64, 2, 2, 2, "full 1k, 4k, 16k on an H100: 412, 516, 547, causal 4k, 16k: "
    "459, 520; without an order 404, 507, 534, 448, 510", ordered=True)  # fmt: skip
D96_SHORT = BackwardTiles(
    "d96_short", 64, 2, 2, 2, "causal 1k on an H100: 309; in order 304; cleared 290", first_writer=True
)
D128 = BackwardTiles(
    "d128", 80, 2, 2, 2, "full 1k, 4k on an H100: 479, 619 TFLOP/s; cleared: 441, 581", first_writer=True
)
D128_CUT = BackwardTiles(
    "d128_cut", 64, 2, 2, 2, "causal 1k, 4k on an H100: 349, 537; cleared: 312, 517", first_writer=True
)
# In the order of a deterministic run key blocks stay near each other, and so does what they add to in the L2 cache.
D128_ORDERED = BackwardTiles("d128_ordered", 64, 2, 2, 2, "causal 2k, 4k, 8k, 32/8 heads, on an H100: 470, 565, 626; "
    "without an order 455, 522, 583; 16 heads, 16k: 649, without 626", ordered=True)  # fmt: skip
SOFTCAP = BackwardTiles(
    "softcap", 64, 2, 2, 2, "full, causal 4k on an H100: 505, 468; cleared: 487, 453", first_writer=True
)

D192 = BackwardTiles(
    "d192", 48, 2, 2, 2, "full 4k, 16k on an H100: 534, 554 TFLOP/s; cleared: 494, 540", first_writer=True
)
D192_CUT = BackwardTiles(
    "d192_cut", 48, 2, 2, 2, "causal 4k, 16k on an H100: 508, 570; cleared: 482, 557", first_writer=True
)
D192_SOFTCAP = BackwardTiles("d192_softcap", 32, 2, 2, 2, "its slope needs the scores, and these the registers")
D192_MODS = BackwardTiles("d192_mods", 32, 2, 2, 2, "divides the blocks of masks; 4k on an H100: 2.0 of portable")
WIDE = BackwardTiles("wide", 64, 3, 3, 2, "(192, 128) full, causal 4k on an H100: 371, 336; portable 249, 238", 64)
WIDEST = BackwardTiles("widest", 64, 2, 2, 2, "d256 full, causal 4k on an H100: 419, 376; portable 260, 252", 64)
D256 = BackwardTiles("d256", 64, 2, 1, 2, "full, causal 16k on an H100: 541, 532; no multicast: 516, 494", 64, 2, 2)
# The first in turn stores, so that nobody clears sums.
D256_ORDERED = replace(D256, name="d256_ordered", ordered=True, evidence="full 1k, 4k, 16k on an H100: 397, 505, 538, "
    "causal 301, 457, 526; without an order 362, 500, 524, 233, 455, 532")  # fmt: skip


SHORT, LONG = 2048, 16384  # keys of a causal problem, to and from which on it is one


SMS = 132  # of an H100
LATE = 80  # times as many steps as the last CTA of an ordered row begins late: what that costs is less than order gains


def _follows_soon(spec: AttentionSpec, extent: ProblemSize, row: BackwardTiles) -> bool:
    """Whether there are pairs of head and sequence enough for an ordered row: without a mask the key blocks of a pair
    that run at a time follow each other, so that the last CTA begins late. With a right bound each begins at its
    diagonal."""
    pairs, places = max(spec.heads_kv * extent.batch, 1), SMS // row.ctas
    blocks = -(-extent.max_seqlen_k // 128)
    steps = -(-extent.max_seqlen_q // row.tile_m) * spec.group
    late = min(blocks, places // pairs)
    return spec.window_right is not None or LATE * late * places <= blocks * pairs * steps


def _panels(columns: int) -> int:
    return -(-columns // 64)


def tiles_for(spec: AttentionSpec, extent: ProblemSize) -> BackwardTiles:
    """The row for a problem."""
    largest = max(spec.head_dim, spec.head_dim_v)
    is_causal = spec.window_left is None and spec.window_right is not None
    is_dense = spec.mods is None and not spec.lengths_vary
    if largest > 128:
        panels = _panels(spec.head_dim) + _panels(spec.head_dim_v)
        if panels <= 5 and not spec.has_dropout:  # its words spill registers beside 128 keys
            if spec.softcap > 0:
                return D192_SOFTCAP
            if spec.mods is not None:
                return D192_MODS
            return D192 if spec.window_left is None and spec.window_right is None else D192_CUT
        if panels <= 6:
            return WIDE
        if _panels(spec.head_dim) < 4:
            return WIDEST
        is_plain = is_dense and spec.window_left is None and spec.softcap == 0
        return D256_ORDERED if is_plain and _follows_soon(spec, extent, D256_ORDERED) else D256
    if largest <= 64:
        return D64
    if spec.softcap > 0 or (spec.mods is not None and spec.mods.score is not None):
        return SOFTCAP
    if largest <= 96:
        if not is_dense or spec.window_left is not None:
            return D96
        if is_causal and extent.max_seqlen_k <= SHORT:
            return D96_SHORT
        return D96_ORDERED if _follows_soon(spec, extent, D96_ORDERED) else D96
    if is_causal and is_dense and (spec.group > 1 or extent.max_seqlen_k >= LONG):
        return D128_ORDERED
    # Where a mask cuts blocks, lower steps waste less; those of a block mask divide its blocks.
    is_plain = spec.window_left is None and spec.window_right is None and spec.mods is None
    return D128 if is_plain else D128_CUT
