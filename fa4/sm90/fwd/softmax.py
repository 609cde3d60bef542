"""Online softmax of a team's rows, two to a thread, a row's columns split over four threads; in base 2."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...core.constant import Constant
from ...core.dropout import Dropout, dropped
from ...core.fragment_coords import FragmentCoords
from ...core.fragment_values import FragmentValues
from ...core.mask_bits import apply_mask
from ...core.score import Softcap
from ...core.traced import bind
from ...core.vec_io import pack_half
from ...fwd.rows import is_written, normalise, place_of, query_of, result
from ...fwd.scales import Scales
from ..fragment import (
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    across_row,
    first_column,
    own_columns,
    row_elements,
    row_in_warp,
)

CHAINS = 4  # of the row's maximum and sum: independent ones, to hide the latency of each


@dataclass(frozen=True)
class At(Constant):
    """A key block, and a thread's elements of it as a score_mod and a mask_mod see them."""

    block: Int32
    score: FragmentValues | None
    mask: FragmentValues | None
    kept: list[list[Int32]] | None  # of each row, see `core.dropout.Dropout.by_quads`


class Softmax(Constant):
    """The state of a thread's rows, in registers.

    reference: what is subtracted in the exponent: a maximum of the row so far in log2 units, or something within
    `rescale_threshold` below it; -inf before the row has seen a key. total: this thread's part of the sum of P at that
    reference. top: of this thread's scores of the row so far. factor: what the last change of the reference multiplies
    O by. first, stop: the row sees keys first <= key < stop.
    """

    def __init__(self, context):
        self.context = context
        self.reference, self.total, self.row_max, self.factor = (
            cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(4)
        )
        self.first, self.stop = (cute.make_rmem_tensor(ROWS_PER_THREAD, Int32) for _ in range(2))
        self.score_mod, self.mask_mod, self.dropout, self.lines, self.scales = None, None, None, (), None

    def reset(self, work, first_row: Int32) -> None:
        """Before a work tile; first_row: of this warp, in the sequence."""
        self.reference.fill(-Float32.inf)
        self.total.fill(0.0)
        self.row_max.fill(-Float32.inf)
        for r in range(ROWS_PER_THREAD):
            query = query_of(self.context.cfg, first_row + row_in_warp(r))
            self.first[r], self.stop[r] = work.mask.keys(query)
        cfg, args = self.context.cfg, self.context.args
        self.scales = Scales.of(self.context, work)
        if cfg.mods is not None:
            lengths, head = (work.q.count, work.k.count), work.head * cfg.packed
            self.score_mod, self.mask_mod = bind(
                cfg.mods, args.mods, work.batch, head, lengths, cfg.packed, rows_per_query=cfg.slots
            )
            self.dropout = Dropout.of(cfg.mods, args.mods, work.batch, head, cfg.packed, cfg.slots)
            self.lines = tuple(first_row + row_in_warp(r) for r in range(ROWS_PER_THREAD))

    def at(self, s: cute.Tensor, block: Int32) -> At:
        """Where S of a key block is, and what of traced functions may be known before S is."""
        cfg = self.context.cfg
        places = FragmentCoords(self.lines, block * cfg.tile_n + first_column(), cute.size(s) // ROWS_PER_THREAD)
        score = None if self.score_mod is None else self.score_mod.at(places, self.scales.over_cap)
        mask = None if self.mask_mod is None else self.mask_mod.at(places)
        for elements in (score, mask):
            if elements is not None:
                elements.ask_ahead()
        kept = None
        if self.dropout is not None:
            kept = self.dropout.by_quads(list(self.lines), block * cfg.tile_n, 2 * cute.size(s))
        return At(block, score, mask, kept)

    def softmax_step(self, s: cute.Tensor, at: At, is_masked: bool) -> Boolean:
        """S -> P in place, for one key block; returns whether O must be multiplied by `factor`, row by row: the same
        for all rows of a warp."""
        cfg, scale = self.context.cfg, self.scales.log2
        rows = self.visible(s, at, is_masked)
        row_maxes = [in_chains(x, cute.arch.fmax) for x in rows]
        # Not so while a row has seen no key: -inf - -inf.
        grows = [row_max * scale - self.reference[r] > cfg.rescale_threshold for r, row_max in enumerate(row_maxes)]
        has_grown = cute.arch.vote_any_sync(grows[0] | grows[1])
        follow(self, row_maxes, has_grown)
        for r, x in enumerate(rows):
            reference = self.reference[r]
            if is_masked or cfg.mods is not None:
                reference = Float32(cutlass.select_(reference == -Float32.inf, Float32(0.0), reference))
            weights = [cute.math.exp2(value * scale - reference, fastmath=True) for value in x]
            for c, (i, weight) in enumerate(zip(row_elements(2 * cute.size(s), r), weights)):
                s[i] = weight if at.kept is None else dropped(at.kept[r], c // 2 * 8 + c % 2, weight)
            # The block's sum first: adding each weight to the running total would round it hundreds of times.
            self.total[r] = self.total[r] + in_chains(weights, lambda a, b: a + b)
            self.row_max[r] = cute.arch.fmax(self.row_max[r], row_maxes[r])
        return has_grown

    def visible(self, s: cute.Tensor, at: At, is_masked: bool) -> list[list[Float32]]:
        """Each row's scores, or logits by a score_mod; -inf where the row does not see the key."""
        cfg = self.context.cfg
        places = [row_elements(2 * cute.size(s), r) for r in range(ROWS_PER_THREAD)]
        if cfg.has_softcap:
            Softcap(self.scales.over_cap).apply(s)
        rows = [[s[i] for i in row] for row in places]
        if at.score is not None:
            rows = at.score.logits(rows)
        if at.mask is not None and (is_masked or not cfg.has_blocks):
            rows = at.mask.hidden(rows)
        begin = at.block * cfg.tile_n
        if cfg.has_blocks:
            for row, elements in zip(rows, places):
                for i, x in zip(elements, row):
                    s[i] = x
            mask_end(s, begin, self.stop, cfg.tile_n)  # a list may call a block whole in which keys end
            return [[s[i] for i in row] for row in places]
        if not is_masked:
            return rows
        firsts = [own_columns(self.first[r] - begin) if cfg.has_left else None for r in range(ROWS_PER_THREAD)]
        return [apply_mask(x, firsts[r], own_columns(self.stop[r] - begin)) for r, x in enumerate(rows)]

    def finish(self, work, first_row: Int32) -> list[Float32]:
        """Write each row's log-sum-exp; returns the factors that normalise O, 0 for a row that saw no key or holds no
        data."""
        norms = []
        for r in range(ROWS_PER_THREAD):
            row = first_row + row_in_warp(r)
            total = across_row(self.total[r], lambda a, b: a + b)
            row_max = across_row(self.row_max[r], cute.arch.fmax)
            largest = cute.math.exp2(row_max * self.scales.log2 - self.reference[r], fastmath=True)
            query = query_of(self.context.cfg, row)
            norm, lse = normalise(self.context, work, row, query, self.reference[r], total, largest)
            write_lse(self.context, work, row, lse)
            factors = (None if self.dropout is None else self.dropout.scale, self.scales.of_v)
            norms.append(functools.reduce(lambda a, b: a if b is None else a * b, factors, norm))
        return norms

    def finish_empty(self, work, first_row: Int32) -> None:
        """The same for rows that see no key."""
        for r in range(ROWS_PER_THREAD):
            row = first_row + row_in_warp(r)
            query = query_of(self.context.cfg, row)
            _, lse = normalise(self.context, work, row, query, -Float32.inf, Float32(0.0), Float32(0.0))
            write_lse(self.context, work, row, lse)


@cute.jit
def mask_end(s: cute.Tensor, begin: Int32, stop: cute.Tensor, tile_n: cutlass.Constexpr[int]):
    """-inf for keys from `stop` on, the same for every row, in the key block at `begin`."""
    if stop[0] - begin < tile_n:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            elements = row_elements(2 * cute.size(s), r)
            for i, x in zip(elements, apply_mask([s[i] for i in elements], None, own_columns(stop[0] - begin))):
                s[i] = x


@cute.jit
def follow(softmax, row_maxes, has_grown: Boolean):
    """Let the references of the rows that have grown follow, where some row of the warp has; tops: the maxima of each
    thread's part of its rows."""
    if has_grown:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            before = softmax.reference[r]
            candidate = across_row(row_maxes[r], cute.arch.fmax) * softmax.scales.log2
            shrink = before - candidate
            grows = shrink < -softmax.context.cfg.rescale_threshold
            factor = cutlass.select_(grows, cute.math.exp2(shrink, fastmath=True), Float32(1.0))
            softmax.factor[r] = Float32(factor)
            softmax.total[r] = softmax.total[r] * Float32(factor)
            softmax.reference[r] = Float32(cutlass.select_(grows, candidate, before))


def pack(s: cute.Tensor, p: cute.Tensor) -> None:
    """P, rounded to 16 bits, as the next product's operand; 0 for keys after those of s."""
    words = cute.recast_tensor(p, Int32)
    for i in range(cute.size(words)):
        words[i] = pack_half(s[2 * i], s[2 * i + 1], p.element_type) if 2 * i < cute.size(s) else Int32(0)


def in_chains(values: list[Float32], combine) -> Float32:
    """All values combined, in independent chains."""
    chains = list(values[:CHAINS])
    for i, value in enumerate(values[CHAINS:]):
        chains[i % CHAINS] = combine(chains[i % CHAINS], value)
    while len(chains) > 1:
        chains = [combine(*chains[i : i + 2]) for i in range(0, len(chains), 2)]
    return chains[0]


@cute.jit
def write_lse(context, work, row: Int32, lse: Float32):
    """One of the threads that share a row writes it, if the row has a place."""
    if is_written(context.cfg, work, row) and cute.arch.lane_idx() % LANES_PER_ROW == 0:
        place = result(context, "lse", work)
        place[place_of(context.cfg, row), 0] = lse
