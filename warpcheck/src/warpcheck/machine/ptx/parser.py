"""Parser of PTX text (ISA chapters 4, 5 and 11).

It reads the syntax only: opcodes and modifiers remain text, which `warpcheck.machine.lowering` interprets.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from warpcheck.errors import Location, PtxSyntaxError
from warpcheck.machine.ptx import records
from warpcheck.machine.ptx.scopes import Scopes
from warpcheck.machine.ptx.text import float_bytes, parse_literal, split_top

# Of a statement of several lines the assembler of the compiler counts on from the line of the statement: .loc in there
# names lines that are not its own.
_INLINE_ASSEMBLY = re.compile(r"// begin inline asm$.*?// end inline asm$", re.S | re.M)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s+")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"[^\n]*')
_ENTRY = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b")
_NAME = re.compile(r"[A-Za-z_$%][\w$%.]*")
_INSTRUCTION = r"(?P<text>(?:@(?P<negated>!?)\s*(?P<guard>[\w$%%]+)\s+)?(?P<opcode>[a-zA-Z_]%s)(?P<operands>%s))"
# Nearly every line of a body is a `.loc`, or an instruction with white space after its opcode, which no label has. Only
# lines that do not match (labels, scopes, directives) take the slower branches of `body`.
_LINE = re.compile(
    r"\s*(?:\.loc\s+(\d+)\s+(\d+)\s+(\d+)([^\n]*)|"
    + _INSTRUCTION % (r"[\w.]*(?:::[\w.]+)*", r"(?:\s+[^\s:;][^;]*)?")
    + r"\s*;)"
)
_INLINED = re.compile(r"\binlined_at\s+(\d+)\s+(\d+)\s+(\d+)")
_ANY_INSTRUCTION = re.compile(_INSTRUCTION % (r"[\w.:]*", "[^;]*"))
_ADDRESS = re.compile(r"(.*?)\s*(?:\+\s*([-+]?\s*\w+)|(-\s*\w+))?$", re.S)


def _source(m: re.Match, callers: dict[tuple[int, int, int], records.Source]) -> records.Source:
    """Return the source of a matched `.loc`, with the calls that were inlined (ISA 11.5.4).

    callers: source of each place that a `.loc` has named so far. The place of an inlined call is one of them.
    """
    place = (int(m[1]), int(m[2]), int(m[3]))
    calls: tuple[tuple[int, int], ...] = ()
    if at := _INLINED.search(m[4]):
        caller = (int(at[1]), int(at[2]), int(at[3]))
        outer = callers.get(caller)
        calls = (caller[:2], *(outer.calls if outer is not None and caller != place else ()))
    callers[place] = records.Source(place[0], place[1], calls)
    return callers[place]


class _Parser:
    """Recursive-descent parser; `pos` is the offset of the text that is not read yet."""

    def __init__(self, text: str) -> None:
        # Comments become spaces and newlines of the same length, so that offsets keep their line numbers.
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
        self.assembly = [m.span() for m in _INLINE_ASSEMBLY.finditer(text)]
        self.starts = [0] + [m.end() for m in re.finditer("\n", self.text)]
        self.pos = 0

    def line(self, pos: int) -> int:
        """Line number of an offset, from 1."""
        return bisect_right(self.starts, pos)

    def in_assembly(self, pos: int) -> bool:
        """True if an offset lies in inline assembly."""
        i = bisect_right(self.assembly, (pos, len(self.text)))
        return i > 0 and pos < self.assembly[i - 1][1]

    def fail(self, message: str, pos: int | None = None) -> PtxSyntaxError:
        pos = self.pos if pos is None else pos
        line = self.line(pos)
        end = self.text.find("\n", pos)
        return PtxSyntaxError(message, Location(line, self.text[pos : end if end >= 0 else None].strip()))

    def skip(self) -> bool:
        """Skip white space; False at the end of the text."""
        m = _SPACE.match(self.text, self.pos)
        if m:
            self.pos = m.end()
        return self.pos < len(self.text)

    def until(self, stop: str) -> str:
        """Read the text up to `stop`, and `stop` itself."""
        end = self.text.find(stop, self.pos)
        if end < 0:
            raise self.fail(f"expected {stop!r}")
        piece = self.text[self.pos : end]
        self.pos = end + len(stop)
        return piece

    def braces(self) -> str:
        """Read a balanced {...} and return the text inside it."""
        depth, start = 0, self.pos
        for m in re.finditer(r"[{}]", self.text[start:]):
            depth += 1 if m[0] == "{" else -1
            if depth == 0:
                self.pos = start + m.end()
                return self.text[start + 1 : start + m.start()]
        raise self.fail("unbalanced braces")

    # Module level.

    def module(self) -> records.Module:
        """Read all directives, variables and kernels of a module."""
        module = records.Module("", {}, {}, {})
        functions: set[str] = set()
        while self.skip():
            rest = self.text[self.pos : self.pos + 400]
            if m := _FILE.match(self.text, self.pos):
                module.files[int(m[1])] = m[2]
                self.pos = m.end()
            elif m := re.match(r"\.(version|target|address_size)\s+([^\n]*)", rest):
                if m[1] == "target":
                    module.target = m[2].split(",")[0].strip()
                self.pos += m.end()
            elif m := _ENTRY.match(self.text, self.pos):
                self.pos = m.end()
                if m[1] == "entry":
                    kernel = self.kernel(module)
                    module.kernels[kernel.name] = kernel
                else:
                    functions.add(self.function_declaration())
            elif rest.startswith(".section"):
                self.until("{")
                self.pos -= 1
                self.braces()
            elif rest.startswith((".pragma", ".alias")):
                self.until(";")
            elif m := re.match(r"(\.(?:extern|visible|weak|common)\s+)*\.(global|shared|const)\b", rest):
                start = self.pos
                statement = self.until(";")
                variable = self.variable(statement, start)
                module.variables[variable.name] = variable
            else:
                raise self.fail("cannot read this at module level")
        return module

    def function_declaration(self) -> str:
        """Skip a prototype of a function and return its name. Functions with a body are not modelled."""
        start = self.pos
        m = re.compile(r"[^;{]*").match(self.text, start)
        assert m is not None, "the pattern also matches the empty text"
        self.pos = m.end()
        if self.text[self.pos : self.pos + 1] == "{":
            raise self.fail("device functions (.func with a body) are not modelled", start)
        self.until(";")
        return re.sub(r"\([^()]*\)", "", m[0]).strip()

    def variable(self, statement: str, start: int) -> records.Variable:
        """Variable of a declaration, with its initial bytes. `start` is the offset that an error names.

        A name in the initial values is an address; it becomes zeros with a relocation at its offset.
        """
        declaration, _, initial = statement.partition("=")
        words = declaration.split()
        extern = ".extern" in words
        space = next(w[1:] for w in words if w in (".global", ".shared", ".const", ".local", ".param"))
        align_m = re.search(r"\.align\s+(\d+)", declaration)
        types = [w for w in re.findall(r"\.([a-z]\w*)", declaration) if w in records.TYPE_BITS]
        vector = {"v2": 2, "v4": 4}.get((re.findall(r"\.(v[24])\b", declaration) or [""])[0], 1)
        tail = re.search(r"([A-Za-z_$%][\w$%.]*)\s*((?:\[[^\]]*\]\s*)*)$", declaration.strip())
        if not types or not tail:
            raise self.fail("cannot read this variable", start)
        element = max(1, records.TYPE_BITS[types[0]] // 8) * vector
        count = 1
        for dim in re.findall(r"\[([^\]]*)\]", tail[2]):
            dim = dim.strip()
            count *= int(dim, 0) if dim else 0
        data, relocations = None, []
        if initial.strip():
            values = re.findall(r"[^\s,{}]+", initial)
            raw = bytearray()
            for value in values:
                literal = parse_literal(value)
                if literal is None:
                    relocations.append((len(raw), value))
                    raw += bytes(element)
                elif literal.float_bits:
                    raw += float_bytes(literal, element)
                else:
                    raw += (literal.value & ((1 << (8 * element)) - 1)).to_bytes(element, "little")
            data = bytes(raw)
            count = max(count, len(data) // element)
        align = int(align_m[1]) if align_m else element
        return records.Variable(tail[1], space, element * count, align, data, tuple(relocations), extern)

    def kernel(self, module: records.Module) -> records.Kernel:
        """Read a kernel after `.entry`: name, parameters, directives such as `.maxntid`, and body."""
        self.skip()
        m = _NAME.match(self.text, self.pos)
        if not m:
            raise self.fail("expected the name of the entry")
        name = m[0]
        self.pos = m.end()
        self.skip()
        params: list[records.Param] = []
        if self.text[self.pos] == "(":
            self.pos += 1
            start = self.pos
            depth_text = self.until(")")
            offset = 0
            for declaration in split_top(depth_text):
                variable = self.variable(
                    re.sub(r"\.ptr\b(\s*\.(global|shared|const|local))?(\s*\.align\s+\d+)?", "", declaration), start
                )
                offset = -(-offset // variable.align) * variable.align
                type_ = next(word for word in re.findall(r"\.([a-z]\w*)", declaration) if word in records.TYPE_BITS)
                params.append(records.Param(variable.name, variable.nbytes, variable.align, offset, type_))
                offset += variable.nbytes
        directives: dict[str, tuple[int, ...]] = {}
        while self.skip() and self.text[self.pos] != "{":
            m = re.compile(r"\.(\w+)([^.{;]*)").match(self.text, self.pos)
            if not m:
                raise self.fail("cannot read this kernel directive")
            if m[1] == "pragma":
                self.until(";")
                continue
            directives[m[1]] = tuple(int(x) for x in re.findall(r"\d+", m[2]))
            self.pos = m.end()
        return self.body(module, name, params, directives)

    # Function level.

    def body(self, module: records.Module, name: str, params: list[records.Param], directives) -> records.Kernel:
        """Read the body of a kernel from its opening brace on."""
        scopes = Scopes()
        code: list[records.Instruction] = []
        variables: dict[str, records.Variable] = {}
        tables: dict[str, tuple[str, ...]] = {}
        source = records.Source()
        callers: dict[tuple[int, int, int], records.Source] = {}
        self.pos += 1
        depth = 1
        while depth:
            m = _LINE.match(self.text, self.pos)
            if m is not None:
                if m[1] is None:
                    code.append(self.instruction(m, scopes, source))
                elif not self.in_assembly(m.start(1)):
                    source = _source(m, callers)
                self.pos = m.end()
                continue
            if not self.skip():
                raise self.fail(f"the body of {name} does not end")
            c = self.text[self.pos]
            if c == "{":
                scopes.push()
                depth += 1
                self.pos += 1
            elif c == "}":
                scopes.pop()
                depth -= 1
                self.pos += 1
            elif c == ";":
                self.pos += 1
            elif c == ".":
                self.directive(scopes, variables)
            elif m := _LABEL.match(self.text, self.pos):
                self.pos = m.end()
                self.skip()
                if self.text.startswith(".branchtargets", self.pos):
                    tables[m[1]] = tuple(self.until(";")[len(".branchtargets") :].replace(",", " ").split())
                elif self.text.startswith(".callprototype", self.pos):
                    self.until(";")
                else:
                    scopes.labels[scopes.current][m[1]] = len(code)
            else:
                code.append(self.instruction(self.any_instruction(), scopes, source))
        labels: dict[str, int] = {}
        for instruction in code:
            if instruction.opcode.split(".")[0] in ("bra", "brx"):
                self.resolve(instruction, scopes, labels, tables)
        return records.Kernel(name, params, code, labels, scopes.registers, variables, directives, tables)

    def resolve(self, instruction: records.Instruction, scopes: Scopes, labels: dict, tables: dict) -> None:
        """Replace the label names of a branch by names that are unique in the kernel, and add those to `labels`.

        The same name may be a label of several scopes. A `brx` gets the labels of its table as a vector.
        """

        def unique(name: str) -> records.Symbol:
            target = scopes.label(name, instruction.scope)
            if target is None:
                raise PtxSyntaxError(
                    f"label {name} is not defined in this scope", Location(instruction.line, instruction.text)
                )
            key = f"{name}@{target}"
            labels[key] = target
            return records.Symbol(key)

        if instruction.opcode.startswith("bra"):
            instruction.operands = (unique(instruction.operands[0].name),)
        else:
            index, table = instruction.operands
            targets = tables.get(table.name, ())
            instruction.operands = (index, records.Vector(tuple(unique(t) for t in targets)))

    def directive(self, scopes: Scopes, variables: dict[str, records.Variable]) -> None:
        """Read a declaration of registers or variables in a body."""
        start = self.pos
        statement = self.until(";")
        if m := re.match(r"\.reg\s+(?:\.(v[24])\s+)?\.(\w+)\s+(.*)", statement, re.S):
            if m[2] not in records.TYPE_BITS:
                raise self.fail(f"unknown register type .{m[2]}", start)
            for name in m[3].split(","):
                scopes.declare(name.strip(), m[2], elements=int(m[1][1:]) if m[1] else 0)
        elif re.match(r"\.(local|shared|param|global)\b", statement):
            variable = self.variable(statement, start)
            variables[variable.name] = variable
        elif not statement.startswith(".pragma"):
            raise self.fail("cannot read this directive", start)

    def any_instruction(self) -> re.Match:
        """Match an instruction that `_LINE` does not, such as one without white space after its opcode."""
        start = self.pos
        statement = self.until(";")
        m = _ANY_INSTRUCTION.match(self.text, start)
        if m is None:
            guard = statement.startswith("@") and not re.match(r"@!?\s*[\w$%]+\s", statement)
            raise self.fail("cannot read this guard" if guard else "cannot read this instruction", start)
        return m

    def instruction(self, m: re.Match, scopes: Scopes, source: records.Source) -> records.Instruction:
        """Instruction of a match, with its guard and operands resolved in the current scope."""
        text, negated, name, opcode, operands = m.group("text", "negated", "guard", "opcode", "operands")
        guard = None
        if name is not None:
            guard = scopes.register(name)
            if guard is None:
                raise self.fail(f"predicate {name} is not declared", m.start("text"))
        try:
            read = tuple(self.operands(operands, scopes))
        except ValueError as error:
            raise self.fail(str(error), m.start("text")) from None
        line, text = self.line(m.start("text")), " ".join(text.split())
        return records.Instruction(opcode, read, guard, bool(negated), line, text, source, scopes.current)

    def operands(self, text: str, scopes: Scopes) -> list:
        """Operands of a comma-separated list. Equal texts in a scope share one cached operand."""
        read, cached = [], scopes.operands[scopes.current]
        for piece in split_top(text):
            operand = cached.get(piece)
            if operand is None:
                operand = cached[piece] = self.operand(piece, scopes)
            read.append(operand)
        return read

    def operand(self, text: str, scopes: Scopes):
        """Operand of a text. Raises ValueError without a location, which `instruction` adds."""
        if not text:
            raise ValueError("an operand is missing")
        c = text[0]
        if c == "{":
            return records.Vector(tuple(self.operands(text[1:-1], scopes)))
        if c == "[":
            return self.address(text[1 : text.rindex("]")], scopes)
        if c == "(":
            return records.Vector(tuple(self.operands(text[1:-1], scopes)))
        if c == "!":
            register = scopes.register(text[1:].strip())
            if register is None:
                raise ValueError(f"predicate {text[1:]} is not declared")
            return records.Negated(register)
        if text == "_":
            return records.Sink()
        if "|" in text:
            first, second = (self.operand(o.strip(), scopes) for o in text.split("|"))
            return records.Pair(first, second)
        literal = None if c == "%" else parse_literal(text)
        if literal is not None:
            return literal
        register = scopes.register(text)
        if register is not None:
            return register
        vector = scopes.vector(text)
        if vector is not None:
            return records.Vector(vector)
        if text == "WARP_SZ":
            return records.Imm(32)
        if text[0] == "%":
            return records.Special(text[1:])
        m = re.match(r"([\w$%.]+)\s*([+-]\s*\w+)?$", text)
        if not m:
            raise ValueError(f"cannot read operand {text!r}")
        return records.Symbol(m[1], int(m[2].replace(" ", ""), 0) if m[2] else 0)

    def address(self, text: str, scopes: Scopes) -> records.Address:
        """Address of the text inside brackets: base and offset, then coordinates and other operands."""
        parts = split_top(text)
        m = _ADDRESS.match(parts[0])
        assert m is not None, "every group is optional"
        base_text, offset_text = m[1].strip(), (m[2] or m[3])
        offset = 0
        if offset_text is not None:
            literal = parse_literal(offset_text.replace(" ", ""))
            if literal is None:
                raise ValueError(f"cannot read address {text!r}")
            offset = literal.value
        base = self.operand(base_text, scopes)
        if isinstance(base, records.Symbol):
            offset += base.offset
            base = records.Symbol(base.name)
        coords, extra = None, []
        for part in parts[1:]:
            operand = self.operand(part, scopes)
            if isinstance(operand, records.Vector) and coords is None:
                coords = operand.items
            else:
                extra.append(operand)
        return records.Address(base, offset, coords, tuple(extra))


def parse(text: str) -> records.Module:
    """Parse a PTX module. Raises PtxSyntaxError with the line."""
    return _Parser(text).module()
