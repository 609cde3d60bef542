"""Compute roles, one warpgroup each: scores and softmax of every second key block, half of the columns of O.

Two blocks are a step. The softmax of the even one runs beside S of the odd one, that of the odd one beside the
products of both warpgroups with P of the even one. A softmax begins at the maxima that came with the other's P.

Waits:   load_both_Q.full, load_both_left.full, load_both_right.full; even: load_even_tail.full, odd_even_P.full; odd:
         load_odd_tail.full, even_odd_P.full
Signals: even: load_both_left.free, even_odd_P.full; odd: load_both_right.free, odd_even_P.full; both, with several
         work tiles: load_both_Q.free

A block of the other warpgroup needs no wait: its P is there, for which it has been read.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...core.constant import Constant
from ...core.fragment_coords import reduce_row
from ...fwd.device.output import out_to_global, zeros_to_global
from ...fwd.device.queue import Queue
from ...fwd.device.scales import nonzero_descale
from ...fwd.device.softmax import BlockScores, Softmax, pack, rescale
from ...fwd.device.work import Work, work_tile
from ...pipeline.cursor import Cursor, Lane, consume, produce
from ...pipeline.fragment import LANES_PER_ROW, ROWS_PER_THREAD, store_matrices
from ...pipeline.roles import ROWS_PER_WARP, WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..wgmma import K_PER_MMA, ROWS
from ..wgmma_order import settle, wait
from .config import HALVES
from .context import LatentContext
from .queries import scale_q
from .rows import RowPairs, both_sync, store_pairs


class LatentSoftmax(Softmax):
    """Softmax of scores whose rows of Q may have scales. row_scales: these, times the factor to log2 units unless there
    is a softcap."""

    def __init__(self, context: LatentContext) -> None:
        super().__init__(context)
        self.row_scales = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) if context.cfg.scales_q else None

    def set_q_scales(self, q_scales: list[Float32]) -> None:
        for r, q_scale in enumerate(q_scales):
            has_softcap = self.context.cfg.has_softcap
            self.row_scales[r] = q_scale if has_softcap else nonzero_descale(q_scale * self.scales.log2)

    def log2_scale(self, r: int) -> Float32:
        is_per_row = self.row_scales is not None and not self.context.cfg.has_softcap
        return self.row_scales[r] if is_per_row else self.scales.log2

    def masked_scores(self, s: cute.Tensor, scores: BlockScores, is_masked: bool) -> list[list[Float32]]:
        if self.row_scales is not None and self.context.cfg.has_softcap:
            rescale(s, self.row_scales, Boolean(True))
        return super().masked_scores(s, scores, is_masked)


class Member(Constant):
    """Operands and registers of the warpgroup with the key blocks of parity `half` and this half of O's columns.

    states: of each row after the block of either parity, what is subtracted in the exponent and the factor of O for its
    last change. sums: at the end, a row's sum of P and its maximum over the warpgroup's blocks.
    """

    def __init__(self, context: LatentContext, half: int) -> None:
        cfg, smem = context.cfg, context.smem
        self.context, self.cfg, self.half = context, cfg, half
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        self.qk, self.pv, self.pv_of_other = cfg.qk, cfg.pv, cfg.pv_of_other
        k_ptr = smem.pointer("K and P", cfg.v_dtype)
        mine, others = (k_ptr + (stage * cfg.stage_bytes + cfg.p_offset) // 2 for stage in (half, 1 - half))
        self.q, self.k = self.qk.a_at(smem.pointer("Q", cfg.v_dtype)), self.qk.b_at(k_ptr)
        self.p, self.p_of_other = self.pv.a_registers(), self.pv_of_other.a_at(others)
        self.v = self.pv.b_at(k_ptr + half * cfg.half_columns * cfg.tile_n)  # a panel has all rows of its columns
        self.p_rows = mine.toint() + self.warp * (ROWS_PER_WARP * PANEL_ROW_BYTES)
        self.o = self.pv.accumulator()
        self.states, self.sums = (RowPairs(smem.pointer(name, Float32)) for name in ("states", "sums"))
        self.softmax = LatentSoftmax(context)

    def first_row(self, work: Work) -> Int32:
        return work.m_block * ROWS + self.warp * ROWS_PER_WARP

    def start_s(self, s: cute.Tensor, parts: Sequence[Cursor]) -> None:
        """Start S = Q K^T of the warpgroup's block, part by part as they arrive."""
        q, k = self.q[None, None, None, 0], self.k[None, None, None, self.half]
        steps = [panel * self.cfg.k_tile.panel_columns // K_PER_MMA for panel in self.cfg.part_bounds]
        for i, part in enumerate(parts):
            part.wait()
            self.qk.issue(s, q, k, i > 0, range(*steps[i : i + 2]))

    def start_o(self) -> None:
        """Start O += P V of the warpgroup's block."""
        self.pv.issue(self.o, self.p, self.v[None, None, None, self.half], True)

    def start_o_of_other(self) -> None:
        """The same for the block of the other warpgroup."""
        p, v = self.p_of_other[None, None, None, 0], self.v[None, None, None, 1 - self.half]
        self.pv_of_other.issue(self.o, p, v, True)

    def take_state(self) -> Boolean:
        """Continue from the rows' state after a block of the other warpgroup. Returns True if O must be multiplied by
        the softmax's factor before that block is added."""
        softmax = self.softmax
        changes = []
        for r, (row_max, factor) in enumerate(self.states.load(1 - self.half, self.warp)):
            softmax.row_max_scaled[r], softmax.factor[r] = row_max, factor
            softmax.total[r] = softmax.total[r] * factor
            changes.append(factor != 1.0)
        return cute.arch.vote_any_sync(changes[0] | changes[1])

    def softmax_step(self, s: cute.Tensor, work: Work, n: Int32, own: Cursor) -> Boolean:
        """P of the n-th block, from S, into registers and, with the rows' state after it, to the other warpgroup.
        Returns True if O must be multiplied by the softmax's factor before the block is added."""
        softmax, block_iter = self.softmax, work.block_iter
        softmax.factor.fill(1.0)
        block = block_iter.block(block_iter.ahead(block_iter.start(), n))
        has_grown = softmax.softmax_step(s, softmax.block_scores(s, block), True)
        pack(s, self.p)
        settle(self.p)
        packed = cute.recast_tensor(self.p, Int32)
        store_matrices(self.p_rows, self.cfg.p_tile, [packed[i] for i in range(cute.size(packed))])
        state = [(softmax.row_max_scaled[r], softmax.factor[r]) for r in range(ROWS_PER_THREAD)]
        store_pairs(self.states, self.half, self.warp, state)
        own.arrive()
        return has_grown


@cute.jit
def even(context: LatentContext):
    run(context, 0)


@cute.jit
def odd(context: LatentContext):
    run(context, 1)


@cute.jit
def run(context: LatentContext, half: cutlass.Constexpr[int]):
    cfg, ends = context.cfg, context.ends(("even", "odd")[half])
    member = Member(context, half)
    q = consume(ends.load_both_Q)
    sides = [ends.load_both_left, ends.load_both_right]
    parts = [consume(end, Lane(half, HALVES)) for end in sides]  # of the warpgroup's blocks
    if const_expr(cfg.has_tail):
        parts = [*parts, consume(ends.load_odd_tail if const_expr(half == 1) else ends.load_even_tail)]
    v = consume(sides[half], Lane(1 - half, HALVES))  # of the other's: to release, so it stays where it is
    p = [ends.even_odd_P, ends.odd_even_P]
    other, own = consume(p[1 - half]), produce(p[half])

    if const_expr(cfg.persistent):
        queue = Queue.first(context)
        while queue.has_tile():
            q, parts, other, own = compute_tile(member, queue.tile(), q, parts, v, other, own)
            queue = queue.next()
    else:
        compute_tile(member, work_tile(context, Int32(cute.arch.block_idx()[0])), q, parts, v, other, own)


@cute.jit
def compute_tile(member: Member, work: Work, q: Cursor, parts: list[Cursor], v: Cursor, other: Cursor, own: Cursor):
    """O of a work tile, from its first product to its store."""
    context, cfg, half = member.context, member.cfg, member.half
    if work.count > 0:
        member.softmax.reset(work, member.first_row(work))
        q.wait()
        parts, other, own = attend(member, work, parts, v, other, own)
        norms = finish(member, work)
        if const_expr(cfg.persistent):
            release(q)
        q = q.next()
        out_to_global(context, work, member, norms, half * cfg.half_columns, cfg.half_columns)
    else:
        if const_expr(half == 0):
            member.softmax.finish_empty(work, member.first_row(work))
            if const_expr(not cfg.split):  # a part without keys is not read
                zeros_to_global(context, work, member)
    return q, parts, other, own


@cute.jit
def attend(member: Member, work: Work, parts: list[Cursor], v: Cursor, other: Cursor, own: Cursor):
    """O and softmax of all key blocks, from last to first."""
    half = member.half
    if const_expr(member.cfg.scales_q):
        member.softmax.set_q_scales(scale_q(member.context, member.sums, half, member.warp))
    member.o.fill(0.0)
    for i in cutlass.range(work.count // 2, unroll=1):
        if const_expr(half == 0):
            parts, other, own = even_step(member, work, 2 * i, parts, v, other, own)
        else:
            parts, other, own = odd_step(member, work, 2 * i + 1, parts, v, other, own)
    if work.count % 2 == 1:
        if const_expr(half == 0):
            start_own(member, work, work.count - 1, parts, own)
            wait(0)
            parts[0].arrive()
            parts, own = [part.next() for part in parts], own.next()
        else:
            other.wait()
            rescale(member.o, member.softmax.factor, member.take_state())
            member.start_o_of_other()
            wait(0)
            release(v)
            other = other.next()
    return parts, other, own


Cursors = tuple[list[Cursor], Cursor, Cursor]


def even_step(
    member: Member, work: Work, n: Int32, parts: list[Cursor], v: Cursor, other: Cursor, own: Cursor
) -> Cursors:
    """P of block n; add blocks n and n + 1 to O."""
    start_own(member, work, n, parts, own)
    wait(0)
    parts[0].arrive()
    other.wait()
    rescale(member.o, member.softmax.factor, member.take_state())
    member.start_o_of_other()
    wait(0)
    release(v)
    return [part.next() for part in parts], other.next(), own.next()


def start_own(member: Member, work: Work, n: Int32, parts: list[Cursor], own: Cursor) -> None:
    """P of an even block; start adding it to O."""
    scores = member.qk.accumulator()
    member.start_s(scores, parts)
    wait(0)
    rescale(member.o, member.softmax.factor, member.softmax_step(scores, work, n, own))
    member.start_o()


def odd_step(
    member: Member, work: Work, n: Int32, parts: list[Cursor], v: Cursor, other: Cursor, own: Cursor
) -> Cursors:
    """P of block n; add blocks n - 1 and n to O."""
    scores = member.qk.accumulator()
    member.start_s(scores, parts)
    other.wait()
    rescale(member.o, member.softmax.factor, member.take_state())
    member.start_o_of_other()
    wait(1)
    has_grown = member.softmax_step(scores, work, n, own)
    wait(0)
    release(v)
    rescale(member.o, member.softmax.factor, has_grown)
    member.start_o()
    wait(0)
    parts[1].arrive()
    return [part.next() for part in parts], other.next(), own.next()


def release(read: Cursor) -> None:
    """Release what products have read, and with it what threads have: with the warpgroup's part of a block of the other
    its P and the rows' state, with Q the sums of the other."""
    cute.arch.sync_warp()  # all lanes have read these
    read.arrive()


def finish(member: Member, work: Work) -> list[Float32]:
    """Write each row's log-sum-exp. Returns the factors that normalise O, see `Softmax.finish`."""
    softmax, half, warp = member.softmax, member.half, member.warp
    totals = [reduce_row(softmax.total[r], lambda a, b: a + b) for r in range(ROWS_PER_THREAD)]
    maxima = [reduce_row(softmax.row_max[r], cute.arch.fmax) for r in range(ROWS_PER_THREAD)]
    store_pairs(member.sums, half, warp, list(zip(totals, maxima)))
    both_sync()
    is_first = cute.arch.lane_idx() % LANES_PER_ROW == 0
    for r, (total, row_max) in enumerate(member.sums.load(1 - half, warp)):
        softmax.total[r] = Float32(cutlass.select_(is_first, totals[r] + total, Float32(0.0)))  # of four threads
        softmax.row_max[r] = cute.arch.fmax(maxima[r], row_max)
    return softmax.finish(work, member.first_row(work), writes_lse=half == 0)
