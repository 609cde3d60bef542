"""Classes of a parsed PTX module: kernels, instructions, operands and variables."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpcheck.errors import Location

TYPE_BITS = {"pred": 1}
for _prefix in "bus":
    TYPE_BITS.update({f"{_prefix}{bits}": bits for bits in (8, 16, 32, 64, 128)})
TYPE_BITS.update({"f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "tf32": 32, "f64": 64, "f32x2": 64})


@dataclass(eq=False, slots=True)
class Register:
    """Virtual register. `index` numbers the registers of a kernel in order of first use."""

    name: str
    type: str
    index: int = -1

    @property
    def bits(self) -> int:
        return TYPE_BITS[self.type]


@dataclass(frozen=True, slots=True)
class Imm:
    """Literal. For a floating-point literal `value` is the bit pattern, of `float_bits` 32 or 64; integers have 0."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True, slots=True)
class Special:
    """Special register such as `%tid.x`; `name` is without the percent sign."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """Name of a variable, parameter, function or label, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Negated:
    """`!p`: a negated predicate."""

    register: Register


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a result that is discarded."""


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`: a list of operands."""

    items: tuple


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: two destinations."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` of tensor instructions. The offset is in bytes."""

    base: object
    offset: int = 0
    coords: tuple | None = None
    extra: tuple = ()


@dataclass(frozen=True, slots=True)
class Source:
    """File and line of a `.loc`; None before the first one. calls: the same of each inlined call, innermost first."""

    file: int | None = None
    line: int | None = None
    calls: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Instruction:
    """Instruction with its guard, its PTX `line`, and its source if a `.loc` precedes it."""

    opcode: str
    operands: tuple
    guard: Register | None
    guard_negated: bool
    line: int
    text: str
    source: Source
    scope: int = 0

    @property
    def file(self) -> int | None:
        return self.source.file

    @property
    def source_line(self) -> int | None:
        return self.source.line

    @property
    def parts(self) -> list[str]:
        """The opcode and its modifiers, split at dots."""
        return self.opcode.split(".")


@dataclass(frozen=True)
class Variable:
    """Variable of a module or a function in a state space. Sizes are in bytes; `extern name[]` has size 0.

    relocations: (offset, name of a variable) for each address in `data`.
    """

    name: str
    space: str
    nbytes: int
    align: int
    data: bytes | None = None
    relocations: tuple[tuple[int, str], ...] = ()
    extern: bool = False


@dataclass(frozen=True)
class Param:
    """Parameter of a kernel. `type` is the type of its elements: "u64", "f32", or "b8" for a structure."""

    name: str
    nbytes: int
    align: int
    offset: int
    type: str


@dataclass
class Kernel:
    """Kernel. `labels` gives instruction indices, `directives` the numbers of `.maxntid` and others, `tables` the
    labels of each `.branchtargets`."""

    name: str
    params: list[Param]
    instructions: list[Instruction]
    labels: dict[str, int]
    registers: list[Register]
    variables: dict[str, Variable]
    directives: dict[str, tuple[int, ...]]
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.nbytes for p in self.params), default=0)


@dataclass
class Module:
    """PTX module. `target` is its chip, such as "sm_90a"; `files` maps the numbers of `.file` to paths."""

    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]
    files: dict[int, str]

    def location(self, instruction: Instruction, **who) -> Location:
        """Location of an instruction. `who` sets further fields, such as the warp."""
        file = self.files.get(instruction.file) if instruction.file is not None else None
        if not file:
            return Location(instruction.line, instruction.text, **who)
        calls = tuple((self.files.get(number, ""), line) for number, line in instruction.source.calls)
        return Location(instruction.line, instruction.text, file, instruction.source_line, calls=calls, **who)
