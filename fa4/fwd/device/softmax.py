"""Online softmax in base 2. A thread has two of the consumer's rows; four threads share the columns of a row."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...core.constant import Constant
from ...core.dropout import Dropout, apply_dropout
from ...core.fragment_coords import FragmentCoords, reduce_row
from ...core.fragment_values import FragmentValues
from ...core.mask_bits import apply_mask
from ...core.score import apply_softcap
from ...core.traced import Traced, bind
from ...core.vec_io import pack_half
from ...pipeline.fragment import (
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    columns_below,
    first_column,
    row_in_warp,
    row_registers,
)
from ..launch import ForwardContext
from .rows import is_written, normalise, query_of, result, row_coord_of
from .scales import Scales
from .work import Work

CHAINS = 4  # independent chains of a row's maximum and sum, to hide latency


@dataclass(frozen=True)
class BlockScores(Constant):
    """First key of a step, and the values of score_mod and mask_mod at this thread's elements."""

    first_key: Int32
    score: FragmentValues | None
    mask: FragmentValues | None
    keep_bits: list[list[Int32]] | None  # per row, see `core.dropout.Dropout.by_quads`


class Softmax(Constant):
    """Softmax state of a thread's two rows, in registers.

    row_max_scaled: value subtracted in the exponent, in log2 units: a row maximum so far, less `cfg.largest_p`, at most
    `rescale_threshold` below the current one; -inf before the first visible key. total: this thread's part of the sum
    of P, relative to it. row_max: maximum of this thread's scores of the row so far. factor: multiplier of O for the
    last change of `row_max_scaled`. first, stop: the row sees keys first <= key < stop.
    """

    def __init__(self, context: ForwardContext):
        self.context = context
        self.row_max_scaled, self.total, self.row_max, self.factor = (
            cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(4)
        )
        self.first, self.stop = (cute.make_rmem_tensor(ROWS_PER_THREAD, Int32) for _ in range(2))
        self.score_mod: Traced | None = None
        self.mask_mod: Traced | None = None
        self.dropout: Dropout | None = None
        self.rows: tuple[Int32, ...] = ()
        self.scales: Scales | None = None

    def reset(self, work: Work, first_row: Int32) -> None:
        """Initialise the state for a work tile. first_row: of this warp, as a row of the sequence."""
        self.row_max_scaled.fill(-Float32.inf)
        self.total.fill(0.0)
        self.row_max.fill(-Float32.inf)
        for r in range(ROWS_PER_THREAD):
            query = query_of(self.context.cfg, first_row + row_in_warp(r))
            self.first[r], self.stop[r] = work.mask.keys(query)
        cfg, args = self.context.cfg, self.context.args
        self.scales = Scales.of(self.context, work)
        if cfg.mods is not None:
            lengths, head = (work.q.count, work.k.count), work.head * cfg.packed_heads
            packing = cfg.packed_heads, cfg.rows_per_query
            self.score_mod, self.mask_mod = bind(cfg.mods, args.mods, work.batch, head, lengths, *packing)
            self.dropout = Dropout.of(cfg.mods, args.mods, work.batch, head, *packing)
            self.rows = tuple(first_row + row_in_warp(r) for r in range(ROWS_PER_THREAD))

    def block_scores(self, s: cute.Tensor, block: Int32, first: int = 0) -> BlockScores:
        """Return the context of a key block's scores, or those from its key `first` on; loads what score_mod and
        mask_mod need before S is complete."""
        cfg = self.context.cfg
        first_key = block * cfg.tile_n + first
        coords = self.coords(first_key, cute.size(s) // ROWS_PER_THREAD)
        score = None if self.score_mod is None else self.score_mod.at(coords, self.scales.over_cap)
        mask = None if self.mask_mod is None else self.mask_mod.at(coords)
        for values in (score, mask):
            if values is not None:
                values.prefetch_loads()
        keep_bits = None
        if self.dropout is not None:
            keep_bits = self.dropout.by_quads(list(self.rows), first_key, 2 * cute.size(s))
        return BlockScores(first_key, score, mask, keep_bits)

    def softmax_step(self, s: cute.Tensor, scores: BlockScores, is_masked: bool) -> Boolean:
        """Replace S by P for one key block. Returns as `raise_maxima`."""
        rows = self.masked_scores(s, scores, is_masked)
        return self.weights(s, rows, [reduce_in_chains(x, cute.arch.fmax) for x in rows], scores, is_masked)

    def weights(
        self,
        s: cute.Tensor,
        rows: list[list[Float32]],
        row_maxes: list[Float32],
        scores: BlockScores,
        is_masked: bool,
    ) -> Boolean:
        """Write P of masked scores to s. Returns as `raise_maxima`."""
        has_grown = self.raise_maxima(row_maxes)
        self.exponentials(s, rows, scores, is_masked)
        return has_grown

    def raise_maxima(self, row_maxes: list[Float32]) -> Boolean:
        """Raise `row_max_scaled`. Returns True if O must be multiplied by `factor`, row by row; the result is the same
        for all rows of a warp. row_maxes: of this thread's part of the rows, or of more scores."""
        cfg = self.context.cfg
        # False while a row has seen no key: -inf - -inf is NaN.
        grows = [
            row_max * self.log2_scale(r) - self.row_max_scaled[r] > cfg.rescale_threshold
            for r, row_max in enumerate(row_maxes)
        ]
        has_grown = cute.arch.vote_any_sync(grows[0] | grows[1])
        update_row_max(self, row_maxes, has_grown)
        for r, row_max in enumerate(row_maxes):
            self.row_max[r] = cute.arch.fmax(self.row_max[r], row_max)
        return has_grown

    def exponentials(self, s: cute.Tensor, rows: list[list[Float32]], scores: BlockScores, is_masked: bool) -> None:
        """Write P of masked scores to s, relative to `row_max_scaled`, and add it to `total`."""
        cfg = self.context.cfg
        for r, x in enumerate(rows):
            row_max_scaled, scale = self.row_max_scaled[r], self.log2_scale(r)
            if is_masked or cfg.mods is not None:
                row_max_scaled = Float32(cutlass.select_(row_max_scaled == -Float32.inf, Float32(0.0), row_max_scaled))
            p = [cute.math.exp2(value * scale - row_max_scaled, fastmath=True) for value in x]
            for c, (i, p_i) in enumerate(zip(row_registers(2 * cute.size(s), r), p)):
                s[i] = p_i if scores.keep_bits is None else apply_dropout(scores.keep_bits[r], c // 2 * 8 + c % 2, p_i)
            # Sum the block first: adding each P to the running total would round the total hundreds of times.
            self.total[r] = self.total[r] + reduce_in_chains(p, lambda a, b: a + b)

    def log2_scale(self, r: int) -> Float32:
        """Factor from the scores, or logits of score_mod, of a row to log2 units."""
        return self.scales.log2

    def masked_scores(self, s: cute.Tensor, scores: BlockScores, is_masked: bool | Boolean) -> list[list[Float32]]:
        """Return each row's scores, or logits of score_mod; -inf for masked keys. is_masked: whether the block may have
        some; a Boolean only with lists of blocks."""
        cfg = self.context.cfg
        row_indices = [row_registers(2 * cute.size(s), r) for r in range(ROWS_PER_THREAD)]
        if cfg.has_softcap:
            apply_softcap(s, self.scales.over_cap)
        rows = [[s[i] for i in row] for row in row_indices]
        if scores.score is not None:
            rows = scores.score.logits(rows)
        if scores.mask is not None and (not isinstance(is_masked, bool) or is_masked or not cfg.has_blocks):
            masked = scores.mask.apply_mask(rows)
            if isinstance(is_masked, bool):
                rows = masked
            else:
                rows = [[Float32(cutlass.select_(is_masked, *xs)) for xs in zip(*pair)] for pair in zip(masked, rows)]
        first_key = scores.first_key
        if cfg.has_blocks:
            for row, indices in zip(rows, row_indices):
                for i, x in zip(indices, row):
                    s[i] = x
            mask_end(self, s, first_key)  # keys may end in a block that a list marks as unmasked
            return [[s[i] for i in row] for row in row_indices]
        if not is_masked:
            return rows
        below = self.columns_below
        firsts = [below(self.first[r] - first_key) if cfg.has_left else None for r in range(ROWS_PER_THREAD)]
        return [apply_mask(x, firsts[r], below(self.stop[r] - first_key)) for r, x in enumerate(rows)]

    def coords(self, first_key: Int32, count: int) -> FragmentCoords:
        """Coordinates of this thread's `count` scores of each row of the keys from `first_key` on."""
        return FragmentCoords(self.rows, first_key + first_column(), count)

    def columns_below(self, limit: Int32) -> Int32:
        """How many of a row's scores of this thread are of the first `limit` keys; 0 if `limit` is negative."""
        return columns_below(limit)

    def finish(self, work: Work, first_row: Int32, writes_lse: bool | Boolean = True) -> list[Float32]:
        """Write each row's log-sum-exp, unless others do. Returns the factors that normalise O; 0 for a row without
        keys or data."""
        norms = []
        for r in range(ROWS_PER_THREAD):
            row = first_row + row_in_warp(r)
            total = reduce_row(self.total[r], lambda a, b: a + b)
            row_max = reduce_row(self.row_max[r], cute.arch.fmax)
            largest_p = cute.math.exp2(row_max * self.log2_scale(r) - self.row_max_scaled[r], fastmath=True)
            query = query_of(self.context.cfg, row)
            counted = self.counted_p(r, row_max, largest_p)
            norm, lse = normalise(self.context, work, row, query, self.row_max_scaled[r], total, largest_p, counted)
            if writes_lse is not False:
                write_lse(self.context, work, row, lse, writes_lse)
            factors = (None if self.dropout is None else self.dropout.scale, self.scales.v_descale)
            norms.append(functools.reduce(lambda a, b: a if b is None else a * b, factors, norm))
        return norms

    def counted_p(self, r: int, row_max: Float32, largest_p: Float32) -> Float32 | None:
        """Return what `total` has of the largest P of a row, if that may be an approximation."""
        return None

    def finish_empty(self, work: Work, first_row: Int32) -> None:
        """Write the log-sum-exp of rows that see no key."""
        for r in range(ROWS_PER_THREAD):
            row = first_row + row_in_warp(r)
            query = query_of(self.context.cfg, row)
            _, lse = normalise(self.context, work, row, query, -Float32.inf, Float32(0.0), Float32(0.0))
            write_lse(self.context, work, row, lse)


@cute.jit
def mask_end(softmax: Softmax, s: cute.Tensor, first_key: Int32):
    """Set scores of the key block at `first_key` to -inf for keys >= `stop`, which is the same for all rows."""
    left = softmax.stop[0] - first_key
    if left < softmax.context.cfg.tile_n:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            indices = row_registers(2 * cute.size(s), r)
            for i, x in zip(indices, apply_mask([s[i] for i in indices], None, softmax.columns_below(left))):
                s[i] = x


@cute.jit
def rescale(o: cute.Tensor, factor: cute.Tensor, has_grown: Boolean):
    """Multiply O by `factor`, row by row, if the scaled maximum of a row of the warp has grown."""
    if has_grown:
        _multiply(o, factor)


def _multiply(o: cute.Tensor, factor: cute.Tensor) -> None:
    for i in range(cute.size(o)):
        o[i] = o[i] * factor[i // 2 % 2]


@cute.jit
def update_row_max(softmax: Softmax, row_maxes: list[Float32], has_grown: Boolean):
    """Raise `row_max_scaled` of the rows that have grown, if any row of the warp has. row_maxes: maxima of the block
    over this thread's part of its rows."""
    cfg = softmax.context.cfg
    if has_grown:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            old_max = softmax.row_max_scaled[r]
            new_max = reduce_row(row_maxes[r], cute.arch.fmax) * softmax.log2_scale(r)
            if const_expr(cfg.largest_p):
                new_max = new_max - cfg.largest_p
            shrink = old_max - new_max
            grows = shrink < cfg.largest_p - cfg.rescale_threshold
            factor = cutlass.select_(grows, cute.math.exp2(shrink, fastmath=True), Float32(1.0))
            softmax.factor[r] = Float32(factor)
            softmax.total[r] = softmax.total[r] * Float32(factor)
            softmax.row_max_scaled[r] = Float32(cutlass.select_(grows, new_max, old_max))


def pack(s: cute.Tensor, p: cute.Tensor) -> None:
    """Round P to 16 bits into the next product's operand; 0 for keys behind those of s."""
    packed = cute.recast_tensor(p, Int32)
    for i in range(cute.size(packed)):
        packed[i] = pack_half(s[2 * i], s[2 * i + 1], p.element_type) if 2 * i < cute.size(s) else Int32(0)


def reduce_in_chains(values: list[Float32], combine) -> Float32:
    """Combine all values in CHAINS independent chains."""
    chains = list(values[:CHAINS])
    for i, value in enumerate(values[CHAINS:]):
        chains[i % CHAINS] = combine(chains[i % CHAINS], value)
    while len(chains) > 1:
        chains = [combine(*chains[i : i + 2]) for i in range(0, len(chains), 2)]
    return chains[0]


@cute.jit
def write_lse(context: ForwardContext, work: Work, row: Int32, lse: Float32, writes: bool | Boolean = True):
    """Write log-sum-exp of a row, if the row exists; one of the four threads of the row writes."""
    if is_written(context.cfg, work, row) and cute.arch.lane_idx() % LANES_PER_ROW == 0 and writes:
        matrix = result(context, "lse", work)
        matrix[row_coord_of(context.cfg, row), 0] = lse
