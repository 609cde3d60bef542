"""Mutants of a PTX text: each synchronising instruction removed, or weakened, one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed statement. `line` counts from 1 in the original text; `kind` groups the summary."""

    line: int
    kind: str
    change: str
    before: str
    ptx: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.kind} {self.change}"


_REMOVED = {
    "mbarrier arrive": r"mbarrier\.arrive(?!\.expect_tx)\.",
    "mbarrier expect_tx": r"mbarrier\.(arrive\.)?expect_tx\.",
    "mbarrier init": r"mbarrier\.init\.",
    "async arrive": r"cp\.async\.mbarrier\.arrive\.",
    "commit": r"tcgen05\.commit\.|wgmma\.commit_group\.|cp\.async\.(bulk\.)?commit_group",
    "group wait": r"wgmma\.wait_group\.|cp\.async\.(bulk\.)?wait_(group|all)",
    "tcgen05 wait": r"tcgen05\.wait::",
    "tcgen05 fence": r"tcgen05\.fence::",
    "wgmma fence": r"wgmma\.fence\.",
    "proxy fence": r"fence\.proxy\.",
    "mbarrier init fence": r"fence\.mbarrier_init\.",
    "memory fence": r"fence\.(acq_rel|sc|acquire|release)\b|membar\.",
    "CTA barrier": r"(bar|barrier)(\.cta)?\.(sync|arrive|red)\b",
    "warp barrier": r"bar\.warp\.sync\b",
    "cluster barrier": r"barrier\.cluster\.",
    "grid dependency": r"griddepcontrol\.wait",
}
_ORDERED = re.compile(r"(?P<head>(?:ld|st|red|atom)\b[\w.:]*?)\.(?:acquire|release|acq_rel)\b")
_TRY_WAIT = re.compile(
    r"mbarrier\.(?:try|test)_wait(?P<parity>\.parity)?[\w.:]*\s+(?P<predicate>[%\w]+)\s*,\s*\[[^\]]*\]\s*,\s*"
    r"(?P<phase>[%\w]+)"
)
_CONSTANT = re.compile(r"mov\.[bus]32\s+(%\w+),\s*(\d+);")
_STATEMENT = re.compile(r"^(?P<indent>\s*\{?\s*(?:[\w$]+:\s*)?(?:@!?%?\w+\s+)?)(?P<code>[a-z][^;]*;)", re.ASCII)


def mutants(ptx: str) -> Iterator[Mutant]:
    """Every mutant of the synchronising instructions of `ptx`, in order of lines."""
    lines = ptx.splitlines()
    constants = {register: int(value) for register, value in _CONSTANT.findall(ptx)}
    for index, line in enumerate(lines):
        match = _STATEMENT.match(line)
        if match is None:
            continue
        for kind, change, code in _changes(match["code"], constants):
            changed = line[: match.start("code")] + code + line[match.end("code") :]
            text = "\n".join((*lines[:index], changed, *lines[index + 1 :], ""))
            yield Mutant(index + 1, kind, change, match["code"].strip(), text)


def _changes(code: str, constants: dict[str, int]) -> Iterator[tuple[str, str, str]]:
    """(kind, what was done, replacement) for one statement."""
    waited = _TRY_WAIT.match(code)
    if waited:
        yield "mbarrier wait", "removed", f"setp.eq.u32 {waited['predicate']}, 0, 0;"
        if waited["parity"]:
            yield "mbarrier wait", "waits for the other phase", _other_phase(code, waited)
        return
    ordered = _ORDERED.match(code)
    if ordered:
        yield "memory order", "relaxed", f"{ordered['head']}.relaxed{code[ordered.end() :]}"
        return
    for kind, pattern in _REMOVED.items():
        if re.match(pattern, code):
            if kind != "mbarrier init":  # without it every later use is an error by itself
                yield kind, "removed", "// removed"
            yield from _weaker(kind, code, constants)
            return


def _other_phase(code: str, waited: re.Match) -> str:
    phase = waited["phase"]
    other = f"{1 - int(phase)}" if phase.isdigit() and phase in "01" else "other_phase"
    mutated = code[: waited.start("phase")] + other + code[waited.end("phase") :]
    if other != "other_phase":
        return mutated
    return f"{{ .reg .b32 other_phase; xor.b32 other_phase, {phase}, 1; {mutated} }}"


def _weaker(kind: str, code: str, constants: dict[str, int]) -> Iterator[tuple[str, str, str]]:
    operand = re.search(r"(?<=[\s,])(%\w+|\d+)\s*;$", code)
    if operand is None:
        return
    count = constants.get(operand[1], int(operand[1]) if operand[1].isdigit() else None)

    def other(step: int) -> str:
        if count is not None:
            return f"{code[: operand.start()]}{count + step};"
        return f"{{ .reg .b32 other; add.s32 other, {operand[1]}, {step}; {code[: operand.start()]}other; }}"

    if kind == "mbarrier init":
        yield kind, "expects one arrival more", other(1)
        if count != 1:
            yield kind, "expects one arrival less", other(-1)
    elif kind == "mbarrier expect_tx":
        yield kind, "expects 16 bytes more", other(16)
        yield kind, "expects 16 bytes less", other(-16)
    elif kind == "group wait":
        yield kind, "leaves one group more", other(1)
    elif kind == "CTA barrier" and "," in code and count is not None and count > 32:
        yield kind, "expects one warp less", other(-32)
