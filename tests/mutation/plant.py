"""Mistakes of value and logic, one at a time, as replacements in a file's text.

Left alone are annotations, decorators, texts (docstrings, f-strings, what is raised or warned of), overloads and
`__str__`, `__repr__`: they decide no result.
"""

from __future__ import annotations

import ast
import bisect
import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

Fields = Mapping[str, tuple[str, ...]]  # a record's field -> fields of the same records that have its type

_OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"), ast.Pow: ("**", "*"),
}  # fmt: skip
_COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: (r"is", "is not"), ast.IsNot: (r"is\s+not", "is"), ast.In: (r"in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}  # fmt: skip
_OTHER = {"min": "max", "max": "min", "fmin": "fmax", "fmax": "fmin", "any": "all", "all": "any"}
_ANY_ORDER = ("min", "max", "fmin", "fmax", "mul_packed_f32x2", "add_packed_f32x2")
_TEXT_FUNCTIONS = ("__str__", "__repr__")
_TEXT_CALLS = ("warn", "echo", "print")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake: bytes [start, stop) of the file become `text`. `where` is the enclosing class and function, `line`
    where the expression begins, and `changed` where the change does."""

    path: str
    where: str
    line: int
    changed: int
    kind: str
    start: int
    stop: int
    text: bytes

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text + source[self.stop :]

    def diff(self, source: bytes) -> str:
        before, after = (x.decode().splitlines(keepends=True) for x in (source, self.applied(source)))
        return "".join(difflib.unified_diff(before, after, f"a/{self.path}", f"b/{self.path}", n=1))

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.where}: {self.kind}"


def record_fields(sources: Mapping[str, bytes]) -> Fields:
    """What a field of the dataclasses and named tuples in `sources` is most easily mistaken for."""
    mistaken: dict[str, Counter[str]] = defaultdict(Counter)
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and (node.decorator_list or node.bases):
                fields = [x for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)]
                typed = [(ast.unparse(x.target), ast.unparse(x.annotation)) for x in fields]
                for name, kind in typed:
                    mistaken[name].update(other for other, its in typed if its == kind and other != name)
    return {name: tuple(_nearest(name, others)) for name, others in mistaken.items()}


def _nearest(name: str, others: Counter[str]) -> list[str]:
    """Of several records with a field of this name, the one at hand is not known: take what most of them have; and of
    that what has a word of the name, if there is any (head_dim_v for head_dim)."""
    likely = sorted(other for other, times in others.items() if times == max(others.values()))
    return [other for other in likely if set(other.split("_")) & set(name.split("_"))] or likely


def mutants(path: str, source: bytes, fields: Fields) -> Iterator[Mutant]:
    """Every mutant of one file, in order of its text."""
    found = sorted(_Planter(path, source, fields).all(), key=lambda m: (m.start, m.stop, m.text))
    return iter(dict.fromkeys(found))


class _Planter:
    def __init__(self, path: str, source: bytes, fields: Fields) -> None:
        self.path, self.source, self.fields = path, source, fields
        lines = source.splitlines(keepends=True)
        self.line_starts = [0]
        for line in lines:
            self.line_starts.append(self.line_starts[-1] + len(line))

    def all(self) -> Iterator[Mutant]:
        for where, node in _walk(ast.parse(self.source), ()):
            for kind, start, stop, text in self.of(node):
                changed = bisect.bisect_right(self.line_starts, start)
                yield Mutant(self.path, ".".join(where), node.lineno, changed, kind, start, stop, text)

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.line_starts[node.lineno - 1] + node.col_offset
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> bytes:
        start, stop = self.span(node)
        return self.source[start:stop]

    def between(self, left: ast.AST, right: ast.AST, pattern: str, new: str) -> Iterator[tuple[int, int, bytes]]:
        """The operator that stands between two operands, replaced."""
        begin, end = self.span(left)[1], self.span(right)[0]
        match = re.search(pattern.encode(), self.source[begin:end])
        if match is not None:
            yield begin + match.start(), begin + match.end(), new.encode()

    def of(self, node: ast.AST) -> Iterator[tuple[str, int, int, bytes]]:
        """(kind, start, stop, text) of each mistake to be made at this very node."""
        if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
            old, new = _OPERATORS[type(node.op)]
            left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
            for change in self.between(left, right, re.escape(old), new):
                yield f"{old} is {new}", *change
        elif isinstance(node, ast.Compare):
            for left, operator, right in zip((node.left, *node.comparators), node.ops, node.comparators):
                old, new = _COMPARISONS[type(operator)]
                for change in self.between(left, right, old, new):
                    yield f"{old.replace(chr(92) + 's+', ' ')} is {new}", *change
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:]):
                for change in self.between(left, right, rf"\b{old}\b", new):
                    yield f"{old} is {new}", *change
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            name = "not" if isinstance(node.op, ast.Not) else "minus"
            yield f"{name} is missing", *self.span(node), b"(" + self.text(node.operand) + b")"
        elif isinstance(node, ast.Constant):
            for new in _other_constants(node.value):
                yield "constant", *self.span(node), repr(new).encode()
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            stop = self.span(node)[1]
            start = stop - len(node.attr.encode())
            for other in self.fields.get(node.attr, ()):
                yield "another field", start, stop, other.encode()
            if node.attr in _OTHER:
                yield f"{node.attr} is {_OTHER[node.attr]}", start, stop, _OTHER[node.attr].encode()
        elif isinstance(node, ast.Name) and node.id in _OTHER:
            yield f"{node.id} is {_OTHER[node.id]}", *self.span(node), _OTHER[node.id].encode()
        elif isinstance(node, ast.Call):
            yield from self.of_call(node)
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield "condition negated", *self.span(node.test), b"not (" + self.text(node.test) + b")"
        for test in node.ifs if isinstance(node, ast.comprehension) else ():
            yield "condition negated", *self.span(test), b"not (" + self.text(test) + b")"
        if _is_droppable(node):
            yield "statement dropped", *self.span(node), b"pass"

    def of_call(self, call: ast.Call) -> Iterator[tuple[str, int, int, bytes]]:
        named = [keyword for keyword in call.keywords if keyword.arg is not None]
        neighbours = [*pairwise(call.args), *((one.value, other.value) for one, other in pairwise(named))]
        for one, other in [] if _called(call) in _ANY_ORDER else neighbours:
            both_vary = not any(isinstance(x, ast.Constant | ast.Starred | ast.GeneratorExp) for x in (one, other))
            first, second = self.text(one), self.text(other)
            if both_vary and first != second:
                (start, middle), (end, stop) = self.span(one), self.span(other)
                yield "arguments swapped", start, stop, second + self.source[middle:end] + first
        for keyword in named:
            start, stop = self.span(keyword)
            comma = re.match(rb"\s*,\s*", self.source[stop:])
            yield "keyword dropped", start, stop + (comma.end() if comma else 0), b""


def _walk(node: ast.AST, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.AST]]:
    """Each node that decides something, with the names of what it lies in."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_text(child):
                continue
            inside = where
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = (*where, child.name)
            if hasattr(child, "lineno") or isinstance(child, ast.comprehension):
                yield inside, _placed(child)
            yield from _walk(child, inside)


def _placed(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.comprehension):  # the one node of interest that has no place of its own
        node.lineno = node.target.lineno
    return node


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.FunctionDef):
        overloads = any(isinstance(name, ast.Name) and name.id == "overload" for name in node.decorator_list)
        return node.name in _TEXT_FUNCTIONS or overloads
    if isinstance(node, ast.Call):
        return _called(node) in _TEXT_CALLS
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.Raise)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _other_constants(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        if value:
            yield value - 1
    elif isinstance(value, float):
        yield 2.0 * value if value else 1.0


def _is_droppable(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(node, ast.AugAssign)
