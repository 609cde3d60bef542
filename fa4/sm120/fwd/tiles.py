"""Tile table of the forward: tuned values, each row with its condition and its evidence."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ...fwd.consumers import FEW, ROWS, SEVERAL_TILES
from ...fwd.variant import Schedule
from ...runtime.choice import OTHERWISE, Choice, Rule, choose
from ...runtime.conditions import BLOCKS, E2M1, SHARED, VARLEN, TuningCase, head_dims
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, ProblemSize


@dataclass(frozen=True, slots=True)
class TileShape:
    """Columns of the table of tiles; `Sm120ForwardConfig` explains them. l2_group: see `fwd.l2_groups`."""

    consumers: int
    tile_n: int
    most_stages: int = 4
    l2_group: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardTiles(TileShape):
    """Tuned values of a problem. l2_share: share of the L2 for K and V of an L2 group, for a grid with one CTA per
    tile."""

    schedule: Schedule = Schedule.PERSISTENT
    l2_share: float = 0.5


_REASONED = "by reasoning"
_OF_LISTS = "blocks have multiples of 128 rows"
# Evidence: TFLOP/s predicted for an RTX 5090, 4k, full / causal, scales of blocks.
TILES = (
    Rule("few queries", FEW, TileShape(1, 64), _REASONED),
    Rule("lists of blocks, e2m1", BLOCKS & E2M1, TileShape(2, 128, 3), _OF_LISTS),
    Rule("lists of blocks", BLOCKS, TileShape(2, 64), _OF_LISTS),
    Rule("head_dim <= 64, e2m1", E2M1 & head_dims(64), TileShape(3, 128, 3), "920 / 754, blocks of 64 keys 748 / 691"),
    Rule("head_dim <= 128, e2m1", E2M1, TileShape(2, 128, 3),
         "1004 / 995, blocks of 64 keys 899 / 902; with three consumers registers spill"),
    Rule("head_dim <= 64", head_dims(64), TileShape(3, 64), "558 / 534, next 516 / 472 in ping-pong"),
    Rule("head_dim <= 128", OTHERWISE, TileShape(2, 64),
         "642 / 612, 605 in ping-pong; blocks of 96 keys 649 / 623, but they divide fewer lengths"),
)  # fmt: skip
SCHEDULES = (
    Rule("packed", VARLEN & SEVERAL_TILES, Schedule.PACKED, _REASONED),
    Rule("single, varlen", VARLEN, Schedule.SINGLE, "one tile a sequence: a CTA finds its sequence without a search"),
    Rule("single, block mask", BLOCKS, Schedule.SINGLE, "tiles differ in length by what the mask lists"),
    Rule("single, shared chip", SHARED, Schedule.SINGLE, "a persistent grid would end late"),
    Rule("persistent", OTHERWISE, Schedule.PERSISTENT, _REASONED),
)  # fmt: skip


def tiles_for(spec: AttentionSpec, chip: Chip, extent: ProblemSize) -> Choice[ForwardTiles]:
    """Return the tuned values of a problem on a chip."""
    tiles = choose(TILES, TuningCase(spec, chip, extent))
    schedule = choose(SCHEDULES, TuningCase(spec, chip, extent, tiles.row.consumers * ROWS))
    return Choice(ForwardTiles(**asdict(tiles.row) | {"schedule": schedule.row}), (tiles, schedule))
