"""Faults that other projects once had, put back into a copy of their installed package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from examples.findings.edited_package import Edit, Removal
from fa4.oracle.cases import Judgement


@dataclass(frozen=True)
class Package:
    """distribution and version: for which the edits are written. module: what is copied and edited."""

    distribution: str
    version: str
    module: str


@dataclass(frozen=True)
class Problem:
    """A small call of a package's kernel.

    run: makes inputs from a seed, calls the package, and judges its results. sms: multiprocessors, so few that CTAs
    have several tiles where the fault needs that. leftovers: of `Checks`.
    """

    package: Package
    name: str
    chip: str
    run: Callable[[int], list[Judgement]]
    sms: int = 4
    leftovers: bool = False


@dataclass(frozen=True)
class Fault:
    """source: the pull request or issue of the project ("#2756"), or the comment that says why the code is there
    ("FILE:LINE"). what: what is taken out, and what goes wrong then. edits: put the fault into the package."""

    name: str
    problem: Problem
    source: str
    what: str
    edits: tuple[Edit | Removal, ...]
