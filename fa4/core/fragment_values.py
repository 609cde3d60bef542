"""Values of a graph at a thread's fragment, each computed as rarely as possible.

A value that depends only on the row (column) is computed once per row (column). A value that is affine in the column,
such as indices, their sums and differences, is its value at offset 0 plus a compile-time number. A mask of index
comparisons is thus a few words of mask bits per row, and one subtraction gives the bounds of the bits. Factors that are
equal for all elements are merged: scale, softcap's 1 / cap and the factor inside exp2 are one product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..mods.ir.graph import Node
from .arithmetic import KINDS, SCALED_OPS, apply
from .fragment_coords import FragmentCoords
from .mask_bits import apply_mask_unless, is_unmasked, low_bits

if TYPE_CHECKING:
    from .traced import Traced

_ORIGIN = -1  # the column at offset 0, for values that hold for a whole row
_ROW, _COL, _ELEMENT = "row", "column", "element"
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


class FragmentValues:
    """Values of the graph of `traced` at `coords`. scale: factor of the raw scores.

    A value may be stored as (x, factor), which stands for x * factor. The factor is the same for all elements.
    """

    def __init__(self, traced: Traced, coords: FragmentCoords, scale: Float32 | None = None) -> None:
        self.traced, self.coords, self.scale = traced, coords, scale
        self.nodes = traced.graph.nodes
        self._cache: dict[tuple, Any] = {}
        self._inputs: dict[tuple, Any] = {}  # scores and their gradients
        self._pos = (0, _ORIGIN)
        self._clamped = False
        self._mask_words: list[list[Int32]] | None = None  # of each row, after `precompute_mask`
        query, key = (_ROW, _COL) if coords.cols_are_keys else (_COL, _ROW)
        inputs = {"q_idx": {query}, "kv_idx": {key}, "h": {query} if traced.rows_per_query > 1 else set(), "b": set()}
        all_tags = {_ROW, _COL, _ELEMENT}
        self._varies: list[frozenset] = []
        self._affine: list[bool] = []
        for node in self.nodes:
            varies = inputs.get(str(node.value), all_tags) if node.op == "input" else set()
            self._varies.append(frozenset(varies).union(*(self._varies[i] for i in node.args)))
            self._affine.append(self._is_affine(node))

    def prefetch_loads(self) -> None:
        """Start early the loads that do not depend on scores or on both row and column, to hide their latency."""
        for i, node in enumerate(self.nodes):
            varies = self._varies[i]
            if node.op != "load" or varies >= {_ROW, _COL}:
                continue
            for r in range(len(self.coords.rows)) if _ROW in varies else (0,):
                for c in range(self.coords.count) if _COL in varies else (0,):
                    self._pos = r, c
                    self.value(i)

    def precompute_mask(self) -> None:
        """Compute a whole mask as words before the scores exist. The words need fewer registers than the loaded values,
        but one more instruction per element."""
        self._mask_words = []
        for r in range(len(self.coords.rows)):
            words = self._and_words([i for i in self._conjuncts(self.traced.graph.result) if self._is_bitwise(i)], r)
            self._mask_words.append(words)
        for i in self._conjuncts(self.traced.graph.result):
            if self._is_bitwise(i):
                continue
            for r, words in enumerate(self._mask_words):
                bits = [Int32(0) for _ in words]
                for c in range(self.coords.count):
                    self._pos = r, c
                    bit = 1 << c % 32 if c % 32 < 31 else -(1 << 31)
                    bits[c // 32] = bits[c // 32] | Int32(cutlass.select_(self.value(i), Int32(bit), Int32(0)))
                words[:] = [a & b for a, b in zip(words, bits)]

    def logits(self, scores: list[list[Float32]]) -> list[list[Float32]]:
        """Return the logits of raw scores."""
        self._set_inputs("score", scores)
        return self._all_values(self.traced.graph.result)

    def score_grads(self, grads: list[list[Float32]]) -> list[list[Float32]]:
        """Return the gradients of the scaled scores from those of the logits. Call after `logits`."""
        self._set_inputs("grad", grads)
        assert self.traced.graph.dscore is not None
        return self._all_values(self.traced.graph.dscore)

    def apply_mask(self, scores: list[list[Float32]]) -> list[list[Float32]]:
        """Return the scores, -inf where the mask is false."""
        bitwise: list[int] = []
        per_element: list[int] = []
        for i in self._conjuncts(self.traced.graph.result):
            (bitwise if self._is_bitwise(i) else per_element).append(i)
        words = self._mask_words
        if words is not None:
            per_element = []
        elif bitwise:
            words = [self._and_words(bitwise, r) for r in range(len(scores))]
        masked: list[list[Float32]] = [[] for _ in scores]
        for c in range(self.coords.count):
            for r, row in enumerate(scores):
                if not per_element:
                    assert words is not None
                    masked[r].append(apply_mask_unless(words[r][c // 32], c % 32, row[c]))
                    continue
                self._pos = r, c
                keep = self.value(per_element[0])
                for i in per_element[1:]:
                    keep = keep & self.value(i)
                if words is not None:
                    keep = keep & is_unmasked(words[r][c // 32], c % 32)
                masked[r].append(Float32(cutlass.select_(keep, row[c], -Float32.inf)))
        return masked

    def value_at(self, i: int, r: int, c: int) -> Any:
        """Value of node i at row r and column c."""
        self._pos = r, c
        return self.value(i)

    def index_varies(self, nodes: tuple[int, ...]) -> tuple[bool, bool]:
        """Whether any of these nodes varies by row, and by column."""
        varies = frozenset[str]().union(*(self._varies[i] for i in nodes))
        return _ROW in varies, _COL in varies

    def indices_at(self, nodes: tuple[int, ...], tensor: cute.Tensor, r: int, c: int) -> tuple:
        """Indices into a captured tensor from these nodes; valid but arbitrary for rows and keys that do not exist."""
        before, self._clamped, self._pos = self._clamped, True, (r, c)
        indices = []
        for axis, i in enumerate(nodes):
            index = self.value(i)
            if self.nodes[i].op not in ("input", "const"):  # negative indices count from the end, as in torch
                index = Int32(cutlass.select_(index < 0, index + tensor.shape[axis], index))
            indices.append(index)
        self._clamped = before
        return tuple(indices)

    def value(self, i: int) -> Any:
        x, factor = self._scaled(i)
        if factor is None:
            return x
        key = self._key(i, "whole")
        if key not in self._cache:
            self._cache[key] = x * factor
        return self._cache[key]

    def _set_inputs(self, name: str, rows: list[list[Float32]]) -> None:
        self._inputs |= {(name, r, c): x for r, row in enumerate(rows) for c, x in enumerate(row)}

    def _all_values(self, i: int) -> list[list[Float32]]:
        rows: list[list[Float32]] = [[] for _ in self.coords.rows]
        for c in range(self.coords.count):
            for r, row in enumerate(rows):
                self._pos = r, c
                row.append(self.value(i))
        return rows

    def _key(self, i: int, part: str) -> tuple:
        (r, c), varies = self._pos, self._varies[i]
        return i, part, self._clamped, r if _ROW in varies else None, c if _COL in varies else None

    def _scaled(self, i: int) -> tuple[Any, Any]:
        for j in self._needed(i):  # in order of use, to avoid deep recursion
            key = self._key(j, "scaled")
            if key not in self._cache:
                self._cache[key] = self._compute(j, self.nodes[j])
        return self._cache[self._key(i, "scaled")]

    def _needed(self, i: int) -> list[int]:
        """Node i and the nodes it depends on at this position, in ascending order."""
        found: set[int] = set()
        pending = [i]
        while pending:
            j = pending.pop()
            if j not in found:
                found.add(j)
                if self.nodes[j].op != "load" and not self._uses_slope(j):
                    pending += self.nodes[j].args
        return sorted(found)

    def _compute(self, i: int, node: Node) -> tuple[Any, Any]:
        if self._uses_slope(i):
            return self._affine_value(i), None
        if node.op == "input":
            return self._input(str(node.value))
        if node.op == "const":
            return KINDS[node.kind](node.value), None
        if node.op == "number":
            return self.traced.numbers[int(node.value)], None
        if node.op == "load":
            return self._load(node), None
        scaled_args = [self._cache[self._key(j, "scaled")] for j in node.args]
        if node.op in ("mul", "div") and node.kind == "float":
            for x, y in ((0, 1), (1, 0)) if node.op == "mul" else ((0, 1),):
                if self._varies[node.args[x]] and not self._varies[node.args[y]]:
                    value, factor = scaled_args[x]
                    by = self.value(node.args[y])
                    by = Float32(1.0) / by if node.op == "div" else by
                    return value, by if factor is None else factor * by
        if node.op in SCALED_OPS:
            return SCALED_OPS[node.op](*scaled_args[0]), None
        args = [self.value(j) for j in node.args]
        kinds = [self.nodes[j].kind for j in node.args]
        constants = [self.nodes[j].value if self.nodes[j].op == "const" else None for j in node.args]
        return apply(node.op, kinds, args, constants), None

    def _input(self, name: str) -> tuple[Any, Any]:
        (r, c), traced, coords = self._pos, self.traced, self.coords
        if name in ("score", "grad"):
            return self._inputs[name, r, c], self.scale if name == "score" else None
        if name == "b":
            return traced.batch, None
        col = coords.first if c == _ORIGIN else coords.first + coords.offsets[c]
        row, key = (coords.rows[r], col) if coords.cols_are_keys else (col, coords.rows[r])
        if name == "kv_idx":
            # The tile's last key may not exist; its load is unused but must be valid.
            return (cutlass.min(key, traced.seqlen_k - 1) if self._clamped else key), None
        if name == "h":
            return traced.head_of(row), None
        query = row if traced.rows_per_query == 1 else row // traced.rows_per_query
        return (cutlass.min(query, traced.seqlen_q - 1) if self._clamped else query), None

    def _load(self, node: Node) -> Any:
        tensor = self.traced.tensors[int(node.value)]
        indices = self.indices_at(node.args, tensor, *self._pos)
        x = tensor[indices if len(indices) > 1 else indices[0] if indices else 0]
        return x != 0 if tensor.element_type is cutlass.Uint8 else KINDS[node.kind](x)

    # Values that are affine in the column.

    def _is_affine(self, node: Node) -> bool:
        """Whether a value is exactly its value at offset 0 plus a compile-time multiple of the offset. Floats only
        if integer: other multiples of a distance would lose precision near 0, as a difference of large numbers."""
        if node.op == "input":
            name = "kv_idx" if self.coords.cols_are_keys else "q_idx"
            return node.value == name and (self.coords.cols_are_keys or self.traced.rows_per_query == 1)
        affine = [self._affine[i] for i in node.args]
        col_invariant = [not self._varies[i] & {_COL, _ELEMENT} for i in node.args]
        if node.op == "to_float":
            return affine[0]
        if node.kind != "int":
            return False
        if node.op in ("add", "sub", "neg"):
            return any(affine) and all(e or fixed for e, fixed in zip(affine, col_invariant))
        return (
            node.op == "mul"
            and sorted(affine) == [False, True]
            and self.nodes[node.args[affine.index(False)]].op == "const"
        )

    def _uses_slope(self, i: int) -> bool:
        """Whether to compute node i from its value at the origin; not for clamped indices."""
        return self._affine[i] and self._pos[1] != _ORIGIN and not self._clamped

    def _value_at_origin(self, i: int) -> Any:
        pos, self._pos = self._pos, (self._pos[0], _ORIGIN)
        value = self.value(i)
        self._pos = pos
        return value

    def _affine_value(self, i: int) -> Any:
        offset = self.coords.offsets[self._pos[1]]
        base = self._value_at_origin(i)
        return base if offset == 0 else base + self._slope(i) * offset

    def _slope(self, i: int) -> int | float:
        """Increment of node i per unit of column offset."""
        node = self.nodes[i]
        if node.op == "input":
            return 1
        increments = [self._slope(j) if self._affine[j] else 0 for j in node.args]
        if node.op == "neg":
            return -increments[0]
        if node.op in ("add", "sub"):
            return increments[0] + increments[1] if node.op == "add" else increments[0] - increments[1]
        if node.op == "to_float":
            return float(increments[0])
        affine = 0 if self._affine[node.args[0]] else 1
        return increments[affine] * int(self.nodes[node.args[1 - affine]].value)

    # Masks as words: bit c % 32 of word c // 32 belongs to column c of a row.

    def _conjuncts(self, i: int) -> list[int]:
        node = self.nodes[i]
        if node.op != "and" or self._is_bitwise(i):
            return [i]
        return [j for arg in node.args for j in self._conjuncts(arg)]

    def _is_bitwise(self, i: int) -> bool:
        """Whether a bool is computed 32 columns at a time as mask bits: comparisons of operands that are affine in the
        column, with slopes that differ by one, and values that do not vary by column."""
        node, varies = self.nodes[i], self._varies[i]
        if _COL not in varies:
            return True
        if node.op in ("and", "or", "xor", "not"):
            return all(self._is_bitwise(j) for j in node.args)
        if node.op not in _COMPARISONS or self.nodes[node.args[0]].kind != "int":
            return False
        if not all(self._affine[j] or _COL not in self._varies[j] for j in node.args):
            return False
        return abs(self._slope_difference(node)) == 1

    def _slope_difference(self, node: Node) -> int | float:
        """Slope of the left operand of a comparison minus that of the right one."""
        a, b = (self._slope(j) if self._affine[j] else 0 for j in node.args)
        return a - b

    def _and_words(self, nodes: list[int], r: int) -> list[Int32]:
        self._pos = r, _ORIGIN
        words = [Int32(-1) for _ in range(0, self.coords.count, 32)]
        for i in nodes:
            words = [a & b for a, b in zip(words, self._words_of(i))]
        return words

    def _words_of(self, i: int) -> list[Int32]:
        """Mask words of a node that `_is_bitwise`, for the current row."""
        node, starts = self.nodes[i], range(0, self.coords.count, 32)
        if _COL not in self._varies[i]:
            return [Int32(cutlass.select_(self.value(i), Int32(-1), Int32(0)))] * len(starts)
        if node.op == "not":
            return [~word for word in self._words_of(node.args[0])]
        if node.op in ("and", "or", "xor"):
            a, b = (self._words_of(j) for j in node.args)
            combine = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y}[node.op]
            return [combine(x, y) for x, y in zip(a, b)]
        op, (a, b) = node.op, (self._value_at_origin(j) for j in node.args)
        if self._slope_difference(node) < 0:
            op, a, b = _SWAPPED[op], b, a
        equal = cutlass.min(_difference(b, a), 1 << 30)  # offset at which both are equal
        less = [low_bits(self.coords.below(equal) - start) for start in starts]
        if op in ("lt", "ge"):
            return less if op == "lt" else [~word for word in less]
        not_more = [low_bits(self.coords.below(equal + 1) - start) for start in starts]
        if op in ("le", "gt"):
            return not_more if op == "le" else [~word for word in not_more]
        same = [a & ~b for a, b in zip(not_more, less)]
        return same if op == "eq" else [~word for word in same]


def _difference(a: Int32, b: Int32) -> Int32:
    """Return a - b, saturated to int32: callers may pass huge numbers."""
    return cute.arch.inline_ptx(
        "sub.sat.s32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(a), Int32(b)]
    )
