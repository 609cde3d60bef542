"""Registers and labels of a function body, by nested scope."""

from __future__ import annotations

import re

from warpcheck.machine.ptx.records import Register

_REG_RANGE = re.compile(r"(.*?)<(\d+)>$")
_TRAILING = re.compile(r"^(.*?)(\d+)$")


class Scopes:
    """Nested register and label scopes of one function body."""

    def __init__(self) -> None:
        self.parents = [-1]
        self.singles: list[dict[str, Register]] = [{}]
        self.ranges: list[dict[str, tuple[int, str]]] = [{}]
        self.vectors: list[dict[str, tuple[Register, ...]]] = [{}]
        self.labels: list[dict[str, int]] = [{}]
        self.operands: list[dict[str, object]] = [{}]  # parsed operands of each scope, by their text
        self.current = 0
        self.registers: list[Register] = []

    def push(self) -> None:
        self.parents.append(self.current)
        self.singles.append({})
        self.ranges.append({})
        self.vectors.append({})
        self.labels.append({})
        self.operands.append({})
        self.current = len(self.parents) - 1

    def pop(self) -> None:
        self.current = self.parents[self.current]

    def declare(self, name: str, type_: str, elements: int = 0) -> None:
        """Declare a register, a range of registers `name<count>`, or a vector of two or four `elements` (ISA 6.4.3)."""
        self.operands[self.current].clear()  # cached operands may refer to the same name in an outer scope
        if elements:
            vector = tuple(Register(f"{name}.{letter}", type_) for letter in "xyzw"[:elements])
            self.vectors[self.current][name] = vector
            for letters in ("xyzw", "rgba"):
                self.singles[self.current].update({f"{name}.{a}": register for a, register in zip(letters, vector)})
            return
        ranged = _REG_RANGE.match(name)
        if ranged:
            self.ranges[self.current][ranged[1]] = (int(ranged[2]), type_)
        else:
            self.singles[self.current][name] = Register(name, type_)

    def register(self, name: str) -> Register | None:
        """Register of a name in the innermost scope that declares it, or None. Ranges create registers on use."""
        scope, trailing = self.current, None
        while scope >= 0:
            found = self.singles[scope].get(name)
            if found is None and self.ranges[scope] and (trailing := trailing or _TRAILING.match(name)):
                ranged = self.ranges[scope].get(trailing[1])
                if ranged and int(trailing[2]) < ranged[0]:
                    found = self.singles[scope][name] = Register(name, ranged[1])
            if found is not None:
                return self._used(found)
            scope = self.parents[scope]
        return None

    def vector(self, name: str) -> tuple[Register, ...] | None:
        """Elements of the vector of a name, or None."""
        scope = self.current
        while scope >= 0:
            if name in self.vectors[scope]:
                return tuple(self._used(register) for register in self.vectors[scope][name])
            scope = self.parents[scope]
        return None

    def _used(self, register: Register) -> Register:
        if register.index < 0:
            register.index = len(self.registers)
            self.registers.append(register)
        return register

    def label(self, name: str, scope: int) -> int | None:
        """Instruction index of a label that is visible in `scope`, or None."""
        while scope >= 0:
            if name in self.labels[scope]:
                return self.labels[scope][name]
            scope = self.parents[scope]
        return None
