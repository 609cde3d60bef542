"""Parser of PTX: `parse` converts the text of a module to the classes of `records`."""

from warpcheck.machine.ptx.parser import parse
from warpcheck.machine.ptx.records import (
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
    Source,
    Special,
    Symbol,
    Variable,
    Vector,
)  # fmt: skip
from warpcheck.machine.ptx.text import entries

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
    "Source",
    "Special",
    "Symbol",
    "Variable",
    "Vector",
    "entries",
    "parse",
]  # fmt: skip
