"""Chips that have an instruction, by the target notes of the PTX ISA.

PTX of an older target runs on a newer chip, but instructions of an architecture-specific target (sm_90a, sm_100a,
sm_120a) exist on that chip or its family alone. Instructions that every modelled chip has are not listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from warpcheck.machine.chips import CHIPS, ChipFacts


@dataclass(frozen=True, slots=True)
class Requirement:
    """Instructions whose opcode matches `opcode` exist on the chips for which `on` is true."""

    opcode: re.Pattern[str]
    on: Callable[[ChipFacts], bool]


def _row(opcode: str, on: Callable[[ChipFacts], bool]) -> Requirement:
    return Requirement(re.compile(opcode), on)


def _since(number: int) -> Callable[[ChipFacts], bool]:
    return lambda facts: facts.number >= number


def _family(number: int) -> Callable[[ChipFacts], bool]:
    return lambda facts: facts.number // 10 == number // 10


_REQUIREMENTS = (
    _row(r"wgmma\.", _family(90)),
    _row(r"tcgen05\.", lambda facts: facts.tmem_columns > 0),
    _row(r"tcgen05\.ld\.red\.", lambda facts: facts.number in (101, 103, 110)),
    _row(r"mma\..*\.(kind::|block_scale\b|e2m1\b|e2m3\b|e3m2\b)", _family(120)),
    _row(r"mma\..*\.(e4m3|e5m2)\b", _since(89)),
    _row(r"ldmatrix\..*\.(m16n16|m8n16)\b", _since(100)),
    _row(r"stmatrix\..*\.m16n8\b", _since(100)),
    _row(r"stmatrix\.", _since(90)),
    _row(r"setmaxnreg\.", _since(90)),
    _row(r"cvt\..*(e2m1|e2m3|e3m2|ue8m0)x[24]", _since(100)),
    _row(r"cvt\..*(e4m3|e5m2)x2", _since(89)),
    _row(r"(add|sub|mul|fma)\..*\.f32x2\b", _since(100)),
    _row(r"(add|sub|mul)\.(\w+\.)*bf16(x2)?$|(add|min|max)\..*[us]16x2$|(min|max)\.relu\.s32$", _since(90)),
    _row(r"redux\.sync\..*\.f32\b", _family(100)),
    _row(r"cp\.(reduce\.)?async\.bulk\.", _since(90)),
    _row(r"cp\.async\.bulk\.tensor\..*\.(cta_group::|tile::scatter4\b)", _family(100)),
    _row(r"cp\.async\.bulk\.tensor\..*\.shared::cluster\..*\.tile::gather4\b", _family(100)),
    _row(r"st\.bulk\.|clusterlaunchcontrol\.", _since(100)),
    _row(r"elect\.sync|griddepcontrol\.|barrier\.cluster\.|mapa\.|getctarank\.|multimem\.", _since(90)),
    _row(r"(st|red)\.async\.", _since(90)),
    _row(r"mbarrier\.(try_wait|expect_tx|complete_tx|arrive\.expect_tx)\b", _since(90)),
)  # fmt: skip


def chips_with(opcode: str) -> list[str]:
    """Return the targets of the modelled chips that have an instruction."""
    needed = [row.on for row in _REQUIREMENTS if row.opcode.match(opcode)]
    return [facts.target for facts in CHIPS.values() if all(on(facts) for on in needed)]


def missing_on(facts: ChipFacts, opcodes: Iterable[str]) -> str | None:
    """Return the first of `opcodes` that a chip does not have, or None."""
    for opcode in opcodes:
        if any(row.opcode.match(opcode) and not row.on(facts) for row in _REQUIREMENTS):
            return opcode
    return None
