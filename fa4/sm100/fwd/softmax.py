"""Softmax role, two teams of four warps: turns S into P, with a team per Q tile and a thread per row.

Per key block: read S, find the row's maximum, tell correction by how much O must shrink, write P = exp2(S - max) over
S in 16 bits, in two parts. At the end: the row's log-sum-exp to global memory, and 1 / sum to correction.

Waits:   mma_softmax_S.full, softmax_correction_scale.free, softmax_correction_norm.free
Signals: softmax_correction_scale.full, mma_softmax_S.free, softmax_mma_Ptail.full, softmax_correction_norm.full
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.constant import Constant
from ...core.dropout import Dropout, dropped
from ...core.fragment_coords import FragmentCoords
from ...core.fragment_values import FragmentValues
from ...core.mask_bits import apply_mask
from ...core.score import Softcap
from ...core.traced import Traced, bind
from ...core.vec_io import pack_half
from ...fwd.rows import is_written, normalise, place_of, query_of, result
from ...fwd.scales import Scales
from ...pipeline.cursor import Cursor, consume, produce
from .. import tmem
from ..exp2 import exp2_mufu, exp2_polynomial, is_polynomial
from .work import Queue, key_block, row_tile

LOAD_COLUMNS = 32
STORED_KEYS = 32  # whose P goes to tensor memory by one instruction


@cute.jit
def softmax(context):
    cfg, context = context.cfg, context.placed()
    ends = context.ends("softmax")
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tile = warp // 4
    s, norms = consume(ends.mma_softmax_S, tile), produce(ends.softmax_correction_norm, tile)
    norm_of = rows_in_smem(context, "norm")

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        row = row_tile(context, work, tile) * cfg.tile_m + thread % cfg.tile_m
        query = query_of(cfg, row)
        state = -Float32.inf, Float32(0.0), -Float32.inf
        if work.count > 0:
            seen = Seen.by(context, work, row, query)
            if cutlass.const_expr(cfg.has_blocks):
                block_iter = work.block_iter
                for i in cutlass.range(block_iter.masked, unroll=1):
                    at = seen.at(block_iter.block(i))
                    state = step(context, ends, tile, s, state, at, True)
                    s = s.next()
                for i in cutlass.range(block_iter.masked, block_iter.count - block_iter.cut, unroll=1):
                    at = seen.at(block_iter.block(i), asks_mask=False)
                    state = step(context, ends, tile, s, state, at, False)
                    s = s.next()
                for i in cutlass.range(block_iter.count - block_iter.cut, block_iter.count, unroll=1):
                    at = seen.at(block_iter.block(i), asks_mask=False)
                    state = step(context, ends, tile, s, state, at, True)
                    s = s.next()
            else:
                blocks = work.blocks
                for i in cutlass.range(blocks.stop - blocks.full_stop, unroll=1):
                    at = seen.at(blocks.stop - 1 - i)
                    state = step(context, ends, tile, s, state, at, True)
                    s = s.next()
                for i in cutlass.range(blocks.full_stop - blocks.full_first, unroll=1):
                    at = seen.at(key_block(context, work, blocks.stop - blocks.full_stop + i))
                    state = step(context, ends, tile, s, state, at, False)
                    s = s.next()
                if cutlass.const_expr(cfg.has_left):
                    for i in cutlass.range(blocks.full_first - blocks.first, unroll=1):
                        at = seen.at(blocks.full_first - 1 - i)
                        state = step(context, ends, tile, s, state, at, True)
                        s = s.next()
        reference, total, row_max = state
        largest = exp2_mufu(row_max * Scales.of(context, work).log2 - reference)
        norm, lse = normalise(context, work, row, query, reference, total, largest)
        if work.count > 0:
            norms.wait()
            if cutlass.const_expr(cfg.has_dropout):
                norm = norm * context.args.mods.dropout.scale
            if cutlass.const_expr(cfg.has_bytes):
                norm = norm * context.args.cache.v_descale[work.batch, work.head_kv]
            norm_of[thread] = norm
            norms.arrive()
            norms = norms.next()
        if is_written(cfg, work, row):
            place = result(context, "lse", work)
            place[place_of(cfg, row), 0] = lse
        queue = queue.next()


def rows_in_smem(context, name: str) -> cute.Tensor:
    """One float per row of the CTA; softmax's teams follow each other, so a thread's number is its row here."""
    return cute.make_tensor(context.smem.pointer(name, Float32), cute.make_layout(context.cfg.cta_rows))


@dataclass(frozen=True)
class At(Constant):
    """A row's scores of a key block: it sees columns first <= column < stop, if the band cuts the block; score, mask:
    the elements as a score_mod and a mask_mod see them; kept: words of keep bits."""

    first: Int32
    stop: Int32
    scales: Scales
    score: FragmentValues | None
    mask: FragmentValues | None
    kept: list[Int32] | None


@dataclass(frozen=True)
class Seen(Constant):
    """What a row sees: keys first <= key < stop, what a mask_mod shows of them, and what dropout keeps."""

    context: Any
    row: Int32
    first: Int32
    stop: Int32
    scales: Scales
    score_mod: Traced | None
    mask_mod: Traced | None
    dropout: Dropout | None

    @staticmethod
    def by(context, work, row: Int32, query: Int32) -> Seen:
        cfg, lengths = context.cfg, (work.q.count, work.k.count)
        head = work.head * cfg.packed
        mods = bind(cfg.mods, context.args.mods, work.batch, head, lengths, cfg.packed, rows_per_query=cfg.slots)
        dropout = Dropout.of(cfg.mods, context.args.mods, work.batch, head, cfg.packed, cfg.slots)
        return Seen(context, row, *work.mask.keys(query), Scales.of(context, work), *mods, dropout)

    def at(self, block: Int32, asks_mask: bool = True) -> At:
        """In a key block. asks_mask: whether a mask_mod may hide something there."""
        cfg = self.context.cfg
        begin = block * cfg.tile_n
        places = FragmentCoords((self.row,), begin, cfg.tile_n, run=1, period=1)
        score = None if self.score_mod is None else self.score_mod.at(places, self.scales.over_cap)
        mask = None if self.mask_mod is None or not asks_mask else self.mask_mod.at(places)
        if mask is not None:
            mask.see_ahead()  # there are no registers for all that is loaded
        kept = None if self.dropout is None else self.dropout.words(self.row, begin, cfg.tile_n)
        return At(self.first - begin, self.stop - begin, self.scales, score, mask, kept)


def step(context, ends, tile: Int32, cursor: Cursor, state: tuple[Float32, Float32, Float32], at: At, is_masked: bool):
    """One key block: S -> P. Returns the new state of the row, (reference, total, top).

    `reference` is what is subtracted in the exponent: a maximum of the row so far in log2 units, or something within
    `rescale_threshold` below it; -inf before the row has seen a key. `total` is the sum of P at that reference, `row_max`
    the largest score. is_masked: the band may cut the block.
    """
    cfg, spans = context.cfg, context.tmem
    reference, total, row_max = state
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    s_address = tmem.lane_address(spans.S, warp) + tile * cfg.tile_n
    p_address = tmem.lane_address(spans.P, warp) + tile * cfg.tile_n

    cursor.wait()
    s = []
    for column in range(0, cfg.tile_n, LOAD_COLUMNS):
        s += tmem.load(s_address + column, LOAD_COLUMNS)  # registers wait for their own values
    if cfg.has_softcap:
        capped = cute.make_rmem_tensor(cfg.tile_n, Float32)
        for i, x in enumerate(s):
            capped[i] = x
        Softcap(at.scales.over_cap).apply(capped)
        s = [capped[i] for i in range(cfg.tile_n)]
    if at.score is not None:
        (s,) = at.score.logits([s])
    if at.mask is not None:
        (s,) = at.mask.hidden([s])
    if is_masked:
        s = apply_mask(s, at.first if cfg.has_left else None, at.stop)

    scale = at.scales.log2
    highest = row_maximum(s)
    candidate = highest * scale
    shrink = reference - candidate
    grows = shrink < -cfg.rescale_threshold  # false while the row has seen no key: -inf - -inf
    factor = cutlass.select_(grows, cute.math.exp2(shrink, fastmath=True), Float32(1.0))
    reference = Float32(cutlass.select_(grows, candidate, reference))
    factor = Float32(factor)
    factors = cursor.in_step(produce(ends.softmax_correction_scale, tile))
    rows_in_smem(context, "scale")[thread] = factor
    factors.arrive()

    subtract = reference
    if is_masked or cfg.mods is not None:
        subtract = Float32(cutlass.select_(reference == -Float32.inf, Float32(0.0), reference))
    minus = (-subtract, -subtract)
    scales = (scale, scale)
    # The compiler moves what it likes within a stretch without a loop, and would take nearly all exponentials before it
    # hands over P's head, and the sums between them. A wait is a loop, so two of them keep three stretches apart.
    words, weights = [], []
    for pair in range(cfg.tile_n // 2):
        x, y = cute.arch.fma_packed_f32x2((s[2 * pair], s[2 * pair + 1]), scales, minus)
        if is_polynomial(pair, cfg.polynomial):
            p = exp2_polynomial(x, y)
        else:
            p = exp2_mufu(x), exp2_mufu(y)
        weights.append(p)
        if at.kept is not None:
            p = [dropped(at.kept, 2 * pair + i, x) for i, x in enumerate(p)]
        words.append(pack_half(p[0], p[1], cfg.v_dtype))
        keys = 2 * pair + 2
        if keys == STORED_KEYS:
            tmem.wait_loads()  # P goes over S
        if keys % STORED_KEYS == 0 or keys == cfg.p_head:
            tmem.store(p_address + keys // 2 - len(words), words)
            words = []
        if keys == cfg.p_head:
            tmem.wait_stores()
            cursor.arrive()
            cursor.wait()  # for this S again, which is over: the next comes after P's tail
    tmem.wait_stores()
    ends.softmax_mma_Ptail.arrive_full(tile)
    factors.next().wait()
    sums = packed_sum(weights)  # of this block alone: each addition rounds less than it would to the total
    return reference, total * factor + (sums[0] + sums[1]), cute.arch.fmax(row_max, highest)


def packed_sum(pairs: list[tuple[Float32, Float32]], chains: int = 4) -> tuple[Float32, Float32]:
    """Sums of the first and of the second of all pairs, as chains that do not wait for each other."""
    tops = list(pairs[:chains])
    for i in range(chains, len(pairs)):
        tops[i % chains] = cute.arch.add_packed_f32x2(tops[i % chains], pairs[i])
    while len(tops) > 1:
        tops = [cute.arch.add_packed_f32x2(*two) for two in zip(tops[::2], tops[1::2])]
    return tops[0]


def row_maximum(s: list[Float32]) -> Float32:
    """Largest of the list, as four chains that the compiler turns into three-input maxima."""
    tops = list(s[:4])
    for i in range(4, len(s), 8):
        for chain in range(4):
            pair = s[i + 2 * chain : i + 2 * chain + 2]
            for x in pair:
                tops[chain] = cute.arch.fmax(tops[chain], x)
    return cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))
