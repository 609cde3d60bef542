"""Tile table of the backward: tuned values, each row with its condition and its evidence."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.choice import OTHERWISE, Choice, Condition, Rule, choose
from ...runtime.conditions import E4M3, TuningCase
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec
from ..stages import is_widest


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """A tuned row.

    ctas: 1, or 2 for a CTA pair. polynomial: pairs of every 16 whose exp2 runs on the FMA units. wide: three kernels,
    one for each gradient, see `wide.config`.
    """

    ctas: int
    polynomial: int
    wide: bool = False


def _fills_panels(case: TuningCase) -> bool:
    return all(96 < head_dim <= 128 for head_dim in (case.spec.head_dim, case.spec.head_dim_v))


def _cuts_blocks(side: str, axis: int) -> Condition:
    """Condition that a pair would own rows of two blocks of the block mask."""

    def holds(case: TuningCase) -> bool:
        mods = case.spec.mods
        return mods is not None and mods.block is not None and mods.block[axis] % 256 > 0

    return Condition(f"block mask cut by 256 {side}", holds)


def _is_wide(case: TuningCase) -> bool:
    head_dims = case.spec.head_dim, case.spec.head_dim_v
    return max(head_dims) > 128 and head_dims != (192, 128)


PAIRED = Condition("head dims that fill 128 columns, so that halves are panels", _fills_panels)
TWO_SMS = Condition("two multiprocessors or more", lambda case: case.chip.sms >= 2)
WHOLE_BLOCKS, WHOLE_QUERY_BLOCKS = ~_cuts_blocks("keys", 1), ~_cuts_blocks("queries", 0)
WIDE = Condition("head dims whose dK and dV leave no tensor memory for scores", _is_wide)
SINGLE, PAIR = BackwardTiles(1, 0), BackwardTiles(2, 0)
WIDE_SINGLE, WIDE_PAIR = BackwardTiles(1, 0, wide=True), BackwardTiles(2, 0, wide=True)
TILES = (
    Rule("widest", Condition("a head dim above 256", lambda case: is_widest(case.spec)), WIDE_PAIR,
         "64 rows in each CTA of a pair: D of one gradient leaves tensor memory for scores; not measured"),
    Rule("wide_pair", WIDE & WHOLE_BLOCKS & WHOLE_QUERY_BLOCKS & TWO_SMS, WIDE_PAIR,
         "steps of 128 rows: products at the full rate; not measured"),
    Rule("wide", WIDE, WIDE_SINGLE, "steps of 64 rows; not measured"),
    Rule("e4m3, single", E4M3 & ~PAIRED, BackwardTiles(1, 4), "d = 64 predicted 1449, by exp2 0/16 1354"),
    Rule("pair", PAIRED & WHOLE_BLOCKS & TWO_SMS, PAIR,
         "a third less shared-memory traffic than single by count; not measured"),
    Rule("single", OTHERWISE, SINGLE, "products take 2.5x the cycles of the exponentials; not measured"),
)  # fmt: skip


def tiles_for(spec: AttentionSpec, chip: Chip) -> Choice[BackwardTiles]:
    """Return the tuned values of a problem on a chip."""
    rule = choose(TILES, TuningCase(spec, chip))
    return Choice(rule.row, (rule,))
