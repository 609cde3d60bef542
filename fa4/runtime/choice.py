"""Choice of tuned values: ordered tables of rules. The first rule whose condition holds gives the row.

Nothing changes a row afterwards. Columns that follow from independent facts have tables of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


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


def columns(row: Any, cfg: type) -> dict[str, Any]:
    """Return the columns of a row that are fields of a configuration."""
    return {field.name: getattr(row, field.name) for field in fields(cfg) if hasattr(row, field.name)}
