"""A graph's values at a thread's elements, each computed as seldom as it changes.

What depends on a line alone is computed once for each line, what depends on the place across alone once for each. What
grows evenly across, as indices, their sums and differences do, is its value at the first place plus a compile-time
number. So a mask of comparisons of indices is a few words of bits for each line, whose
ends follow from one subtraction. Factors that are the same for all elements are gathered: scale, softcap's 1 / cap and
the factor inside exp2 are one product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..mods.graph import Node
from .arithmetic import KINDS, OF_SCALED, apply
from .fragment_coords import FragmentCoords
from .mask_bits import apply_mask_unless, is_unmasked, low_bits

if TYPE_CHECKING:
    from .traced import Traced

_ORIGIN = -1  # the place across at offset 0, for what is known of the whole line
_LINE, _ACROSS, _ELEMENT = "line", "across", "element"
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


class FragmentValues:
    """Values of the graph of `of` at `places`. scale: what raw scores are multiplied by first.

    A value may be kept as (x, factor): x * factor, with a factor that does not vary.
    """

    def __init__(self, of: Traced, places: FragmentCoords, scale: Float32 | None = None) -> None:
        self.of, self.places, self.scale = of, places, scale
        self.nodes = of.graph.nodes
        self._known: dict[tuple, Any] = {}
        self._given: dict[tuple, Any] = {}  # scores and their gradients
        self._at = (0, _ORIGIN)
        self._clamped = False
        self._seen: list[list[Int32]] | None = None  # of a mask, once it was asked ahead: words of each line
        query, key = (_LINE, _ACROSS) if places.keys_across else (_ACROSS, _LINE)
        inputs = {"q_idx": {query}, "kv_idx": {key}, "h": {query} if of.rows_per_query > 1 else set(), "b": set()}
        everything = {_LINE, _ACROSS, _ELEMENT}
        self._varies: list[frozenset] = []
        self._even: list[bool] = []
        for node in self.nodes:
            own = inputs.get(str(node.value), everything) if node.op == "input" else set()
            self._varies.append(frozenset(own).union(*(self._varies[i] for i in node.args)))
            self._even.append(self._grows_evenly(node))

    def ask_ahead(self) -> None:
        """Load what does not depend on scores and is not another number for each element: it may take its time."""
        for i, node in enumerate(self.nodes):
            varies = self._varies[i]
            if node.op != "load" or varies >= {_LINE, _ACROSS}:
                continue
            for r in range(len(self.places.lines)) if _LINE in varies else (0,):
                for c in range(self.places.count) if _ACROSS in varies else (0,):
                    self._at = r, c
                    self.value(i)

    def see_ahead(self) -> None:
        """All of a mask, as words: they take fewer registers until the scores are there than what was loaded for it,
        and an instruction more for each element."""
        self._seen = []
        for r in range(len(self.places.lines)):
            words = self._all_of([i for i in self._conjuncts(self.of.graph.result) if self._is_wordy(i)], r)
            self._seen.append(words)
        for i in self._conjuncts(self.of.graph.result):
            if self._is_wordy(i):
                continue
            for r, words in enumerate(self._seen):
                made = [Int32(0) for _ in words]
                for c in range(self.places.count):
                    self._at = r, c
                    bit = 1 << c % 32 if c % 32 < 31 else -(1 << 31)
                    made[c // 32] = made[c // 32] | Int32(cutlass.select_(self.value(i), Int32(bit), Int32(0)))
                words[:] = [a & b for a, b in zip(words, made)]

    def logits(self, scores: list[list[Float32]]) -> list[list[Float32]]:
        """Of raw scores."""
        self._give("score", scores)
        return self._everywhere(self.of.graph.result)

    def slopes(self, grads: list[list[Float32]]) -> list[list[Float32]]:
        """Gradients of the scaled scores from those of the logits; after `logits`."""
        self._give("grad", grads)
        assert self.of.graph.dscore is not None
        return self._everywhere(self.of.graph.dscore)

    def hidden(self, scores: list[list[Float32]]) -> list[list[Float32]]:
        """Scores, -inf where a mask hides the pair."""
        by_word, by_element = [], []
        for i in self._conjuncts(self.of.graph.result):
            (by_word if self._is_wordy(i) else by_element).append(i)
        words = self._seen
        if words is not None:
            by_element = []
        elif by_word:
            words = [self._all_of(by_word, r) for r in range(len(scores))]
        hidden: list[list[Float32]] = [[] for _ in scores]
        for c in range(self.places.count):
            for r, line in enumerate(scores):
                if not by_element:
                    assert words is not None
                    hidden[r].append(apply_mask_unless(words[r][c // 32], c % 32, line[c]))
                    continue
                self._at = r, c
                keep = self.value(by_element[0])
                for i in by_element[1:]:
                    keep = keep & self.value(i)
                if words is not None:
                    keep = keep & is_unmasked(words[r][c // 32], c % 32)
                hidden[r].append(Float32(cutlass.select_(keep, line[c], -Float32.inf)))
        return hidden

    def value_at(self, i: int, r: int, c: int) -> Any:
        """Of a node, at line r and place c across."""
        self._at = r, c
        return self.value(i)

    def index_varies(self, nodes: tuple[int, ...]) -> tuple[bool, bool]:
        """Whether any of these nodes is another number along lines, and along the places across."""
        varies = frozenset[str]().union(*(self._varies[i] for i in nodes))
        return _LINE in varies, _ACROSS in varies

    def indices_at(self, nodes: tuple[int, ...], tensor: cute.Tensor, r: int, c: int) -> tuple:
        """Where these nodes point in a captured tensor; of rows and keys that do not exist, somewhere in it."""
        before, self._clamped, self._at = self._clamped, True, (r, c)
        indices = []
        for axis, i in enumerate(nodes):
            index = self.value(i)
            if self.nodes[i].op not in ("input", "const"):  # counted from the end, as torch does
                index = Int32(cutlass.select_(index < 0, index + tensor.shape[axis], index))
            indices.append(index)
        self._clamped = before
        return tuple(indices)

    def value(self, i: int) -> Any:
        x, factor = self._scaled(i)
        if factor is None:
            return x
        key = self._key(i, "whole")
        if key not in self._known:
            self._known[key] = x * factor
        return self._known[key]

    def _give(self, name: str, lines: list[list[Float32]]) -> None:
        self._given |= {(name, r, c): x for r, line in enumerate(lines) for c, x in enumerate(line)}

    def _everywhere(self, i: int) -> list[list[Float32]]:
        lines: list[list[Float32]] = [[] for _ in self.places.lines]
        for c in range(self.places.count):
            for r, line in enumerate(lines):
                self._at = r, c
                line.append(self.value(i))
        return lines

    def _key(self, i: int, part: str) -> tuple:
        (r, c), varies = self._at, self._varies[i]
        return i, part, self._clamped, r if _LINE in varies else None, c if _ACROSS in varies else None

    def _scaled(self, i: int) -> tuple[Any, Any]:
        for j in self._needed(i):  # in the order of their use: no deep recursion
            key = self._key(j, "scaled")
            if key not in self._known:
                self._known[key] = self._compute(j, self.nodes[j])
        return self._known[self._key(i, "scaled")]

    def _needed(self, i: int) -> list[int]:
        """What must be known at this place before node i is, and itself."""
        found: set[int] = set()
        left = [i]
        while left:
            j = left.pop()
            if j not in found:
                found.add(j)
                if self.nodes[j].op != "load" and not self._steps(j):
                    left += self.nodes[j].args
        return sorted(found)

    def _compute(self, i: int, node: Node) -> tuple[Any, Any]:
        if self._steps(i):
            return self._along(i), None
        if node.op == "input":
            return self._input(str(node.value))
        if node.op == "const":
            return KINDS[node.kind](node.value), None
        if node.op == "number":
            return self.of.numbers[node.value], None
        if node.op == "load":
            return self._load(node), None
        known = [self._known[self._key(j, "scaled")] for j in node.args]
        if node.op in ("mul", "div") and node.kind == "float":
            for x, y in ((0, 1), (1, 0)) if node.op == "mul" else ((0, 1),):
                if self._varies[node.args[x]] and not self._varies[node.args[y]]:
                    value, factor = known[x]
                    by = self.value(node.args[y])
                    by = Float32(1.0) / by if node.op == "div" else by
                    return value, by if factor is None else factor * by
        if node.op in OF_SCALED:
            return OF_SCALED[node.op](*known[0]), None
        args = [self.value(j) for j in node.args]
        kinds = [self.nodes[j].kind for j in node.args]
        constants = [self.nodes[j].value if self.nodes[j].op == "const" else None for j in node.args]
        return apply(node.op, kinds, args, constants), None

    def _input(self, name: str) -> tuple[Any, Any]:
        (r, c), of, places = self._at, self.of, self.places
        if name in ("score", "grad"):
            return self._given[name, r, c], self.scale if name == "score" else None
        if name == "b":
            return of.batch, None
        across = places.first if c == _ORIGIN else places.first + places.offsets[c]
        row, key = (places.lines[r], across) if places.keys_across else (across, places.lines[r])
        if name == "kv_idx":
            # The tile's last key may not exist, and is read for nothing; but read it is.
            return (cutlass.min(key, of.seqlen_k - 1) if self._clamped else key), None
        if name == "h":
            return of.head_of(row), None
        query = row if of.rows_per_query == 1 else row // of.rows_per_query
        return (cutlass.min(query, of.seqlen_q - 1) if self._clamped else query), None

    def _load(self, node: Node) -> Any:
        tensor = self.of.tensors[node.value]
        indices = self.indices_at(node.args, tensor, *self._at)
        x = tensor[indices if len(indices) > 1 else indices[0] if indices else 0]
        return x != 0 if tensor.element_type is cutlass.Uint8 else KINDS[node.kind](x)

    # What grows evenly across.

    def _grows_evenly(self, node: Node) -> bool:
        """Whether a value is that at offset 0 plus a compile-time multiple of the offset, exactly: of floats those that
        are integers. (A float that is a multiple of the distance would be near 0 as the difference of large ones.)"""
        if node.op == "input":
            name = "kv_idx" if self.places.keys_across else "q_idx"
            return node.value == name and (self.places.keys_across or self.of.rows_per_query == 1)
        even = [self._even[i] for i in node.args]
        held = [not self._varies[i] & {_ACROSS, _ELEMENT} for i in node.args]
        if node.op == "to_float":
            return even[0]
        if node.kind != "int":
            return False
        if node.op in ("add", "sub", "neg"):
            return any(even) and all(e or h for e, h in zip(even, held))
        return (
            node.op == "mul"
            and sorted(even) == [False, True]
            and self.nodes[node.args[even.index(False)]].op == "const"
        )

    def _steps(self, i: int) -> bool:
        """Whether it is computed so here. Of places that are clamped it is not."""
        return self._even[i] and self._at[1] != _ORIGIN and not self._clamped

    def _at_origin(self, i: int) -> Any:
        at, self._at = self._at, (self._at[0], _ORIGIN)
        value = self.value(i)
        self._at = at
        return value

    def _along(self, i: int) -> Any:
        offset = self.places.offsets[self._at[1]]
        base = self._at_origin(i)
        return base if offset == 0 else base + self._slope(i) * offset

    def _slope(self, i: int) -> int | float:
        """What one step across adds."""
        node = self.nodes[i]
        if node.op == "input":
            return 1
        slopes = [self._slope(j) if self._even[j] else 0 for j in node.args]
        if node.op == "neg":
            return -slopes[0]
        if node.op in ("add", "sub"):
            return slopes[0] + slopes[1] if node.op == "add" else slopes[0] - slopes[1]
        if node.op == "to_float":
            return float(slopes[0])
        even = 0 if self._even[node.args[0]] else 1
        return slopes[even] * self.nodes[node.args[1 - even]].value

    # Masks by words: bit c % 32 of word c // 32 is that of element c of a line.

    def _conjuncts(self, i: int) -> list[int]:
        node = self.nodes[i]
        if node.op != "and" or self._is_wordy(i):
            return [i]
        return [j for arg in node.args for j in self._conjuncts(arg)]

    def _is_wordy(self, i: int) -> bool:
        """Whether a bool is made by words: of comparisons of what grows by one across with what does not, or of such
        with each other; and of what does not vary across."""
        node, varies = self.nodes[i], self._varies[i]
        if _ELEMENT in varies:
            return False
        if _ACROSS not in varies:
            return True
        if node.op in ("and", "or", "xor", "not"):
            return all(self._is_wordy(j) for j in node.args)
        if node.op not in _COMPARISONS or self.nodes[node.args[0]].kind != "int":
            return False
        if not all(self._even[j] or _ACROSS not in self._varies[j] for j in node.args):
            return False
        return abs(self._steepness(node)) == 1

    def _steepness(self, node: Node) -> int:
        """How the difference of what is compared grows across."""
        a, b = (self._slope(j) if self._even[j] else 0 for j in node.args)
        return a - b

    def _all_of(self, nodes: list[int], r: int) -> list[Int32]:
        self._at = r, _ORIGIN
        words = [Int32(-1) for _ in range(0, self.places.count, 32)]
        for i in nodes:
            words = [a & b for a, b in zip(words, self._words(i))]
        return words

    def _words(self, i: int) -> list[Int32]:
        """Of a node that `_is_wordy`, for the line of the present place."""
        node, starts = self.nodes[i], range(0, self.places.count, 32)
        if _ACROSS not in self._varies[i]:
            return [Int32(cutlass.select_(self.value(i), Int32(-1), Int32(0)))] * len(starts)
        if node.op == "not":
            return [~word for word in self._words(node.args[0])]
        if node.op in ("and", "or", "xor"):
            a, b = (self._words(j) for j in node.args)
            combine = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y}[node.op]
            return [combine(x, y) for x, y in zip(a, b)]
        op, (a, b) = node.op, (self._at_origin(j) for j in node.args)
        if self._steepness(node) < 0:
            op, a, b = _MIRRORED[op], b, a
        equal = cutlass.min(_difference(b, a), 1 << 30)  # the offset at which both are equal
        less = [low_bits(self.places.below(equal) - start) for start in starts]
        if op in ("lt", "ge"):
            return less if op == "lt" else [~word for word in less]
        not_more = [low_bits(self.places.below(equal + 1) - start) for start in starts]
        if op in ("le", "gt"):
            return not_more if op == "le" else [~word for word in not_more]
        same = [a & ~b for a, b in zip(not_more, less)]
        return same if op == "eq" else [~word for word in same]


def _difference(a: Int32, b: Int32) -> Int32:
    """a - b, or the outermost number beyond which it would lie: numbers of callers may be huge."""
    return cute.arch.inline_ptx(
        "sub.sat.s32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(a), Int32(b)]
    )
