"""Which instructions of the PTX ISA the emulator runs: each form in `isa.TABLE` is read and lowered, as a kernel's are.

PYTHONPATH=warpcheck/tests python -m warpcheck_cases.coverage            # the table of docs/ptx-coverage.md
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import click
from warpcheck.errors import EmulationError
from warpcheck.machine import kernel_of
from warpcheck.machine.ptx import parse
from warpcheck_cases.isa import TABLE
from warpcheck_cases.opcodes import CASES

TARGET = "sm_100a"
_REGISTERS = {"P": "p", "H": "h", "R": "r", "D": "d", "Q": "q", "S": "r", "M": "r"}
_MODULE = f""".version 9.1
.target {TARGET}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry sample(.param .u64 par) {{
.reg .pred %p<40>; .reg .b16 %h<40>; .reg .b32 %r<40>; .reg .b64 %d<40>; .reg .b128 %q<40>; .reg .b32 r0; .reg .b32 r1;
HERE:
STATEMENT
}}
"""


@dataclass(frozen=True)
class Instruction:
    """One instruction of the ISA. forms: statements. refused: those that the emulator does not read, and why."""

    section: str
    name: str
    forms: tuple[str, ...]
    refused: dict[str, str]

    @property
    def state(self) -> str:
        return "runs" if not self.refused else "refused" if len(self.refused) == len(self.forms) else "partly"

    @property
    def root(self) -> str:
        """What its opcode cases are known by: the name without what sets its tables apart."""
        return re.sub(r"\.(f|half|mixed|b8)$|(?<=mov)\.pack$", "", self.name)


def expanded(form: str) -> Iterator[str]:
    """Every choice of the alternatives in square brackets."""
    parts = re.split(r"\[([^\]]*)\]", form)
    choices = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def statement(form: str) -> str:
    """A form as PTX: registers for the letters, square brackets for round ones."""
    numbers = itertools.count()
    opcode, _, operands = form.partition(" ")
    if form.startswith(("{", "@")):
        opcode, operands = "", form
    call = opcode.startswith("call")

    def register(match: re.Match) -> str:
        name = _REGISTERS[match[1]]
        if match[2]:
            return "{" + ", ".join(f"%{name}{next(numbers)}" for _ in range(int(match[2]))) + "}"
        return f"%{name}{next(numbers)}"

    operands = re.sub(r"(?<![\w.%])([PHRDQSM])(2|4|8)?(?![\w.])", register, operands)
    if not call:
        operands = operands.replace("(", "[").replace(")", "]")
    text = f"{opcode} {operands}".strip()
    return text if text.endswith("}") and text.startswith("{") else f"{text};"


def why_refused(form: str) -> str:
    """Why the emulator does not take a form; "" if it does."""
    try:
        kernel_of(_MODULE.replace("STATEMENT", statement(form)), "sample")
    except EmulationError as error:
        return error.message
    return ""


@cache
def instructions() -> tuple[Instruction, ...]:
    found = []
    for line in TABLE.strip().splitlines():
        section, name, rest = re.fullmatch(r"(\S+) (\S+): (.*)", line).groups()  # type: ignore[union-attr]
        forms = tuple(form for part in re.split(r";\s+(?![^{]*\})", rest) for form in expanded(part.strip()))
        refused = {form: why for form in forms if (why := why_refused(form))}
        found.append(Instruction(section, name, forms, refused))
    return tuple(found)


# What cases need to read inputs, store results and get there: it counts where the name of the case has it.
_EVERYWHERE = frozenset((
    "add", "and", "bar", "bra", "cvt", "cvta", "fence", "ld", "mad", "mbarrier", "mov", "mul", "or", "ret", "selp",
    "setp", "shl", "shr", "st", "sub", "xor",
))  # fmt: skip


@cache
def opcodes_of_cases() -> tuple[frozenset[str], ...]:
    """The opcodes that each opcode case is about."""
    found = []
    for case in CASES:
        named = set(re.findall(r"\w+", case.name))
        opcodes = {i.opcode for kernel in parse(case.ptx).kernels.values() for i in kernel.instructions}
        found.append(frozenset(o for o in opcodes if (root := o.split(".")[0]) not in _EVERYWHERE or root in named))
    return tuple(found)


def cases_of(instruction: Instruction) -> int:
    """Opcode cases that are about the instruction: by its name, and by the types that its forms end with."""
    wanted = instruction.root.split(".")
    types = {statement(form).split()[0].rstrip(";").split(".")[-1] for form in instruction.forms}

    def fits(opcode: str) -> bool:
        parts = opcode.split(".")
        return parts[0] == wanted[0] and set(wanted[1:]) <= set(parts) and parts[-1] in types

    return sum(any(map(fits, opcodes)) for opcodes in opcodes_of_cases())


def page() -> str:
    """The tables, by chapter: what runs in one line each, what is refused with its forms."""
    everything = instructions()
    states = {state: [i for i in everything if i.state == state] for state in ("runs", "partly", "refused")}
    forms = sum(len(i.forms) for i in everything)
    taken = forms - sum(len(i.refused) for i in everything)
    lines = [
        f"{len(everything)} instructions, {len(states['runs'])} of them in every form tried, {len(states['partly'])} "
        f"partly, {len(states['refused'])} not at all; {taken:,} of {forms:,} forms.",
        "",
        "| ISA | instruction | state | forms | opcode cases | refused |",
        "|---|---|---|---|---|---|",
    ]
    for i in everything:
        refused = "all" if i.state == "refused" else "<br>".join(f"`{form}`" for form in i.refused).replace("|", "\\|")
        count = f"{len(i.forms) - len(i.refused)} of {len(i.forms)}"
        name = i.name.replace("|", "\\|")
        lines.append(f"| {i.section} | `{name}` | {i.state} | {count} | {cases_of(i) or ''} | {refused} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--why", is_flag=True, help="Print why each refused form is.")
def main(why: bool) -> None:
    if not why:
        click.echo(page())
        return
    for i in instructions():
        for form, reason in i.refused.items():
            click.echo(f"{i.name}: {statement(form)}  {reason}")


if __name__ == "__main__":
    main()
