"""Tile table of the backward: tuned values, each row with its condition and its evidence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...runtime.choice import OTHERWISE, Choice, Condition, Rule, choose
from ...runtime.conditions import (
    BLOCKS,
    CAUSAL,
    DROPOUT,
    FULL,
    LEFT,
    SAMPLED,
    TRACED,
    VARYING,
    TuningCase,
    head_dims,
    keys,
    window,
)
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, ProblemSize
from .common.launch_order import STEPS_PER_BLOCK
from .parts import parts_for


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """Row of tuned values. tile_m: query rows per step. q_stages, stages, ds_stages: tiles of Q, of dO and of dS (and
    of P, if P passes through shared memory). tile_n: keys per CTA; 64 selects the `wide` kernel. ctas: 2 for a CTA pair
    that shares the dQ of a `wide` step and loads Q and dO together, by multicast. first_writer: without an order, the
    first writer stores dQ, so its sum needs no clearing. ordered: add in order even if determinism is not requested;
    then the first CTA in the order stores. pairs_per_group: (head, sequence) pairs in an L2 group, for ordered
    ascending key blocks; None: see `Sm90BackwardSteps.l2_group_that_follows`. parts: CTAs that share a key block; None:
    see `parts_for`. last_finishes: the last key block in the order adds the sum to its dQ and stores dq, so that no
    finish kernel runs."""

    tile_m: int
    q_stages: int = 2
    stages: int = 2
    ds_stages: int = 2
    tile_n: int = 128
    ctas: int = 1
    first_writer: bool = False
    ordered: bool = False
    pairs_per_group: int | None = None
    parts: int | None = 1
    last_finishes: bool = False


ORDER_STEPS_PER_LAG = 80  # minimum ratio of steps to the start lag of the last CTA, for a net gain of order
_STEP = 64  # query rows of an ordered row


def _follows_soon(ctas: int) -> Condition:
    """Condition that there are enough (head, sequence) pairs for an ordered row. Without a mask, the concurrent key
    blocks of a pair follow each other, so the last CTA starts late. With a right bound each CTA starts at its
    diagonal."""

    def holds(case: TuningCase) -> bool:
        spec, extent = case.spec, case.extent
        pairs, concurrent = max(spec.heads_kv * extent.batch, 1), case.chip.sms // ctas
        blocks = -(-extent.max_seqlen_k // 128)
        steps = -(-extent.max_seqlen_q // _STEP) * spec.group
        lag = min(blocks, concurrent // pairs)
        return spec.window_right is not None or ORDER_STEPS_PER_LAG * lag * concurrent <= blocks * pairs * steps

    return Condition("blocks in order start soon", holds)


def every_query_sees_a_key(spec: AttentionSpec, extent: ProblemSize) -> bool:
    """Whether some key block adds to dQ of every query. The lengths of a plan with gradients are exact if all sequences
    have one length."""
    left, right = spec.window_left, spec.window_right
    is_aligned = (left is None or left >= 0) and (right is None or right >= 0)
    return is_aligned and not spec.lengths_vary and extent.max_seqlen_q <= extent.max_seqlen_k


def _follows_closely(tile_m: int) -> Condition:
    """Condition that the key blocks of a head are few for its queries, without a mask. Each starts about a step behind
    the one before it, so the last one ends late by as many steps as there are key blocks."""

    def holds(case: TuningCase) -> bool:
        spec, extent = case.spec, case.extent
        blocks = min(-(-extent.max_seqlen_k // 128), case.chip.sms)
        steps = -(-extent.max_seqlen_q // tile_m) * spec.group // parts_for(spec, extent, case.chip)
        return spec.window_right is None and steps >= STEPS_PER_BLOCK * blocks

    return Condition("few key blocks for its queries", holds)


def _panels(columns: int) -> int:
    return -(-columns // 64)


def _both_panels(limit: int) -> Condition:
    return Condition(
        f"at most {limit} panels", lambda case: _panels(case.spec.head_dim) + _panels(case.spec.head_dim_v) <= limit
    )


DENSE = ~TRACED & ~VARYING
SEES_KEYS = Condition("every query sees a key", lambda case: every_query_sees_a_key(case.spec, case.extent))
FEW_BLOCKS = Condition("few key blocks", lambda case: parts_for(case.spec, case.extent, case.chip) > 1)
SOFTCAP = Condition("softcap", lambda case: case.spec.softcap > 0)
SCORE_MOD = Condition("score_mod", lambda case: case.spec.mods is not None and case.spec.mods.score is not None)
GROUPED = Condition("grouped heads", lambda case: case.spec.group > 1)
FIVE_PANELS = _both_panels(5) & ~DROPOUT  # dropout bits spill registers with 128 keys
THREE_PANELS = Condition(
    "head dims of three panels", lambda case: _panels(case.spec.head_dim) == _panels(case.spec.head_dim_v) == 3
)
_D256 = BackwardTiles(64, stages=1, tile_n=64, ctas=2)
# Evidence: TFLOP/s on an H100 with 16k tokens; in brackets, of other rows ("cleared": without first_writer).
TILES = (
    Rule("d64_blocks", head_dims(64) & BLOCKS, BackwardTiles(128), "first_writer is not measured with lists of blocks"),
    Rule("d64_parts", FEW_BLOCKS & head_dims(64), BackwardTiles(128, first_writer=True, parts=None), "as d128_parts"),
    Rule("d64_window", head_dims(64) & ~head_dims(16, 64) & DENSE & window(512) & SEES_KEYS & ~SAMPLED,
         BackwardTiles(128, ordered=True, last_finishes=True),
         "H200, 64/8 heads, windows of 128, 256, 512, 1024 keys, 8k tokens: 204, 293, 362, 439 (first_writer 170, 264, "
         "349, 434); of 1024, sequences of 2k: 369 (406)"),
    Rule("d64", head_dims(64), BackwardTiles(128, first_writer=True), "full, causal 4k: 518, 473 (cleared 520, 458)"),
    Rule("blocks", head_dims(128) & BLOCKS, BackwardTiles(64), "first_writer is not measured with lists of blocks"),
    Rule("d128_parts_ordered",
         FEW_BLOCKS & FULL & head_dims(128) & ~head_dims(96) & ~SOFTCAP & _follows_closely(80) & ~SAMPLED,
         BackwardTiles(80, ordered=True, parts=None),
         "H200, 32,760 queries, 512 keys, 40 and 12 heads: 434, 417 (no order 407, 397)"),
    Rule("d128_parts", FEW_BLOCKS & FULL & head_dims(128) & ~head_dims(96) & ~SOFTCAP,
         BackwardTiles(80, first_writer=True, parts=None),
         "H200, 32,760 queries, 512 keys, 40 and 12 heads: 425, 397 (whole blocks, close together 320, 208; evenly "
         "spaced, in another run 277, 237)"),
    Rule("d128_cut_parts", FEW_BLOCKS & head_dims(128), BackwardTiles(64, first_writer=True, parts=None),
         "H200, causal 4 x 2000, 14/2 heads: 431 (whole blocks 306, in order 307)"),
    Rule("softcap", head_dims(128) & (SOFTCAP | SCORE_MOD), BackwardTiles(64, first_writer=True),
         "full, causal 4k: 505, 468 (cleared 487, 453)"),
    Rule("d96_ordered", head_dims(96) & DENSE & CAUSAL, BackwardTiles(64, ordered=True),
         "causal 1k, 4k, 16k: 304, 459, 520 (no order 290, 448, 510; first_writer 309, 447, 506)"),
    Rule("d96_one_block", head_dims(96) & keys(0, 128), BackwardTiles(64, first_writer=True),
         "H200, 4173 queries, 120 keys, 16 heads of 72: 144 (cleared 135)"),
    Rule("d96", head_dims(96), BackwardTiles(64),
         "full, causal 4k: 538, 472 (3 + 2 stages, 3 of dS: 493, 434); full 1k, 4k, 16k: 404, 507, 534 (in order 412, "
         "516, 547, less than a second kernel is worth)"),
    Rule("d128_long", head_dims(128) & CAUSAL & DENSE & keys(32 << 10), BackwardTiles(64),
         "causal 32k, 64k, 32/8 heads: 553, 630 (in order 522, 594); 16 heads, 64k, 128k: 641, 631 (in order 621, 608; "
         "first_writer 587, 603)"),
    # In order, key blocks stay close to each other, so the dQ sums stay in L2.
    Rule("d128_ordered", head_dims(128) & CAUSAL & DENSE & (GROUPED | keys(16 << 10)), BackwardTiles(64, ordered=True),
         "causal 2k, 4k, 8k, 32/8 heads: 470, 565, 626 (no order 455, 522, 583); 16 heads, 16k: 649 (626)"),
    Rule("d128_few_keys", head_dims(128) & FULL & DENSE & _follows_closely(80) & ~SAMPLED,
         BackwardTiles(80, ordered=True),
         "H200, 16 heads, 16,384 queries, 1024 and 2048 keys: 524, 530 (no order 502, 517)"),
    Rule("d128", head_dims(128) & FULL & ~TRACED, BackwardTiles(80, first_writer=True),
         "full 1k, 4k: 479, 619 (cleared 441, 581)"),
    # With partially masked blocks a smaller tile_m wastes less; for a block mask it divides the mask's blocks.
    Rule("d128_cut", head_dims(128), BackwardTiles(64, first_writer=True),
         "causal 1k, 4k: 349, 537 (cleared 312, 517)"),
    Rule("d192_softcap", FIVE_PANELS & SOFTCAP, BackwardTiles(32),
         "its slope needs the scores, and these the registers"),
    Rule("d192_mods", FIVE_PANELS & TRACED, BackwardTiles(32), "divides the blocks of masks; 4k: 2.0 of portable"),
    Rule("d192_few_keys", FIVE_PANELS & FULL & DENSE & _follows_closely(48) & ~SAMPLED,
         BackwardTiles(48, ordered=True),
         "H200, 16 heads of (192, 128), 16,384 queries, 1024 and 2048 keys: 472, 521 (no order 432, 464)"),
    Rule("d192", FIVE_PANELS, BackwardTiles(48, first_writer=True),
         "full 4k, 16k: 534, 554 (cleared 494, 540); causal 4k, 16k: 508, 570 (cleared 482, 557)"),
    Rule("three_panels_ordered",
         THREE_PANELS & DENSE & ~LEFT & ~SOFTCAP & keys(0, 8 << 10) & _follows_soon(ctas=2),
         replace(_D256, stages=2, ordered=True),
         "d192 full 1k, 4k: 348, 440, causal 245, 411 (no order 291, 436, 153, 391; one CTA 294, 403, 198, 359)"),
    Rule("three_panels", THREE_PANELS, _D256,
         "d192 full, causal 16k: 467, 448 (in order 446, 427; one CTA 425, 415); deterministic 461, 419 (298, 312)"),
    Rule("wide", _both_panels(6), BackwardTiles(64, 3, 3, tile_n=64),
         "(192, 128) full, causal 4k: 371, 336 (portable 249, 238)"),
    Rule("widest", Condition("head_dim <= 192", lambda case: case.spec.head_dim <= 192), BackwardTiles(64, tile_n=64),
         "d256 full, causal 4k: 419, 376 (portable 260, 252)"),
    Rule("d256_ordered", DENSE & ~LEFT & ~SOFTCAP & _follows_soon(ctas=2), replace(_D256, ordered=True),
         "full 1k, 4k, 16k: 397, 505, 538, causal 301, 457, 526 (no order 362, 500, 524, 233, 455, 532)"),
    Rule("d256", OTHERWISE, _D256, "full, causal 16k: 541, 532 (no multicast 516, 494)"),
)  # fmt: skip


def tiles_for(spec: AttentionSpec, chip: Chip, extent: ProblemSize) -> Choice[BackwardTiles]:
    """Return the tuned values of a problem on a chip."""
    rule = choose(TILES, TuningCase(spec, chip, extent))
    return Choice(rule.row, (rule,))
