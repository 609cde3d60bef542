"""Traced functions in device code: a `Score` and a `Mask` made of a `mods.graph.Graph`.

What depends on a row, a column or a head alone is computed once for each of a thread's rows, columns or heads. Factors
that are the same for all elements are gathered: scale, softcap's 1 / cap and the factor inside exp2 are one product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .. import jit
from ..mods.graph import Graph, Node
from ..mods.record import ModSpec
from .constant import Constant
from .score import tanh_of
from .softmax import LOG2_E


class BlockTensors(NamedTuple):
    """The lists of one side of a block mask, as `mods.blocks.BlockLists` has them: counts (batch or 1, heads or 1,
    blocks) and lists, one axis more, int32."""

    counts: cute.Tensor
    lists: cute.Tensor
    full_counts: cute.Tensor
    full_lists: cute.Tensor


class ModTensors(NamedTuple):
    """What fills a call's graphs: captured tensors and numbers, the score's first; and the block mask's lists."""

    tensors: tuple
    numbers: tuple
    blocks: BlockTensors | None

    @staticmethod
    def of(given: tuple | None) -> ModTensors | None:
        """The record of a caller's plain tuple."""
        if given is None:
            return None
        tensors, numbers, blocks = given
        return ModTensors(tuple(tensors or ()), tuple(numbers or ()), None if blocks is None else BlockTensors(*blocks))

    @staticmethod
    def fake(mods: ModSpec | None) -> ModTensors | None:
        """Stand-ins for compilation."""
        if mods is None:
            return None
        graphs = [graph for graph in (mods.score, mods.mask) if graph is not None]
        tensors = tuple(_fake_captured(tensor.dtype, tensor.rank) for graph in graphs for tensor in graph.tensors)
        numbers = tuple(_KINDS[kind](0) for graph in graphs for kind in graph.numbers)
        lists = [jit.fake_tensor(Int32, rank, align=4) for rank in (3, 4, 3, 4)]
        return ModTensors(tensors or None, numbers or None, None if mods.block is None else BlockTensors(*lists))


_KINDS = {"float": Float32, "int": Int32, "bool": Boolean}
# How `mods.device.captured` hands tensors over: those of other dtypes are converted.
_STORED = {
    "float32": Float32, "float64": Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16,
    "int32": Int32, "int64": cutlass.Int64, "bool": cutlass.Uint8,
}  # fmt: skip


def _fake_captured(dtype: str, rank: int) -> cute.Tensor:
    stored = _STORED.get(dtype, Int32)
    return jit.fake_tensor(stored, max(rank, 1), contiguous=True, align=stored.width // 8)


def bind(
    mods: ModSpec | None,
    filled: ModTensors | None,
    batch: Int32,
    head: Int32,
    seqlens: tuple[Int32, Int32],
    packed: int,
) -> tuple[Traced | None, Traced | None]:
    """The score and the mask of a tile's sequence and head, or None; of `packed` heads in turn, `head` is the first."""
    if mods is None or filled is None:
        return None, None
    bound, tensors, numbers = [], filled.tensors, filled.numbers
    for graph in (mods.score, mods.mask):
        if graph is None:
            bound.append(None)
            continue
        own, tensors = tensors[: len(graph.tensors)], tensors[len(graph.tensors) :]
        given, numbers = numbers[: len(graph.numbers)], numbers[len(graph.numbers) :]
        bound.append(Traced(graph, own, given, batch, head, *seqlens, packed))
    return bound[0], bound[1]


@dataclass(frozen=True)
class Traced(Constant):
    """A graph with what fills it in a tile: query i is that of row i // packed, head + i % packed its head."""

    graph: Graph
    tensors: tuple
    numbers: tuple
    batch: Int32
    head: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    packed: int

    def on(self, own: cute.Tensor, first: cute.Tensor, row: Int32, column: Int32, scale: Float32 | None) -> Elements:
        """The graph on a thread's elements; own, first: as for `Band.hide`. row, column: the tile's first. scale: what
        raw scores are multiplied by first."""
        return Elements(self, own, first, row, column, scale)

    def apply(self, scores: cute.Tensor, at: Elements) -> None:
        """Turn raw scores (rows, columns) into logits."""
        for r in range(cute.size(scores, mode=[0])):
            for c in range(cute.size(scores, mode=[1])):
                at.begin(r, c, score=scores[r, c])
                scores[r, c] = at.value(self.graph.result)

    def hide(self, scores: cute.Tensor, at: Elements) -> None:
        """Set scores that the mask hides to -inf."""
        for r in range(cute.size(scores, mode=[0])):
            for c in range(cute.size(scores, mode=[1])):
                at.begin(r, c)
                scores[r, c] = cutlass.select_(at.value(self.graph.result), scores[r, c], -Float32.inf)

    def differentiate(self, scores: cute.Tensor, grads: cute.Tensor, at: Elements) -> None:
        """Turn raw scores into logits, and grads, those of the logits over P, into those of the scaled scores."""
        for r in range(cute.size(scores, mode=[0])):
            for c in range(cute.size(scores, mode=[1])):
                at.begin(r, c, score=scores[r, c], grad=grads[r, c])
                scores[r, c] = at.value(self.graph.result)
                grads[r, c] = at.value(self.graph.dscore)

    def is_harmless(self) -> bool:
        """Whether gradients are finite on whatever rows and keys that do not exist may hold."""
        return _HARMLESS.issuperset(self.graph.nodes[i].op for i in self.graph.needed(self.graph.dscore))


# Operators that give finite results on whatever a row or key that does not exist may hold.
_HARMLESS = frozenset(
    ("input", "const", "number", "add", "sub", "mul", "neg", "tanh", "sigmoid", "where", "min", "max", "abs",
     "to_float", "to_int", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "to_bool", "sin", "cos",
     "load")
)  # fmt: skip
_VARIES = {"score": {"row", "column", "element"}, "grad": {"row", "column", "element"}, "q_idx": {"row"},
           "kv_idx": {"column"}, "b": set()}  # fmt: skip


class Elements:
    """Values of a graph's nodes at a thread's elements, each computed where it first varies.

    A value may be kept as (x, factor): x * factor, with a factor that does not vary.
    """

    def __init__(
        self, of: Traced, own: cute.Tensor, first: cute.Tensor, row: Int32, column: Int32, scale: Float32 | None
    ) -> None:
        self.of, self.own, self.first, self.row, self.scale = of, own, first, row, scale
        self.column = column + own[0, 0][1]
        self._known: dict[tuple, Any] = {}
        self._element: dict[str, Any] = {}
        self._at = (0, 0)
        self._varies: list[frozenset] = []
        for node in of.graph.nodes:
            own_ = _VARIES.get(str(node.value), {"row"} if of.packed > 1 else set()) if node.op == "input" else set()
            self._varies.append(frozenset(own_).union(*(self._varies[i] for i in node.args)))

    def begin(self, r: int, c: int, **inputs: Any) -> None:
        """Go to an element; `inputs` are its score and grad."""
        self._at, self._element = (r, c), inputs
        self._known = {key: value for key, value in self._known.items() if "element" not in self._varies[key[0]]}

    def value(self, i: int) -> Any:
        x, factor = self._scaled(i)
        if factor is None:
            return x
        key = self._key(i, "whole")
        if key not in self._known:
            self._known[key] = x * factor
        return self._known[key]

    def _key(self, i: int, part: str) -> tuple:
        varies = self._varies[i]
        return i, part, self._at[0] if "row" in varies else None, self._at[1] if "column" in varies else None

    def _scaled(self, i: int) -> tuple[Any, Any]:
        for j in sorted(self.of.graph.needed(i)):  # in the order of their use: no deep recursion
            key = self._key(j, "scaled")
            if key not in self._known:
                self._known[key] = self._compute(j, self.of.graph.nodes[j])
        return self._known[self._key(i, "scaled")]

    def _known_scaled(self, i: int) -> tuple[Any, Any]:
        return self._known[self._key(i, "scaled")]

    def _compute(self, i: int, node: Node) -> tuple[Any, Any]:
        if node.op == "input":
            return self._input(str(node.value))
        if node.op == "const":
            return _KINDS[node.kind](node.value), None
        if node.op == "number":
            return self.of.numbers[node.value], None
        if node.op == "load":
            return self._load(node), None
        if node.op in ("mul", "div") and node.kind == "float":
            for x, y in ((0, 1), (1, 0)) if node.op == "mul" else ((0, 1),):
                if self._varies[node.args[x]] and not self._varies[node.args[y]]:
                    value, factor = self._known_scaled(node.args[x])
                    by = self.value(node.args[y])
                    by = Float32(1.0) / by if node.op == "div" else by
                    return value, by if factor is None else factor * by
        if node.op in _OF_SCALED:
            value, factor = self._known_scaled(node.args[0])
            return _OF_SCALED[node.op](value, factor), None
        args = [self.value(j) for j in node.args]
        kinds = [self.of.graph.nodes[j].kind for j in node.args]
        constants = [self.of.graph.nodes[j].value if self.of.graph.nodes[j].op == "const" else None for j in node.args]
        return _apply(node.op, kinds, args, constants), None

    def _input(self, name: str) -> tuple[Any, Any]:
        r, c = self._at
        of = self.of
        if name == "score":
            return self._element["score"], self.scale
        if name == "grad":
            return self._element["grad"], None
        if name == "b":
            return of.batch, None
        if name == "kv_idx":
            # The tile's last key may not exist, and is read for nothing; but read it is.
            key = self.column + (self.first[0, c][1] - self.first[0, 0][1])
            return (cutlass.min(key, of.seqlen_k - 1) if of.graph.loads() else key), None
        row = self.row + self.own[r, 0][0]
        if name == "h":
            return (of.head if of.packed == 1 else of.head + row % of.packed), None
        query = row // of.packed
        return (cutlass.min(query, of.seqlen_q - 1) if of.graph.loads() else query), None

    def _load(self, node: Node) -> Any:
        tensor, nodes = self.of.tensors[node.value], self.of.graph.nodes
        indices = []
        for axis, i in enumerate(node.args):
            index = self.value(i)
            if nodes[i].op not in ("input", "const"):  # counted from the end, as torch does
                index = Int32(cutlass.select_(index < 0, index + tensor.shape[axis], index))
            indices.append(index)
        x = tensor[tuple(indices) if len(indices) > 1 else indices[0] if indices else 0]
        return x != 0 if tensor.element_type is cutlass.Uint8 else _KINDS[node.kind](x)


def _by(x: Float32, factor: Float32 | None, constant: float) -> Float32:
    return x * (Float32(constant) if factor is None else factor * constant)


_OF_SCALED = {
    "tanh": lambda x, factor: tanh_of(_by(x, factor, 2.0 * LOG2_E)),
    "exp": lambda x, factor: cute.math.exp2(_by(x, factor, LOG2_E), fastmath=True),
    "exp2": lambda x, factor: cute.math.exp2(x if factor is None else x * factor, fastmath=True),
    "sigmoid": lambda x, factor: cute.arch.rcp_approx(1.0 + cute.math.exp2(_by(x, factor, -LOG2_E), fastmath=True)),
}


def _apply(op: str, kinds: list[str], args: list, constants: list) -> Any:
    a, b = args[0], args[1] if len(args) > 1 else None
    if op in _COMPARE:
        return Boolean(_COMPARE[op](a, b))
    if op == "where":
        return _KINDS[kinds[1]](cutlass.select_(a, b, args[2]))
    if op == "to_float":
        return Float32(cutlass.select_(a, Float32(1.0), Float32(0.0))) if kinds[0] == "bool" else Float32(a)
    if op == "to_int":
        return Int32(cutlass.select_(a, Int32(1), Int32(0))) if kinds[0] == "bool" else Int32(a)
    if op == "to_bool":
        return Boolean(a != 0)
    if op in ("floordiv", "mod"):
        power = constants[1] if constants[1] is not None and constants[1] & (constants[1] - 1) == 0 else 0
        if power > 0:
            return a >> int(math.log2(power)) if op == "floordiv" else a & (power - 1)
        # Towards minus infinity, as in Python, whichever way the compiler divides.
        quotient = a // b
        rest = a - quotient * b
        opposite = Boolean(rest != 0) & Boolean((rest ^ b) < 0)
        if op == "floordiv":
            return quotient - Int32(cutlass.select_(opposite, Int32(1), Int32(0)))
        return rest + Int32(cutlass.select_(opposite, b, Int32(0)))
    return _FLOATS[op](*args) if kinds[0] == "float" and op in _FLOATS else _ANY[op](*args)


_COMPARE = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
_ANY = {
    "neg": lambda a: -a, "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "abs": lambda a: cutlass.max(a, -a), "min": cutlass.min, "max": cutlass.max, "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b, "bitand": lambda a, b: a & b, "bitor": lambda a, b: a | b,
    "bitxor": lambda a, b: a ^ b, "and": lambda a, b: Boolean(a & b), "or": lambda a, b: Boolean(a | b),
    "xor": lambda a, b: Boolean(a ^ b), "not": lambda a: Boolean(a ^ Boolean(True)),
}  # fmt: skip
_FLOATS = {
    "abs": lambda a: cute.arch.fmax(a, -a), "min": cute.arch.fmin, "max": cute.arch.fmax, "div": lambda a, b: a / b,
    "log": lambda a: cute.math.log(a), "log2": lambda a: cute.math.log2(a), "sqrt": lambda a: cute.math.sqrt(a),
    "rsqrt": lambda a: cute.math.rsqrt(a), "sin": lambda a: cute.math.sin(a), "cos": lambda a: cute.math.cos(a),
    "erf": lambda a: cute.math.erf(a), "floor": lambda a: cute.math.floor(a), "ceil": lambda a: cute.math.ceil(a),
    "trunc": lambda a: Float32(Int32(a)), "pow": lambda a, b: cute.math.exp2(b * cute.math.log2(a)),
}  # fmt: skip
