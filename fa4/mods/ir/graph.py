"""Graph of a traced score_mod or mask_mod: a plain value over a few operators, usable in a compile key.

A graph computes on one (query, key) pair. It has three kinds of numbers: "float" (in the arithmetic's precision), "int"
(an index; 32 bits in kernels) and "bool". Captured tensors are inputs by position, with rank and dtype. Most numbers
that the function captured or wrote are inputs too (`Builder.number`): another window size runs the same kernel.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

Number = int | float | bool


class Node(NamedTuple):
    """One value: an operator of `OPERATORS` applied to earlier nodes, or a leaf.

    Leaves: "input" (value: its name), "const" (value), "number" (value: its position among the numbers). "load" reads
    an element of a captured tensor (value: its position); its arguments are the indices.
    """

    op: str
    kind: str
    args: tuple[int, ...] = ()
    value: Number | str | None = None


class TensorType(NamedTuple):
    """Properties of a captured tensor that code depends on."""

    rank: int
    dtype: str


class Scatter(NamedTuple):
    """Gradient of a captured tensor's element: add `value` to `tensor` at `indices`. These are nodes."""

    tensor: int
    indices: tuple[int, ...]
    value: int


INPUTS = {"score": "float", "b": "int", "h": "int", "q_idx": "int", "kv_idx": "int", "grad": "float"}

# Operators with a bool result; the result of any other operator has the kind of its first argument.
_BOOLS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "to_bool"))
OPERATORS = frozenset(
    ("neg", "abs", "add", "sub", "mul", "div", "min", "max", "floordiv", "mod", "pow", "exp", "exp2", "log", "log2",
     "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "floor", "ceil", "trunc", "shl", "shr", "bitand", "bitor",
     "bitxor", "erf", "log1p", "atan2", "where", "to_float", "to_int", *_BOOLS)
)  # fmt: skip


# Operators and leaves that are finite if their arguments are. (Products of finite numbers count as finite.)
_FINITE = frozenset(
    ("input", "const", "number", "add", "sub", "mul", "neg", "tanh", "sigmoid", "where", "min", "max", "abs",
     "to_float", "to_int", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "to_bool", "sin", "cos",
     "load")
)  # fmt: skip


class Graph:
    """A score_mod (`result`: the logit from "score") or mask_mod (`result`: whether the pair is unmasked).

    For a score_mod, `dscore` is the score's gradient computed from "grad", the logit's gradient, and `scatters` are the
    gradients of captured tensors. Graphs are equal if their texts are; a text describes a graph completely, and `parse`
    reads it.
    """

    __slots__ = ("dscore", "nodes", "numbers", "result", "scatters", "tensors", "text")

    def __init__(
        self,
        nodes: Sequence[Node],
        result: int,
        tensors: Sequence[TensorType],
        numbers: Sequence[str],
        dscore: int | None = None,
        scatters: Sequence[Scatter] = (),
    ) -> None:
        self.nodes, self.result, self.dscore = tuple(nodes), result, dscore
        self.tensors, self.numbers, self.scatters = tuple(tensors), tuple(numbers), tuple(scatters)
        self.text = json.dumps([getattr(self, name) for name in _FIELDS], separators=(",", ":"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Graph({len(self.nodes)} nodes)"

    def loads(self) -> list[Node]:
        return [node for node in self.nodes if node.op == "load"]

    def computed(self) -> list[Node]:
        """Return the nodes that the result needs, without derivatives."""
        return [self.nodes[i] for i in sorted(self.needed(self.result))]

    def reads(self, *names: str) -> bool:
        """Whether the result depends on any of these inputs."""
        return any(self.nodes[i].op == "input" and self.nodes[i].value in names for i in self.needed(self.result))

    def is_per_head(self, scatter: Scatter) -> bool:
        """Whether the element's indices depend on sequence and query head only."""
        return self.inputs_of(*scatter.indices) <= {"b", "h"}

    def inputs_of(self, *nodes: int) -> frozenset[str]:
        """Return the inputs that these nodes depend on."""
        return frozenset(str(self.nodes[i].value) for i in self.needed(*nodes) if self.nodes[i].op == "input")

    def has_single_writer(self, scatter: Scatter) -> bool:
        """Whether each element of the tensor gets its gradient from at most one pair of one head."""
        nodes = [self.nodes[i] for i in scatter.indices]
        chosen = {str(node.value) for node in nodes if node.op == "input"}
        return chosen == {"b", "h", "q_idx", "kv_idx"} and [s.tensor for s in self.scatters].count(scatter.tensor) == 1

    def stays_finite(self, *nodes: int | None, trusts_loads: bool = False) -> bool:
        """Whether these nodes are finite at every pair with finite score and gradients. An element of a captured tensor
        may differ per pair, and be infinite at masked pairs; one indexed by sequence and head only is the same at
        unmasked pairs. trusts_loads: assume that all elements are finite."""

        def may_be_infinite(node: Node) -> bool:
            if node.op == "const":
                return node.kind == "float" and not math.isfinite(float(node.value or 0))
            if node.op == "load" and node.kind == "float":
                return not trusts_loads and not self.inputs_of(*node.args) <= {"b", "h"}
            return node.op not in _FINITE

        outputs = [i for i in nodes if i is not None]
        return not any(may_be_infinite(self.nodes[i]) for i in self.needed(*outputs))

    def needed(self, *outputs: int) -> set[int]:
        """Return the nodes that these depend on, including themselves."""
        found: set[int] = set()
        pending = list(outputs)
        while pending:
            i = pending.pop()
            if i not in found:
                found.add(i)
                pending += self.nodes[i].args
        return found


_FIELDS = ("nodes", "result", "tensors", "numbers", "dscore", "scatters")


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Graph:
    """Return the graph of a text."""
    nodes, result, tensors, numbers, dscore, scatters = json.loads(text)
    return Graph(
        [Node(op, kind, tuple(args), value) for op, kind, args, value in nodes],
        result,
        [TensorType(*tensor) for tensor in tensors],
        numbers,
        dscore,
        [Scatter(tensor, tuple(indices), value) for tensor, indices, value in scatters],
    )


class Arithmetic(Protocol):
    """Values of a backend, and operators on them."""

    def const(self, kind: str, value: Number) -> Any: ...

    def number(self, position: int) -> Any: ...

    def load(self, tensor: int, indices: tuple[Any, ...], nodes: tuple[Node, ...]) -> Any:
        """Return an element of a captured tensor; `nodes` are those of the indices."""

    def apply(self, op: str, kind: str, kinds: tuple[str, ...], args: tuple[Any, ...]) -> Any:
        """Apply an operator; `kind` is the result's, `kinds` are the arguments'."""


class Evaluation:
    """Evaluation of a graph at some inputs: each node is computed once, on first use."""

    def __init__(self, graph: Graph, arithmetic: Arithmetic, inputs: dict[str, Any]) -> None:
        self.graph, self.arithmetic, self.inputs = graph, arithmetic, inputs
        self._values: dict[int, Any] = {}

    def value(self, i: int) -> Any:
        if i not in self._values:
            # Nodes are in topological order: this finds missing ones without deep recursion.
            for j in sorted(self.graph.needed(i) - self._values.keys()):
                self._values[j] = self._compute(self.graph.nodes[j])
        return self._values[i]

    def _compute(self, node: Node) -> Any:
        args, nodes = tuple(self._values[i] for i in node.args), self.graph.nodes
        if node.op == "input":
            return self.inputs[str(node.value)]
        if node.op == "const":
            assert isinstance(node.value, (int, float))
            return self.arithmetic.const(node.kind, node.value)
        if node.op in ("number", "load"):
            assert isinstance(node.value, int)
            if node.op == "number":
                return self.arithmetic.number(node.value)
            return self.arithmetic.load(node.value, args, tuple(nodes[i] for i in node.args))
        return self.arithmetic.apply(node.op, node.kind, tuple(nodes[i].kind for i in node.args), args)


# Operators that are folded on constants.
_FOLD: dict[str, Callable[..., Number]] = {
    "neg": operator.neg, "add": operator.add, "sub": operator.sub, "mul": operator.mul, "eq": operator.eq,
    "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "not": operator.not_,
    "and": operator.and_, "or": operator.or_, "to_float": float, "to_int": int, "to_bool": bool, "abs": abs,
}  # fmt: skip
# Numbers that remain constants: the simplification is worth more than sharing a kernel.
_KEPT = (0, 1, -1, 2, 0.5, math.inf, -math.inf)


def is_special(value: Number) -> bool:
    """Whether a captured number is a constant of a graph, instead of an input."""
    return value in _KEPT or value != value


class Builder:
    """Builder of a graph: merges equal nodes, and folds constants."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.numbers: list[tuple[str, Number]] = []
        self._node_ids: dict[tuple, int] = {}

    @staticmethod
    def of(graph: Graph | None) -> Builder:
        """Continue the nodes of a graph, at their positions. No numbers can be added to the graph's own."""
        builder = Builder()
        for node in () if graph is None else graph.nodes:
            builder._node(node)
        return builder

    def _node(self, node: Node) -> int:
        node_key = (*node, type(node.value), math.copysign(1, node.value) if isinstance(node.value, float) else 0)
        if node_key not in self._node_ids:
            self._node_ids[node_key] = len(self.nodes)
            self.nodes.append(node)
        return self._node_ids[node_key]

    def kind(self, i: int) -> str:
        return self.nodes[i].kind

    def input(self, name: str) -> int:
        return self._node(Node("input", INPUTS[name], (), name))

    def const(self, value: Number, kind: str) -> int:
        return self._node(Node("const", kind, (), {"float": float, "int": int, "bool": bool}[kind](value)))

    def number(self, value: Number, kind: str) -> int:
        """Add a number that the function wrote or captured: an input of the graph, or a constant if it is special."""
        if kind == "bool" or is_special(value):
            return self.const(value, kind)
        self.numbers.append((kind, value))
        return self._node(Node("number", kind, (), len(self.numbers) - 1))

    def load(self, tensor: int, indices: tuple[int, ...], kind: str) -> int:
        return self._node(Node("load", kind, indices, tensor))

    def constant(self, i: int) -> Number | None:
        """Return the value of a constant node, else None."""
        node = self.nodes[i]
        return node.value if node.op == "const" and not isinstance(node.value, str) else None

    def to(self, kind: str, i: int) -> int:
        return i if self.kind(i) == kind else self.op(f"to_{kind}", i)

    def op(self, op: str, *args: int) -> int:
        if op not in OPERATORS:
            raise ValueError(f"no operator {op!r}")
        kind = self.kind(args[1] if op == "where" else args[0])
        if op.startswith("to_"):
            kind = op.removeprefix("to_")
        elif op in _BOOLS:
            kind = "bool"
        values = [self.constant(i) for i in args]
        if op in _FOLD and None not in values:
            return self.const(_FOLD[op](*values), kind)
        existing = self._simplified(op, args, values)
        return self._node(Node(op, kind, args)) if existing is None else existing

    def _simplified(self, op: str, args: tuple[int, ...], values: list) -> int | None:
        """Return an existing node of equal value. (0 * x is not simplified: x may be infinite.)"""
        if op in ("mul", "add", "and", "or") and values[0] is not None:
            args, values = (args[1], args[0]), [values[1], values[0]]
        neutral = {"mul": 1, "div": 1, "add": 0, "sub": 0, "and": True, "or": False}.get(op)
        if op in ("mul", "div", "add", "sub", "and", "or") and values[1] == neutral and values[1] is not None:
            return args[0]
        if (op == "and" and values[1] is False) or (op == "or" and values[1] is True):
            return args[1]
        if op == "where":
            if args[1] == args[2]:
                return args[1]
            if values[0] is not None:
                return args[1] if values[0] else args[2]
        if op in ("neg", "not") and self.nodes[args[0]].op == op:
            return self.nodes[args[0]].args[0]
        return None
