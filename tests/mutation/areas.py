"""Which tests answer for which files of the package, and which mistakes are none.

The tests of an area are in the order in which they are run: what is fast and specific first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

from tests.mutation.plant import Mutant


@dataclass(frozen=True, slots=True)
class Area:
    """Files (patterns, `*` crosses folders) and what pytest is told to run for them."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]

    def covers(self, path: str) -> bool:
        return any(fnmatch(path, pattern) for pattern in self.files)


_API, _OPS, _CHOICE = "tests/test_api.py", "tests/test_ops.py", "tests/test_dispatch.py"
_FALLBACK, _RUN = "tests/test_fallback.py", "tests/test_run.py"
_TABLES = "tests/sm100/test_tables.py"
_SM80 = "tests/sm80/test_emulated.py"
_FORWARD = "tests/sm100/test_forward.py::test_case"
_BACKWARD = "tests/sm100/test_backward.py::test_gradients_of_named_case"

# The first that covers a file is the file's.
AREAS = (
    Area("api", ("fa4/__init__.py", "fa4/api.py", "fa4/checks.py"), (_API, _OPS, _RUN)),
    Area("operators", ("fa4/ops.py", "fa4/autograd.py", "fa4/spec.py"), (_OPS, _API, _CHOICE)),
    Area(
        "choice",
        ("fa4/dispatch.py", "fa4/device.py", "fa4/env.py"),
        (_CHOICE, "tests/test_cli.py::test_explain_answers_for_chips_that_are_not_here", _API),
    ),
    Area("jit", ("fa4/jit.py",), ("tests/test_jit.py",)),
    Area("fallback", ("fa4/fallback.py", "fa4/sequences.py"), (_FALLBACK,)),
    Area("oracle", ("fa4/reference.py", "fa4/cases.py"), ("tests/test_reference.py", "tests/test_cases.py", _FALLBACK)),
    Area("command line", ("fa4/cli.py", "fa4/demo.py", "fa4/__main__.py"), ("tests/test_cli.py",)),
    Area("run", ("fa4/run/*", "fa4/memory.py", "fa4/plan.py"), (_FALLBACK, _RUN, "tests/test_layouts.py")),
    Area("core", ("fa4/core/*",), ("tests/test_mask.py", "tests/test_schedule.py", _SM80, _FORWARD, _BACKWARD)),
    Area("sm80", ("fa4/sm80/*", "fa4/fwd/*", "fa4/bwd/*"), (_SM80,)),
    Area(
        "sm90",
        ("fa4/sm90/*",),
        ("tests/sm90/test_wgmma.py", "tests/sm90/test_forward.py", "tests/sm90/test_backward.py"),
    ),
    Area("sm100 forward", ("fa4/sm100/fwd/*",), (_TABLES, _FORWARD)),
    Area("sm100 backward", ("fa4/sm100/bwd/*",), (_TABLES, _BACKWARD)),
    Area(
        "sm100",
        ("fa4/sm100/*", "fa4/pipeline/*"),
        ("tests/pipeline/test_channels.py", _TABLES, "tests/sm100/test_exp2.py", _FORWARD, _BACKWARD),
    ),
)


@dataclass(frozen=True, slots=True)
class NoMistake:
    """Mutants that change no result: `place` is searched in "class.function: kind: line of text"."""

    file: str
    place: str
    reason: str


NO_MISTAKES = (
    NoMistake("fa4/*", r"maxsize=", "how many plans are remembered is a matter of speed"),
    NoMistake("fa4/device.py", r": ChipFacts\(", "facts of chips, which nothing here can check"),
    NoMistake("fa4/*", r"(AttentionSpec|Chip): constant", "defaults of fields that every call gives"),
    NoMistake("fa4/api.py", r"swapped: .*ops\.watched\(q", "each of them is looked at, in any order"),
    NoMistake("fa4/*", r"slots=True|frozen=True", "records would only be larger, or open to be changed"),
    NoMistake(
        "fa4/sm80/tiles.py", r"^: |_section: ", "sizes of tiles and sections are measured, and tests see that they fit"
    ),
    NoMistake("fa4/fwd/splits.py", r"_FEWEST_BLOCKS|_MOST", "how finely keys are split is a matter of speed"),
    NoMistake("fa4/sm100/*/tiles.py", r"^: ", "rows of tuned numbers"),
)


def area_of(path: str) -> Area:
    """The area that a file belongs to.

    Raises:
        LookupError: none covers it.
    """
    for area in AREAS:
        if area.covers(path):
            return area
    raise LookupError(f"no area of tests/mutation/areas.py covers {path}: say which tests answer for it")


def real(mutants: Iterable[Mutant], source: bytes) -> list[Mutant]:
    """Those that are mistakes."""
    lines = source.decode().splitlines()

    def is_none(mutant: Mutant) -> bool:
        text = f"{mutant.where}: {mutant.kind}: {lines[mutant.line - 1].strip()}"
        return any(fnmatch(mutant.path, rule.file) and re.search(rule.place, text) for rule in NO_MISTAKES)

    return [mutant for mutant in mutants if not is_none(mutant)]
