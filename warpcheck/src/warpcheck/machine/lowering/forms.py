"""Cached lowering of instruction forms: an opcode with the kinds of its operands.

A kernel has thousands of instructions and some hundred forms: `add.s32` of three registers, or of two and a literal. A
handler first sees operands without content. If it only names the sources and destinations of one row, that row is the
same for every instruction of the form, except for the operands and the byte offsets of addresses. If the handler reads
an operand or does anything else, the form has no such row, and the handler lowers each of its instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from warpcheck.errors import EmulationError
from warpcheck.machine.ptx import Address, Imm, Instruction, Negated, Register, Sink, Source, Special, Symbol, Vector

NO_OPERAND_AT = -1  # index of NO_OPERAND among the operands of a form's row
_LEAVES = frozenset({Register, Imm, Negated, Special, Symbol, Sink, Address})
DST, ADDRESS = "dst", "address"  # instead of a source's type


@dataclass(frozen=True, slots=True)
class Form:
    """Row of a form.

    steps: operands in the order in which the handler creates them: index among the leaves of the instruction, and the
    type of a source, DST or ADDRESS. dst, src: indices of steps. offsets: modifiers that are the offset of an address:
    index in the record, index among the leaves.
    """

    op: int
    type: int
    type2: int
    steps: tuple[tuple[int, str], ...]
    dst: tuple[int, ...]
    src: tuple[int, ...]
    modifiers: list[int]
    offsets: tuple[tuple[int, int], ...]
    aligned: bool
    sync: bool


def leaves_of(operands: Sequence[Any]) -> tuple[tuple, Sequence[Any]]:
    """Return the kinds of operands, nested for vectors, and the flat list of operands."""
    kinds = tuple([type(operand) for operand in operands])
    if Vector not in kinds:
        return kinds, operands
    deep: list[Any] = []
    leaves: list[Any] = []
    for kind, operand in zip(kinds, operands):
        if kind is Vector:
            deep.append(tuple([type(item) for item in operand.items]))
            leaves += operand.items
        else:
            deep.append(kind)
            leaves.append(operand)
    return tuple(deep), leaves


class _Offset:
    """Placeholder of the byte offset of an address."""

    def __init__(self, leaf: int) -> None:
        self.leaf = leaf


class _Recorder:
    """Substitute of `Lowering` that records the calls of a handler; other attributes raise AttributeError."""

    def __init__(self, indices: dict[int, int], no_operand: tuple) -> None:
        self._indices, self._no_operand = indices, no_operand
        self.steps: list[tuple[int, str]] = []
        self.emitted: list[tuple[tuple, dict[str, Any]]] = []

    def _step(self, operand: Any, what: str) -> int:
        if self.emitted:
            raise AttributeError("an operand after the row")
        self.steps.append((self._indices[id(operand)], what))
        return len(self.steps) - 1

    def src(self, operand: Any, type_: str) -> int:
        return self._step(operand, type_)

    def dst(self, operand: Any) -> int:
        return self._step(operand, DST)

    def address(self, operand: Any) -> tuple[int, _Offset]:
        if not isinstance(operand, Address):
            raise TypeError("not an address")
        return self._step(operand, ADDRESS), _Offset(self._indices[id(operand)])

    def emit(self, *row: Any, **modifiers: Any) -> None:
        self.emitted.append((row, modifiers))

    def index(self, operand: Any) -> int:
        if operand == self._no_operand:
            return NO_OPERAND_AT
        if type(operand) is not int:
            raise TypeError("an operand from elsewhere")
        return operand


def form_of(opcode: str, kinds: tuple, handler: Callable, mods: Callable, low: Any, no_operand: tuple) -> Form | None:
    """Return the form, or None if its instructions have no common row.

    mods: creates the modifiers that a handler reads. low: `Lowering` with the tables of codes.
    """
    blanks: list[Any] = []
    leaves: list[Any] = []
    for kind in kinds:
        inside = kind if isinstance(kind, tuple) else (kind,)
        if not _LEAVES.issuperset(inside):
            return None
        made = [object.__new__(one) for one in inside]  # without fields
        leaves += made
        blanks.append(Vector(tuple(made)) if isinstance(kind, tuple) else made[0])
    recorder = _Recorder({id(leaf): index for index, leaf in enumerate(leaves)}, no_operand)
    instruction = Instruction(opcode, tuple(blanks), None, False, 0, "", Source())
    try:
        handler(recorder, instruction, mods(instruction))
        (((op, type_, dst, src), given),) = recorder.emitted
        type2, aligned, sync = (given.pop(name, None) for name in ("type2", "aligned", "sync"))
        offsets = {name: value for name, value in given.items() if isinstance(value, _Offset)}
        modifiers = low.packed(op, {**given, **dict.fromkeys(offsets, 0)})
        names = list(low.fields[op])
        return Form(
            low.ops[op],
            low.types[type_],
            low.types[type2 or type_],
            tuple(recorder.steps),
            tuple(map(recorder.index, dst)),
            tuple(map(recorder.index, src)),
            modifiers,
            tuple((names.index(name), offset.leaf) for name, offset in offsets.items()),
            bool(aligned),
            bool(sync),
        )
    except (EmulationError, AttributeError, TypeError, ValueError, KeyError, IndexError):
        return None  # the handler reports an error, if there is one, for the instruction itself
