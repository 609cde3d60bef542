"""A parsed PTX module as records: kernels, their instructions, and the operands of these."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpcheck.errors import Location

TYPE_BITS = {"pred": 1}
for _prefix in "bus":
    TYPE_BITS.update({f"{_prefix}{bits}": bits for bits in (8, 16, 32, 64, 128)})
TYPE_BITS.update({"f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "tf32": 32, "f64": 64, "f32x2": 64})


@dataclass(eq=False, slots=True)
class Register:
    """A virtual register; `index` counts registers of the kernel in order of first use."""

    name: str
    type: str
    index: int = -1

    @property
    def bits(self) -> int:
        return TYPE_BITS[self.type]


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal. Floats keep their bits: `float_bits` is 32, 64, or 0 for an integer."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True, slots=True)
class Special:
    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, parameter, function or label, with a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Negated:
    register: Register


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a result that is thrown away."""


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` of tensor instructions. Offset in bytes."""

    base: object
    offset: int = 0
    coords: tuple | None = None
    extra: tuple = ()


@dataclass(slots=True)
class Instruction:
    opcode: str
    operands: tuple
    guard: Register | None
    guard_negated: bool
    line: int
    text: str
    file: int | None
    source_line: int | None
    scope: int = 0

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


@dataclass(frozen=True)
class Variable:
    """A module- or function-level variable in a state space. Sizes in bytes; size 0 for `extern name[]`."""

    name: str
    space: str
    nbytes: int
    align: int
    data: bytes | None = None
    relocations: tuple[tuple[int, str], ...] = ()
    extern: bool = False


@dataclass(frozen=True)
class Param:
    """A parameter of an entry; `type`: of its elements ("u64", "f32", "b8" of a structure)."""

    name: str
    nbytes: int
    align: int
    offset: int
    type: str


@dataclass
class Kernel:
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
    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]
    files: dict[int, str]

    def location(self, instruction: Instruction, **who) -> Location:
        file = self.files.get(instruction.file) if instruction.file is not None else None
        return Location(instruction.line, instruction.text, file, instruction.source_line if file else None, **who)
