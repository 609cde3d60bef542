"""Tile table of the backward: tuned values, each row with its condition and its evidence."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.choice import OTHERWISE, Choice, Condition, Rule, choose
from ...runtime.conditions import TuningCase
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec


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


def _cuts_blocks(case: TuningCase) -> bool:
    """True if a pair would own keys of two blocks of the block mask."""
    return case.spec.mods is not None and case.spec.mods.block is not None and case.spec.mods.block[1] % 256 > 0


def _cuts_query_blocks(case: TuningCase) -> bool:
    return case.spec.mods is not None and case.spec.mods.block is not None and case.spec.mods.block[0] % 256 > 0


def _is_wide(case: TuningCase) -> bool:
    head_dims = case.spec.head_dim, case.spec.head_dim_v
    return max(head_dims) > 128 and head_dims != (192, 128)


PAIRED = Condition("head dims that fill 128 columns, so that halves are panels", _fills_panels)
TWO_SMS = Condition("two multiprocessors or more", lambda case: case.chip.sms >= 2)
WHOLE_BLOCKS = ~Condition("block mask cut by 256 keys", _cuts_blocks)
WHOLE_QUERY_BLOCKS = ~Condition("block mask cut by 256 queries", _cuts_query_blocks)
WIDE = Condition("head dims whose dK and dV leave no tensor memory for scores", _is_wide)
SINGLE, PAIR = BackwardTiles(1, 0), BackwardTiles(2, 0)
WIDE_SINGLE, WIDE_PAIR = BackwardTiles(1, 0, wide=True), BackwardTiles(2, 0, wide=True)
TILES = (
    Rule("wide_pair", WIDE & WHOLE_BLOCKS & WHOLE_QUERY_BLOCKS & TWO_SMS, WIDE_PAIR,
         "steps of 128 rows: products at the full rate; not measured"),
    Rule("wide", WIDE, WIDE_SINGLE, "steps of 64 rows; not measured"),
    Rule("pair", PAIRED & WHOLE_BLOCKS & TWO_SMS, PAIR,
         "a third less shared-memory traffic than single by count; not measured"),
    Rule("single", OTHERWISE, SINGLE, "products take 2.5x the cycles of the exponentials; not measured"),
)  # fmt: skip


def tiles_for(spec: AttentionSpec, chip: Chip) -> Choice[BackwardTiles]:
    """Return the tuned values of a problem on a chip."""
    rule = choose(TILES, TuningCase(spec, chip))
    return Choice(rule.row, (rule,))
