"""Online softmax of a row of scores, in one thread: visible keys, scores, weights, maxima and sums."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...core.constant import Constant
from ...core.dropout import Dropout, apply_dropout, keeps
from ...core.fragment_coords import FragmentCoords
from ...core.fragment_values import FragmentValues
from ...core.line import is_in_share
from ...core.mask import range_blocks, sparse_blocks
from ...core.mask_bits import apply_mask
from ...core.score import apply_softcap
from ...core.traced import Traced, bind
from ...fwd.device.scales import Scales
from ...fwd.device.work import Work
from ...fwd.variant import ForwardVariant
from ...pipeline.cursor import Cursor
from .. import tmem
from ..exp2 import exp2_mufu, exp2_polynomial
from .context import Sm100ForwardContext
from .work import key_block

LOAD_COLUMNS = 32


@cute.jit
def over_blocks(
    context: Sm100ForwardContext, work: Work, row_keys: RowKeys, state: tuple, s: Cursor, step: cutlass.Constexpr
):
    """Call `step(s, state, row in the block, is_masked)` for each key block, and return the last (state, s).

    is_masked: the band may mask columns of the block. step returns the next state; the cursor `s` advances by itself.
    """
    if const_expr(context.cfg.has_blocks):
        block_iter = sparse_blocks(work.block_iter)
        for i in cutlass.range(block_iter.masked, unroll=1):
            state = step(s, state, row_keys.in_block(block_iter.block(i)), True)
            s = s.next()
        for i in cutlass.range(block_iter.masked, block_iter.count - block_iter.cut, unroll=1):
            state = step(s, state, row_keys.in_block(block_iter.block(i), applies_mask_mod=False), False)
            s = s.next()
        for i in cutlass.range(block_iter.count - block_iter.cut, block_iter.count, unroll=1):
            state = step(s, state, row_keys.in_block(block_iter.block(i), applies_mask_mod=False), True)
            s = s.next()
    else:
        blocks = range_blocks(work.block_iter)
        for i in cutlass.range(blocks.stop - blocks.full_stop, unroll=1):
            state = step(s, state, row_keys.in_block(blocks.stop - 1 - i), True)
            s = s.next()
        for i in cutlass.range(blocks.full_stop - blocks.full_first, unroll=1):
            block = key_block(context, work, blocks.stop - blocks.full_stop + i)
            state = step(s, state, row_keys.in_block(block), False)
            s = s.next()
        if const_expr(context.cfg.has_left):
            for i in cutlass.range(blocks.full_first - blocks.first, unroll=1):
                state = step(s, state, row_keys.in_block(blocks.full_first - 1 - i), True)
                s = s.next()
    return state, s


@dataclass(frozen=True)
class RowInBlock(Constant):
    """A row's scores of a key block. If the block is masked, columns first <= column < stop are unmasked.

    score, mask: fragment values for a score_mod and a mask_mod. keep_bits: 32-bit words of dropout keep bits.
    """

    first: Int32
    stop: Int32
    scales: Scales
    score: FragmentValues | None
    mask: FragmentValues | None
    keep_bits: list[Int32] | None

    def visible_scores(self, cfg: ForwardVariant, s: list[Float32], is_masked: bool) -> list[Float32]:
        """Scores after softcap, score_mod and masks. is_masked: the band may mask some."""
        if cfg.has_softcap:
            capped = cute.make_rmem_tensor(len(s), Float32)
            for i, x in enumerate(s):
                capped[i] = x
            apply_softcap(capped, self.scales.over_cap)
            s = [capped[i] for i in range(len(s))]
        if self.score is not None:
            (s,) = self.score.logits([s])
        if self.mask is not None:
            (s,) = self.mask.apply_mask([s])
        return apply_mask(s, self.first if cfg.has_left else None, self.stop) if is_masked else s

    def largest_kept(self, s: list[Float32]) -> Float32:
        """Largest visible score that dropout keeps."""
        assert self.keep_bits is not None
        kept = [cutlass.select_(keeps(self.keep_bits, i), x, -Float32.inf) for i, x in enumerate(s)]
        return row_maximum([Float32(x) for x in kept])

    def weights(
        self, s: list[Float32], pair: int, minus_offset: Float32, polynomial: int
    ) -> tuple[tuple[Float32, Float32], tuple[Float32, ...]]:
        """P of a pair of neighbouring visible scores, and the same after dropout. polynomial: pairs of every 16 whose
        exp2 runs on the FMA units."""
        scale = self.scales.log2
        x, y = cute.arch.fma_packed_f32x2((s[2 * pair], s[2 * pair + 1]), (scale, scale), (minus_offset, minus_offset))
        p = exp2_polynomial(x, y) if is_in_share(pair, polynomial) else (exp2_mufu(x), exp2_mufu(y))
        kept = p
        if self.keep_bits is not None:
            kept = tuple(apply_dropout(self.keep_bits, 2 * pair + i, x) for i, x in enumerate(p))
        return p, kept


@dataclass(frozen=True)
class RowKeys(Constant):
    """Keys of a row: the band first <= key < stop, score_mod and mask_mod, dropout.

    column, columns: first one and number of the columns of a block that the thread has.
    """

    context: Sm100ForwardContext
    row: Int32
    first: Int32
    stop: Int32
    scales: Scales
    score_mod: Traced | None
    mask_mod: Traced | None
    dropout: Dropout | None
    column: Int32 | int
    columns: int

    @staticmethod
    def of(
        context: Any, work: Work, row: Int32, query: Int32, column: Int32 | int = 0, columns: int | None = None
    ) -> RowKeys:
        """columns: None for all of a block."""
        cfg, lengths = context.cfg, (work.q.count, work.k.count)
        head, packing = work.head * cfg.packed_heads, (cfg.packed_heads, cfg.rows_per_query)
        mods = bind(cfg.mods, context.args.mods, work.batch, head, lengths, *packing)
        dropout = Dropout.of(cfg.mods, context.args.mods, work.batch, head, *packing)
        first, stop = work.mask.keys(query)
        columns = cfg.tile_n if columns is None else columns
        return RowKeys(context, row, first, stop, Scales.of(context, work), *mods, dropout, column, columns)

    def in_block(self, block: Int32, applies_mask_mod: bool = True) -> RowInBlock:
        """The row in a key block. applies_mask_mod: False if the block list says that nothing there is masked."""
        begin = block * self.context.cfg.tile_n + self.column
        coords = FragmentCoords((self.row,), begin, self.columns, run=1, period=1)
        score = None if self.score_mod is None else self.score_mod.at(coords, self.scales.over_cap)
        mask = None if self.mask_mod is None or not applies_mask_mod else self.mask_mod.at(coords)
        if mask is not None:
            mask.precompute_mask()  # mask bits first: there are no registers for all loaded values
        keep_bits = None if self.dropout is None else self.dropout.words(self.row, begin, self.columns)
        return RowInBlock(self.first - begin, self.stop - begin, self.scales, score, mask, keep_bits)


def load_scores(address: Int32 | int, columns: int) -> list[Float32]:
    """Load this thread's scores from tensor memory; valid after `tmem.wait_loads()`."""
    s = []
    for column in range(0, columns, LOAD_COLUMNS):
        s += tmem.load(address + column, LOAD_COLUMNS)
    return s


def load_scores_and_maximum(address: Int32 | int, columns: int) -> tuple[list[Float32], Float32]:
    """The same, and the row's maximum; on sm_103."""
    s, maxima = [], []
    for column in range(0, columns, LOAD_COLUMNS):
        loaded, largest = tmem.load_and_maximum(address + column, LOAD_COLUMNS)
        s += loaded
        maxima.append(largest)
    return s, functools.reduce(cute.arch.fmax, maxima)


def offset_and_factor(
    cfg: ForwardVariant, row_max_scaled: Float32, block_max_scaled: Float32
) -> tuple[Float32, Float32]:
    """(what is subtracted in the exponent from this block on, factor of O and of the row sum)."""
    log2_factor = row_max_scaled - block_max_scaled
    must_rescale = log2_factor < -cfg.rescale_threshold  # False while all keys so far are masked: -inf - -inf is NaN
    if cfg.largest_p:
        block_max_scaled, log2_factor = block_max_scaled - cfg.largest_p, log2_factor + cfg.largest_p
    factor = cutlass.select_(must_rescale, cute.math.exp2(log2_factor, fastmath=True), Float32(1.0))
    return Float32(cutlass.select_(must_rescale, block_max_scaled, row_max_scaled)), Float32(factor)


def finite_offset(cfg: ForwardVariant, row_max_scaled: Float32, is_masked: bool) -> Float32:
    """The offset of the exponent: 0 while all keys so far are masked."""
    if not (is_masked or cfg.mods is not None):
        return row_max_scaled
    return Float32(cutlass.select_(row_max_scaled == -Float32.inf, Float32(0.0), row_max_scaled))


def packed_sum(pairs: list[tuple[Float32, Float32]], chains: int = 4) -> tuple[Float32, Float32]:
    """Sums of the first and of the second elements of all pairs, in independent addition chains."""
    sums = list(pairs[:chains])
    for i in range(chains, len(pairs)):
        sums[i % chains] = cute.arch.add_packed_f32x2(sums[i % chains], pairs[i])
    while len(sums) > 1:
        sums = [cute.arch.add_packed_f32x2(*pair) for pair in zip(sums[::2], sums[1::2])]
    return sums[0]


def row_maximum(s: list[Float32]) -> Float32:
    """Maximum of the list, in four chains that the compiler turns into three-input maxima."""
    maxima = list(s[:4])
    for i in range(4, len(s), 8):
        for chain in range(4):
            pair = s[i + 2 * chain : i + 2 * chain + 2]
            for x in pair:
                maxima[chain] = cute.arch.fmax(maxima[chain], x)
    return cute.arch.fmax(cute.arch.fmax(maxima[0], maxima[1]), cute.arch.fmax(maxima[2], maxima[3]))
