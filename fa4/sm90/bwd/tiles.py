"""Tile table of the backward: one row per case, with the tuned values only. `evidence` says why a row was chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...runtime.spec import AttentionSpec, ProblemSize


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """Row of tuned values. tile_m: query rows per step. q_stages, stages, ds_stages: tiles of Q, of dO and of dS (and
    of P, if P passes through shared memory). tile_n: keys per CTA; 64 selects the `wide` kernel. ctas: 2 for a CTA pair
    that shares the dQ of a `wide` step. multicast: CTAs of a pair that load Q and dO together. first_writer: without an
    order, the first writer stores dQ, so its sum needs no clearing. ordered: add in order even if determinism is not
    requested. together: (head, sequence) pairs in an L2 group, for ordered ascending key blocks; None: see
    `Steps.l2_group_that_follows`."""

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
    pairs_per_group: int | None = None


D64 = BackwardTiles(
    "d64", 128, 2, 2, 2, "full, causal 4k on an H100: 518, 473 TFLOP/s; cleared 520, 458", first_writer=True
)
D96 = BackwardTiles("d96", 64, 2, 2, 2, "full, causal 4k on an H100: 538, 472 TFLOP/s; with 3, 2, 3 tiles: 493, 434")
# The first CTA in the order stores. Three warps add; without an order, one.
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
# In a deterministic order key blocks stay close to each other, so the dQ sums stay in L2.
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
# The first CTA in the order stores, so the sums need no clearing.
D256_ORDERED = replace(D256, name="d256_ordered", ordered=True, evidence="full 1k, 4k, 16k on an H100: 397, 505, 538, "
    "causal 301, 457, 526; without an order 362, 500, 524, 233, 455, 532")  # fmt: skip


SHORT, LONG = 2048, 16384  # keys: a causal problem is short up to SHORT, long from LONG


SMS = 132  # of an H100
ORDER_STEPS_PER_LAG = 80  # minimum ratio of steps to the start lag of the last CTA, for a net gain of order


def _follows_soon(spec: AttentionSpec, extent: ProblemSize, row: BackwardTiles) -> bool:
    """True if there are enough (head, sequence) pairs for an ordered row. Without a mask, the concurrent key blocks of
    a pair follow each other, so the last CTA starts late. With a right bound each CTA starts at its diagonal."""
    pairs, concurrent = max(spec.heads_kv * extent.batch, 1), SMS // row.ctas
    blocks = -(-extent.max_seqlen_k // 128)
    steps = -(-extent.max_seqlen_q // row.tile_m) * spec.group
    lag = min(blocks, concurrent // pairs)
    return spec.window_right is not None or ORDER_STEPS_PER_LAG * lag * concurrent <= blocks * pairs * steps


def _panels(columns: int) -> int:
    return -(-columns // 64)


def tiles_for(spec: AttentionSpec, extent: ProblemSize) -> BackwardTiles:
    """Return the table row for a problem."""
    largest = max(spec.head_dim, spec.head_dim_v)
    is_causal = spec.window_left is None and spec.window_right is not None
    is_dense = spec.mods is None and not spec.lengths_vary
    if largest > 128:
        panels = _panels(spec.head_dim) + _panels(spec.head_dim_v)
        if panels <= 5 and not spec.has_dropout:  # dropout bits spill registers with 128 keys
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
    # With partially masked blocks a smaller tile_m wastes less; for a block mask it divides the mask's blocks.
    is_plain = spec.window_left is None and spec.window_right is None and spec.mods is None
    return D128 if is_plain else D128_CUT
