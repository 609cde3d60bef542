"""Choice of tuned values: ordered tables of rules. The first rule whose condition holds gives the row.

Nothing changes a row afterwards. Columns that follow from independent facts have tables of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .device import Chip
from .spec import AttentionSpec, ProblemSize

Row = TypeVar("Row")
MANY = ProblemSize(1, 1 << 20, 1 << 20)  # stands for sizes that are not known


@dataclass(frozen=True, slots=True)
class TuningCase:
    """Problem on a chip, the argument of conditions. tile_rows: rows of the tile, in tables that are asked after it."""

    spec: AttentionSpec
    chip: Chip
    extent: ProblemSize = MANY
    tile_rows: int = 0


@dataclass(frozen=True, slots=True)
class Condition:
    """Predicate with its text, which `fa4.explain` prints. opposite: text of the negation, if not "no ..."."""

    text: str
    holds: Callable[[Any], bool]
    opposite: str = ""

    def __and__(self, other: Condition) -> Condition:
        return Condition(f"{self.text}, {other.text}", lambda case: self.holds(case) and other.holds(case))

    def __or__(self, other: Condition) -> Condition:
        return Condition(f"({self.text} or {other.text})", lambda case: self.holds(case) or other.holds(case))

    def __invert__(self) -> Condition:
        return Condition(self.opposite or f"no {self.text}", lambda case: not self.holds(case), self.text)


@dataclass(frozen=True, slots=True)
class Rule(Generic[Row]):
    """Row of tuned values for the cases in which `when` holds. evidence: the reason for the values."""

    name: str
    when: Condition
    row: Row
    evidence: str

    def __str__(self) -> str:
        return f"{self.name} for {self.when.text}: {self.evidence}"


@dataclass(frozen=True, slots=True)
class Choice(Generic[Row]):
    """Tuned values, and the rules that gave them, one of each table."""

    row: Row
    rules: tuple[Rule[Any], ...]

    @property
    def name(self) -> str:
        return self.rules[0].name

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self.rules))


def choose(table: Sequence[Rule[Row]], case: Any) -> Rule[Row]:
    """Return the first rule whose condition holds.

    Raises:
        LookupError: no condition holds.
    """
    for rule in table:
        if rule.when.holds(case):
            return rule
    raise LookupError("no condition of the table holds")


OTHERWISE = Condition("all others", lambda _: True)


def given(row: Row) -> Choice[Row]:
    """Return a row that replaces the tables', for tuning."""
    return Choice(row, (Rule("given", Condition("the caller chose it", lambda _: True), row, "none"),))


# Conditions on a `TuningCase` that several tables share.
VARLEN = Condition("varlen", lambda case: case.spec.varlen)
BLOCKS = Condition("block mask", lambda case: case.spec.has_blocks)
TRACED = Condition("traced functions or dropout", lambda case: case.spec.mods is not None)
DROPOUT = Condition("dropout", lambda case: case.spec.has_dropout)
LEFT = Condition("left bound", lambda case: case.spec.window_left is not None)
RIGHT = Condition("right bound", lambda case: case.spec.window_right is not None)
CAUSAL = RIGHT & ~LEFT
FULL = Condition("no mask bounds", lambda case: case.spec.window_right is None and case.spec.window_left is None)
VARYING = Condition("varying lengths", lambda case: case.spec.lengths_vary)
CACHE = Condition("cache", lambda case: case.spec.cache is not None)
FP8 = Condition("8-bit keys", lambda case: case.spec.cache is not None and case.spec.cache.has_8bit_kv)
SHARED = Condition("other kernels on the chip", lambda case: case.chip.shared)
SCATTERED = Condition("scattered rows", lambda case: case.spec.cache is not None and case.spec.cache.is_scattered)


def head_dims(limit: int, limit_v: int | None = None) -> Condition:
    """Condition that head_dim and head_dim_v are at most these."""
    text = f"head dims <= {limit}" if limit_v is None else f"head dims <= ({limit}, {limit_v})"
    return Condition(
        text,
        lambda case: case.spec.head_dim <= limit and case.spec.head_dim_v <= (limit_v or limit),
        text.replace("<=", "above"),
    )


def keys(first: int, last: int | None = None) -> Condition:
    """Condition on the number of keys, last included."""
    text = f"{first} keys or more" if last is None else f"{first} to {last} keys" if first else f"at most {last} keys"
    return Condition(text, lambda case: first <= case.extent.max_seqlen_k <= (last or case.extent.max_seqlen_k))
