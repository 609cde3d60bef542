"""Lowering of parsed PTX instructions to rows of the core's instruction table.

Each root opcode has a handler. It takes the modifiers that it knows; a modifier that remains raises UnknownInstruction.
A row holds an operation, its type, destinations, sources and modifiers. `core/modifiers.hpp` defines the modifiers for
both languages: `Lowering.emit` takes them as keywords, an enumerator by its name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from warpcheck.errors import UnknownInstruction
from warpcheck.machine.lowering.forms import ADDRESS, DST, Form, form_of, leaves_of
from warpcheck.machine.ptx import Instruction, records

T = TypeVar("T")
Modifiers = dict[str, Any]  # by the names of core/modifiers.hpp

# (kind, word offset, register number or -1, bits, negated); program.hpp defines the kinds.
NO_OPERAND = (0, 0, -1, 0, False)

SHARED_RESERVED = 1024
PARAM_BASE = 0x0200000000000000
LOCAL_BASE = 0x0300000000000000

ROUNDINGS = {"rn": "NearestEven", "rz": "Zero", "rm": "Down", "rp": "Up", "rna": "NearestAway",
             "rni": "NearestEven", "rzi": "Zero", "rmi": "Down", "rpi": "Up"}  # fmt: skip

PRESETS = {
    "tid.x": "TidX", "tid.y": "TidY", "tid.z": "TidZ", "ntid.x": "NtidX", "ntid.y": "NtidY", "ntid.z": "NtidZ",
    "ctaid.x": "CtaidX", "ctaid.y": "CtaidY", "ctaid.z": "CtaidZ",
    "nctaid.x": "NctaidX", "nctaid.y": "NctaidY", "nctaid.z": "NctaidZ",
    "laneid": "LaneId", "warpid": "WarpId", "nwarpid": "NwarpId", "smid": "SmId", "nsmid": "NsmId", "gridid": "GridId",
    "clusterid.x": "ClusteridX", "clusterid.y": "ClusteridY", "clusterid.z": "ClusteridZ",
    "nclusterid.x": "NclusteridX", "nclusterid.y": "NclusteridY", "nclusterid.z": "NclusteridZ",
    "cluster_ctaid.x": "ClusterCtaidX", "cluster_ctaid.y": "ClusterCtaidY", "cluster_ctaid.z": "ClusterCtaidZ",
    "cluster_nctaid.x": "ClusterNctaidX", "cluster_nctaid.y": "ClusterNctaidY", "cluster_nctaid.z": "ClusterNctaidZ",
    "cluster_ctarank": "ClusterCtarank", "cluster_nctarank": "ClusterNctarank",
    "is_explicit_cluster": "IsExplicitCluster",
    "lanemask_eq": "LanemaskEq", "lanemask_le": "LanemaskLe", "lanemask_lt": "LanemaskLt",
    "lanemask_ge": "LanemaskGe", "lanemask_gt": "LanemaskGt",
    "dynamic_smem_size": "DynamicSmemSize", "total_smem_size": "TotalSmemSize", "aggr_smem_size": "AggrSmemSize",
    "tid.w": "Zero", "ntid.w": "Zero", "ctaid.w": "Zero",
}  # fmt: skip
SPACES = {"global": "Global", "shared": "Shared", "shared::cta": "Shared", "shared::cluster": "SharedCluster",
          "local": "Local", "param": "Param", "param::entry": "Param", "param::func": "Param",
          "const": "Const"}  # fmt: skip
CLOCKS = {"clock": "Clock", "clock_hi": "ClockHigh", "clock64": "Clock64", "globaltimer": "Global",
          "globaltimer_lo": "GlobalLow", "globaltimer_hi": "GlobalHigh"}  # fmt: skip


class Mods:
    """Modifiers of an opcode. Handlers take them one by one; `finish` raises UnknownInstruction if one remains."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.left = instruction.parts[1:]

    def take(self, *names: str, default: str | None = None) -> str | None:
        """Remove and return the first modifier that is one of the names."""
        for part in self.left:
            if part in names:
                self.left.remove(part)
                return part
        return default

    def has(self, name: str) -> bool:
        return self.take(name) is not None

    def take_prefix(self, prefix: str) -> str | None:
        for part in self.left:
            if part.startswith(prefix):
                self.left.remove(part)
                return part
        return None

    def need(self, *names: str) -> str:
        """Like `take`, but one of the names must be present."""
        name = self.take(*names)
        if name is None:
            raise self.unknown(f"none of .{', .'.join(names)}")
        return name

    def need_prefix(self, prefix: str) -> str:
        name = self.take_prefix(prefix)
        if name is None:
            raise self.unknown(f"no .{prefix}...")
        return name

    def choose(self, meanings: Mapping[str, T], default: T | None = None) -> T:
        """Take one of the keys and return its value; without a default, one of them must be present."""
        name = self.take(*meanings)
        if name is not None:
            return meanings[name]
        if default is None:
            raise self.unknown(f"none of .{', .'.join(meanings)}")
        return default

    def type(self) -> str:
        """Take the last type modifier."""
        for part in reversed(self.left):
            if part in records.TYPE_BITS or part in _NARROW:
                self.left.reverse()
                self.left.remove(part)
                self.left.reverse()
                return part
        raise self.unknown()

    def rounding(self) -> str:
        return ROUNDINGS[self.take("rn", "rz", "rm", "rp", "rna") or "rn"]

    def unknown(self, why: str = "") -> UnknownInstruction:
        """Error to be raised for this instruction; it names the modifiers that remain."""
        text = f"unknown instruction: {self.instruction.opcode}"
        left = f" (not modelled: .{' .'.join(self.left)})" if self.left else ""
        return UnknownInstruction(text + left + (f": {why}" if why else ""))

    def finish(self) -> None:
        if self.left:
            raise self.unknown()


_NARROW = {"e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2", "e4m3x4", "e5m2x4", "e2m1x4", "e2m3x4",
           "e3m2x4", "e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "ue8m0", "u16x2", "s16x2"}  # fmt: skip


@dataclass(slots=True)
class Row:
    """Row of the core's table, in the core's codes. Operands are tuples such as NO_OPERAND."""

    op: int
    type: int
    type2: int
    dst: list[tuple]
    src: list[tuple]
    modifiers: list[int]  # in the order of the operation's record
    guard: tuple
    aligned: bool
    sync: bool


@dataclass
class Layout:
    """Offsets of a kernel's variables in shared and local memory, and the sizes in bytes."""

    shared: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    static_shared: int = 0
    local_bytes: int = 0


def shared_layout(module: records.Module, kernel: records.Kernel) -> Layout:
    """Lay out shared and local variables. Dynamic (`extern`, unsized) variables all start after the static ones."""
    layout = Layout()
    offset = SHARED_RESERVED
    variables = [v for v in (*module.variables.values(), *kernel.variables.values()) if v.space == "shared"]
    for v in variables:
        if v.nbytes:
            offset = -(-offset // v.align) * v.align
            layout.shared[v.name] = offset
            offset += v.nbytes
    dynamic = [v for v in variables if not v.nbytes]
    align = max((v.align for v in dynamic), default=1)
    offset = -(-offset // align) * align
    layout.shared.update({v.name: offset for v in dynamic})
    layout.static_shared = offset - SHARED_RESERVED
    for v in kernel.variables.values():
        if v.space == "local":
            layout.local_bytes = -(-layout.local_bytes // v.align) * v.align
            layout.local[v.name] = layout.local_bytes
            layout.local_bytes += v.nbytes
    return layout


class Lowering:
    """Lowering of one kernel. `symbols`: addresses of the module's variables in global memory."""

    def __init__(self, core, module: records.Module, kernel: records.Kernel, symbols: dict[str, int]) -> None:
        self.ops: dict[str, int] = core.OPS
        self.types: dict[str, int] = core.TYPES
        self.fields: dict[str, dict[str, str | dict[str, int]]] = core.MODIFIERS
        self.preset_codes: dict[str, int] = core.PRESETS
        self.module, self.kernel, self.symbols = module, kernel, symbols
        self.layout = shared_layout(module, kernel)
        self.rows: list[Row] = []
        self.row_of: list[int] = []  # instruction index -> row
        self.sources: list[int] = []  # row -> instruction index
        self.constants: list[tuple[int, int, int]] = []  # value, word offset, words
        self.constant_index: dict[tuple[int, int], int] = {}
        self.constant_words = 0
        self.register_offsets: list[int] = []
        self.register_bits: list[int] = []
        self.register_words = 0
        self.by_register: dict[int, tuple] = {}
        self.presets: dict[tuple[str, int, int], tuple] = {}
        self.preset_rows: list[tuple[tuple, int, int]] = []
        self.carry: tuple | None = None
        self.current: Instruction | None = None

    # Operands.

    def new_register(self, bits: int) -> tuple:
        """Operand of a new register. Register rows are aligned to 64 bytes, predicates excepted."""
        number = len(self.register_bits)
        size = 1 if bits == 1 else 128 if bits == 128 else 64 if bits == 64 else 32
        if size > 1:
            self.register_words = -(-self.register_words // 16) * 16
        operand = (1, self.register_words, number, bits, False)
        self.register_words += size
        self.register_bits.append(bits)
        return operand

    def reg(self, register: records.Register, negated: bool = False) -> tuple:
        operand = self.by_register.get(register.index)
        if operand is None:
            operand = self.by_register[register.index] = self.new_register(register.bits)
        return (*operand[:4], True) if negated else operand

    def const(self, value: int, bits: int) -> tuple:
        """Operand of a constant; equal constants share a row of the constant bank."""
        size = 1 if bits == 1 else 128 if bits == 128 else 64 if bits == 64 else 32
        value &= (1 << max(bits, 1)) - 1
        key = (value, size)
        if key not in self.constant_index:
            if size > 1:
                self.constant_words = -(-self.constant_words // 16) * 16
            self.constant_index[key] = self.constant_words
            self.constants.append((value, self.constant_words, size))
            self.constant_words += size
        return (2, self.constant_index[key], -1, bits, False)

    def preset(self, name: str, bits: int, value: int = 0) -> tuple:
        """Operand of a register that is set when a warp starts (`Preset` in program.hpp)."""
        key = (name, bits, value)
        if key not in self.presets:
            operand = self.presets[key] = self.new_register(bits)
            self.preset_rows.append((operand, self.preset_codes[name], value))
        return self.presets[key]

    def address_value(self, symbol: records.Symbol, bits: int) -> tuple:
        """Address of a variable, as a `mov` of its name gives it."""
        name = symbol.name
        if name in self.layout.shared:
            return self.preset("SharedSymbol", bits, self.layout.shared[name] + symbol.offset)
        if name in self.layout.local:
            return self.const(LOCAL_BASE + self.layout.local[name] + symbol.offset, bits)
        for param in self.kernel.params:
            if param.name == name:
                return self.const(PARAM_BASE + param.offset + symbol.offset, bits)
        if name in self.symbols:
            return self.const(self.symbols[name] + symbol.offset, bits)
        raise UnknownInstruction(f"unknown symbol {name}")

    def src(self, operand, type_: str) -> tuple:
        """Source operand of a type. Literals become constants of the type's width."""
        bits = records.TYPE_BITS.get(type_, 32)
        if isinstance(operand, records.Register):
            return self.reg(operand)
        if isinstance(operand, records.Negated):
            return self.reg(operand.register, True)
        if isinstance(operand, records.Imm):
            return self.const(literal_bits(operand, type_), bits)
        if isinstance(operand, records.Special):
            return self.special(operand, bits)
        if isinstance(operand, records.Symbol):
            return self.address_value(operand, bits)
        if isinstance(operand, records.Sink):
            return NO_OPERAND
        raise UnknownInstruction(f"operand {operand} does not fit here")

    def special(self, operand: records.Special, bits: int) -> tuple:
        """Operand of a special register. A clock is read by a row of its own, into a new register."""
        if operand.name in PRESETS:
            return self.preset(PRESETS[operand.name], 64 if bits == 64 else 32)
        if operand.name in CLOCKS:
            target = self.new_register(64 if operand.name in ("clock64", "globaltimer") else 32)
            self.emit("clock", "u64" if target[3] == 64 else "u32", [target], [], timer=CLOCKS[operand.name])
            return target
        raise UnknownInstruction(f"unknown special register %{operand.name}")

    def dst(self, operand) -> tuple:
        if isinstance(operand, records.Register):
            return self.reg(operand)
        if isinstance(operand, records.Sink):
            return NO_OPERAND
        raise UnknownInstruction(f"operand {operand} cannot be a destination")

    def carry_register(self) -> tuple:
        """Predicate that stands for the carry flag of `.cc` instructions."""
        if self.carry is None:
            self.carry = self.new_register(1)
        return self.carry

    def address(self, operand) -> tuple[tuple, int]:
        """Base operand and byte offset of a memory operand."""
        if not isinstance(operand, records.Address):
            raise UnknownInstruction(f"operand {operand} is not an address")
        base = operand.base
        if isinstance(base, records.Imm):
            return self.const(base.value, 64), operand.offset
        if isinstance(base, records.Symbol):
            return self.address_value(base, 64 if base.name not in self.layout.shared else 32), operand.offset
        return self.src(base, "u64"), operand.offset

    # Rows.

    def emit(
        self,
        op: str,
        type_: str,
        dst: Sequence[tuple],
        src: Sequence[tuple],
        *,
        type2: str | None = None,
        aligned: bool = False,
        sync: bool = False,
        **modifiers: Any,
    ) -> None:
        """Append a row for the current instruction. aligned, sync: all lanes must execute it together."""
        code = self.types[type_]
        self.add(
            self.ops[op], code, self.types[type2] if type2 else code, list(dst), list(src), self.packed(op, modifiers),
            aligned, sync,
        )  # fmt: skip

    def add(self, op: int, type_: int, type2: int, dst: list[tuple], src: list[tuple], modifiers: list[int],
            aligned: bool, sync: bool) -> None:  # fmt: skip
        """Append a row for the current instruction, in the core's codes."""
        instruction = self.current
        assert instruction is not None
        guard = NO_OPERAND
        if instruction.guard is not None:
            guard = self.reg(instruction.guard, instruction.guard_negated)
        self.rows.append(Row(op, type_, type2, dst, src, modifiers, guard, aligned, sync))
        self.sources.append(self.current_index)

    def packed(self, op: str, given: Modifiers) -> list[int]:
        """Modifiers of an operation in the order of its record.

        A missing modifier is False, 0 or the first enumerator. Raises RuntimeError for an unknown name or a value of
        the wrong type, which are errors of a handler, not of the PTX.
        """
        fields = self.fields[op]
        for name in given.keys() - fields.keys():
            raise RuntimeError(f"{op} has no modifier {name!r}; it has {', '.join(fields) or 'none'}")
        values = []
        for name, kind in fields.items():
            value = given.get(name, 0)
            if isinstance(kind, dict) and isinstance(value, str) and value in kind:
                value = kind[value]
            elif name in given and type(value).__name__ != kind:
                expected = kind if isinstance(kind, str) else f"one of {', '.join(kind)}"
                raise RuntimeError(f"{op}: the modifier {name} is {value!r}, expected {expected}")
            values.append(int(value))
        return values

    def repeat(self, form: Form, leaves: Sequence[Any]) -> None:
        """Append the row of an instruction whose form is cached."""
        operands = []
        for index, what in form.steps:
            leaf = leaves[index]
            if type(leaf) is records.Register:
                operand = self.by_register.get(leaf.index) or self.reg(leaf)
            elif what is DST:
                operand = self.dst(leaf)
            elif what is ADDRESS:
                operand = self.address(leaf)[0]
            else:
                operand = self.src(leaf, what)
            operands.append(operand)
        operands.append(NO_OPERAND)
        modifiers = form.modifiers
        if form.offsets:
            modifiers = modifiers.copy()
            for index, leaf_at in form.offsets:
                modifiers[index] = leaves[leaf_at].offset
        self.add(
            form.op, form.type, form.type2, [operands[i] for i in form.dst], [operands[i] for i in form.src],
            modifiers, form.aligned, form.sync,
        )  # fmt: skip

    def run(self) -> None:
        """Lower all instructions. Raises UnknownInstruction with the location of the instruction."""
        for index, instruction in enumerate(self.kernel.instructions):
            self.current, self.current_index = instruction, index
            self.row_of.append(len(self.rows))
            try:
                kinds, leaves = leaves_of(instruction.operands)
                key = instruction.opcode, kinds
                form = _FORMS.get(key)
                if form is not None:
                    self.repeat(form, leaves)
                    continue
                handler = HANDLERS.get(instruction.parts[0])
                if handler is None:
                    raise UnknownInstruction(f"unknown instruction: {instruction.opcode}")
                if key not in _FORMS:
                    _FORMS[key] = form_of(*key, handler, Mods, self, NO_OPERAND)
                handler(self, instruction, Mods(instruction))
            except UnknownInstruction as error:
                raise UnknownInstruction(error.message, self.module.location(instruction)) from None
            except (IndexError, AttributeError, TypeError, ValueError, KeyError) as error:
                raise UnknownInstruction(
                    f"unknown operand form: {instruction.text} ({error})", self.module.location(instruction)
                ) from error
        self.row_of.append(len(self.rows))
        self._define_leftovers()
        for row in self.rows:
            if row.op in (self.ops["bra"], self.ops["brx"]):
                row.modifiers = [self.row_of[target] for target in row.modifiers]
        self.define_unwritten_parts()
        if len(self.rows) == 0 or self.rows[-1].op != self.ops["exit"]:
            self.rows.append(Row(self.ops["exit"], 0, 0, [], [], [], NO_OPERAND, False, False))
            self.sources.append(len(self.kernel.instructions) - 1)

    def _define_leftovers(self) -> None:
        """Define the registers that no instruction writes as 0.

        Compilers use them for values that do not matter, such as the unused half of a packed pair. So storing one is
        no error.
        """
        written = {operand[2] for row in self.rows for operand in row.dst}
        written |= {operand[2] for operand, _, _ in self.preset_rows}
        for operand in self.by_register.values():
            if operand[2] not in written:
                self.preset_rows.append((operand, self.preset_codes["Zero"], 0))

    def define_unwritten_parts(self) -> None:
        """Replace unwritten parts of a `pack` by 0.

        Compilers pack unwritten registers if only the other parts matter. An undefined part would make the whole result
        undefined.
        """
        written = {o[2] for row in self.rows for o in row.dst} | {o[2] for o, _, _ in self.preset_rows}
        for row in self.rows:
            if row.op == self.ops["pack"]:
                unwritten = [o[0] == 1 and o[2] not in written for o in row.src]
                if any(unwritten) and not all(unwritten):
                    row.src = [self.const(0, o[3]) if u else o for o, u in zip(row.src, unwritten)]


def literal_bits(literal: records.Imm, type_: str) -> int:
    """Bit pattern of a literal as a value of `type_`."""
    if not literal.float_bits:
        if type_ in ("f32", "f64") and not -(1 << 31) <= literal.value < (1 << 64):
            raise UnknownInstruction(f"literal {literal.value} does not fit .{type_}")
        return literal.value
    raw = literal.value.to_bytes(literal.float_bits // 8, "little")
    if type_ in ("f64", "b64", "u64", "s64") and literal.float_bits == 64:
        return literal.value
    if type_ in ("f32", "b32", "u32", "s32") and literal.float_bits == 32:
        return literal.value
    value = struct.unpack("<d" if literal.float_bits == 64 else "<f", raw)[0]
    if type_ == "f64":
        return struct.unpack("<Q", struct.pack("<d", value))[0]
    if type_ in ("f32", "b32"):
        return struct.unpack("<I", struct.pack("<f", value))[0]
    if type_ == "f16":
        return struct.unpack("<H", struct.pack("<e", value))[0]
    raise UnknownInstruction(f"a floating-point literal cannot be .{type_}")


_FORMS: dict[tuple[str, tuple], Form | None] = {}  # by opcode and kinds of operands; None: no common row
HANDLERS: dict[str, Callable[[Lowering, Instruction, Mods], None]] = {}


def handles(*names: str):
    """Decorator: register a handler of root opcodes."""

    def register(function):
        for name in names:
            HANDLERS[name] = function
        return function

    return register
