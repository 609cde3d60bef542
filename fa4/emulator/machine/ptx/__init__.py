"""PTX text as records: `parse` reads a module, `records` says what comes out."""

from fa4.emulator.machine.ptx.parser import parse
from fa4.emulator.machine.ptx.records import (
    TYPE_BITS,
    Address,
    Imm,
    Instruction,
    Kernel,
    Module,
    Negated,
    Pair,
    Param,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)  # fmt: skip
from fa4.emulator.machine.ptx.text import entries

__all__ = [
    "TYPE_BITS",
    "Address",
    "Imm",
    "Instruction",
    "Kernel",
    "Module",
    "Negated",
    "Pair",
    "Param",
    "Register",
    "Sink",
    "Special",
    "Symbol",
    "Variable",
    "Vector",
    "entries",
    "parse",
]  # fmt: skip
