"""Compute roles, one warpgroup each: scores and softmax of every second key block, half of the columns of O.

At its block n a warpgroup starts S of n, then the products of P with V of the blocks n - 2, its own, and n - 1. The
softmax of n runs beside them. It begins at the maxima that came with P of n - 1.

Waits:   load_both_Q.full, load_both_KV.full, even_both_P.full, odd_both_P.full; its own P's free
Signals: load_both_Q.free, load_both_KV.free, even_both_P.free, odd_both_P.free; its own P's full
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...core.constant import Constant
from ...core.fragment_coords import reduce_row
from ...core.vec_io import bits, load_floats, pack_half, store_vec
from ...fwd.device.work import Work, work_tile
from ...pipeline.cursor import Cursor, Lane, consume, produce
from ...pipeline.roles import WARP, WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..fragment import LANES_PER_ROW, ROWS_PER_THREAD, ROWS_PER_WARP, row_in_warp, store_matrices
from ..fwd.compute import out_to_global, rescale, zeros_to_global
from ..fwd.softmax import Softmax
from ..wgmma import K_PER_MMA, ROWS, wait
from .config import HALVES, LatentContext

SUMS_BARRIER = 1  # barrier 0 is the CTA barrier


@dataclass(frozen=True)
class RowPairs(Constant):
    """Two float32 for each row and warpgroup, in shared memory. Four threads share a row; one of them stores."""

    pointer: cute.Pointer

    def load(self, half: int, warp: Int32) -> list[list[Float32]]:
        return [load_floats(self.at(half, warp, r), 2) for r in range(ROWS_PER_THREAD)]

    def at(self, half: int, warp: Int32, r: int) -> cute.Pointer:
        return (self.pointer + 2 * (half * ROWS + warp * ROWS_PER_WARP + row_in_warp(r))).align(8)


@cute.jit
def store_pairs(pairs: RowPairs, half: cutlass.Constexpr[int], warp: Int32, values: list[tuple[Float32, Float32]]):
    if cute.arch.lane_idx() % LANES_PER_ROW == 0:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            store_vec(pairs.at(half, warp, r), [bits(x) for x in values[r]])


class Member(Constant):
    """Operands and registers of the warpgroup with the key blocks of parity `half` and this half of O's columns.

    states: of each row after the block of either parity, what is subtracted in the exponent and the factor of O for its
    last change. sums: at the end, a row's sum of P and its maximum over the warpgroup's blocks.
    """

    def __init__(self, context: LatentContext, half: int) -> None:
        cfg, smem = context.cfg, context.smem
        self.context, self.cfg, self.half = context, cfg, half
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        self.qk, self.pv = cfg.qk, cfg.pv
        k_ptr, p_ptr = smem.pointer("K", cfg.dtype), smem.pointer("P", cfg.dtype)
        self.q, self.k = self.qk.a_at(smem.pointer("Q", cfg.dtype)), self.qk.b_at(k_ptr)
        self.p = self.pv.a_at(p_ptr)
        self.v = self.pv.b_at(k_ptr + half * cfg.half_columns * cfg.tile_n)  # a panel has all rows of its columns
        self.p_rows = p_ptr.toint() + self.warp * (ROWS_PER_WARP * PANEL_ROW_BYTES)
        self.o = self.pv.accumulator()
        self.states, self.sums = (RowPairs(smem.pointer(name, Float32)) for name in ("states", "sums"))
        self.softmax = Softmax(context)

    def first_row(self, work: Work) -> Int32:
        return work.m_block * ROWS + self.warp * ROWS_PER_WARP

    def start_s(self, s: cute.Tensor, kv: Cursor) -> None:
        self.qk.issue(s, self.q[None, None, None, 0], self.k[None, None, None, kv.stage], False)

    def start_o(self, parity: int, kv: Cursor, has_o: Boolean | bool = True) -> None:
        """Start O += P V of a block of this parity; without `has_o`, O = P V."""
        first = parity * self.cfg.tile_n // K_PER_MMA
        self.pv.issue(self.o, self.p[None, None, None, 0], self.v[None, None, None, kv.stage], has_o, a_first=first)

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

    def softmax_step(self, s: cute.Tensor, work: Work, n: Int32) -> Boolean:
        """Replace S of the n-th block by P. Returns True if O must be multiplied by the softmax's factor before the
        block is added."""
        softmax, block_iter = self.softmax, work.block_iter
        softmax.factor.fill(1.0)
        block = block_iter.block(block_iter.ahead(block_iter.start(), n))
        return softmax.softmax_step(s, softmax.block_scores(s, block), True)

    def store_p(self, s: cute.Tensor) -> None:
        """Store P, rounded, and the rows' state after it."""
        softmax = self.softmax
        packed: list[Int32] = [pack_half(s[i], s[i + 1], self.cfg.dtype) for i in range(0, cute.size(s), 2)]
        store_matrices(self.p_rows, self.cfg.p_tile, packed, self.half * self.cfg.tile_n)
        state = [(softmax.row_max_scaled[r], softmax.factor[r]) for r in range(ROWS_PER_THREAD)]
        store_pairs(self.states, self.half, self.warp, state)


@cute.jit
def rescale_when_done(o: cute.Tensor, factor: cute.Tensor, has_grown: Boolean):
    """Multiply O by `factor` after the products that add to it."""
    if has_grown:
        wait(0)
        rescale(o, factor, Boolean(True))


@cute.jit
def even(context: LatentContext):
    run(context, 0)


@cute.jit
def odd(context: LatentContext):
    run(context, 1)


@cute.jit
def run(context: LatentContext, half: cutlass.Constexpr[int]):
    member = Member(context, half)
    work = work_tile(context, Int32(cute.arch.block_idx()[0]))
    if work.count > 0:
        member.softmax.reset(work, member.first_row(work))
        attend(member, work)
        norms = finish(member, work)
        columns = context.cfg.half_columns
        out_to_global(context, work, member, norms, half * columns, columns)
    else:
        if const_expr(half == 0):
            member.softmax.finish_empty(work, member.first_row(work))
            if const_expr(not context.cfg.split):  # a part without keys is not read
                zeros_to_global(context, work, member)


@cute.jit
def attend(member: Member, work: Work):
    """O and softmax of all key blocks, from last to first. Of the cursors, `s` is at the blocks whose scores are the
    warpgroup's, `v` at all; `mine` and `other` are at the P of both warpgroups, `own` fills."""
    half = member.half
    ends = member.context.ends("odd" if const_expr(half == 1) else "even")
    p = [ends.even_both_P, ends.odd_both_P]
    q, v, s = consume(ends.load_both_Q), consume(ends.load_both_KV), consume(ends.load_both_KV, Lane(half, 2))
    mine, other, own = consume(p[half]), consume(p[1 - half]), produce(p[half])
    q.wait()
    count = (work.count + 1 - half) // 2  # of the warpgroup's blocks
    if const_expr(half == 0):
        s, own = first_block(member, work, s, own)
    else:
        s, v, other, own = first_blocks(member, work, count, s, v, other, own)
    for i in cutlass.range(1, count, unroll=1):
        s, v, mine, other, own = step(member, work, i, s, v, mine, other, own)
    if const_expr(half == 0):
        v, mine = add_own(member, v, mine, Boolean(count > 1))
        if work.count % 2 == 0:
            v, other = add_other(member, v, other)
    else:
        if count > 0:
            v, mine = add_own(member, v, mine, Boolean(True))
            if work.count % 2 == 1:
                v, other = add_other(member, v, other)
    q.arrive()


def first_block(member: Member, work: Work, s: Cursor, own: Cursor) -> tuple[Cursor, Cursor]:
    """P of block 0."""
    scores = member.qk.accumulator()
    s.wait()
    member.start_s(scores, s)
    wait(0)
    member.softmax_step(scores, work, Int32(0))
    own.wait()
    member.store_p(scores)
    own.arrive()
    return s.next(), own.next()


@cute.jit
def first_blocks(member: Member, work: Work, count: Int32, s: Cursor, v: Cursor, other: Cursor, own: Cursor):
    """O of block 0 and P of block 1, if it exists."""
    if count > 0:
        scores = member.qk.accumulator()
        s.wait()
        member.start_s(scores, s)
        v.wait()
        other.wait()
        member.take_state()
        member.start_o(0, v, False)
        wait(1)
        has_grown = member.softmax_step(scores, work, Int32(1))
        own.wait()
        member.store_p(scores)
        own.arrive()
        wait(0)
        rescale(member.o, member.softmax.factor, has_grown)
    else:
        v.wait()
        other.wait()
        member.take_state()
        member.start_o(0, v, False)
        wait(0)
    release(v, other)
    return s.next(), v.next(), other.next(), own.next()


def step(
    member: Member, work: Work, i: Int32, s: Cursor, v: Cursor, mine: Cursor, other: Cursor, own: Cursor
) -> tuple[Cursor, ...]:
    """P of the warpgroup's i-th block n, while blocks n - 2 and n - 1 are added to O."""
    half, scores, following = member.half, member.qk.accumulator(), v.next()
    s.wait()
    member.start_s(scores, s)
    v.wait()
    mine.wait()
    member.start_o(half, v, Boolean(True) if half else Boolean(i > 1))
    following.wait()
    other.wait()
    rescale_when_done(member.o, member.softmax.factor, member.take_state())
    member.start_o(1 - half, following)
    wait(2)
    has_grown = member.softmax_step(scores, work, 2 * i + half)
    wait(1)
    release(v, mine)
    own.wait()
    member.store_p(scores)
    own.arrive()
    wait(0)
    release(following, other)
    rescale(member.o, member.softmax.factor, has_grown)
    return s.next(), following.next(), mine.next(), other.next(), own.next()


def add_own(member: Member, v: Cursor, mine: Cursor, has_o: Boolean) -> tuple[Cursor, Cursor]:
    """Add the warpgroup's last block to O."""
    v.wait()
    mine.wait()
    member.start_o(member.half, v, has_o)
    wait(0)
    release(v, mine)
    return v.next(), mine.next()


def add_other(member: Member, v: Cursor, other: Cursor) -> tuple[Cursor, Cursor]:
    """Add the last block, which is the other warpgroup's, to O."""
    v.wait()
    other.wait()
    rescale(member.o, member.softmax.factor, member.take_state())
    member.start_o(1 - member.half, v)
    wait(0)
    release(v, other)
    return v.next(), other.next()


def release(v: Cursor, p: Cursor) -> None:
    """Release a key block and its P after its product."""
    v.arrive()
    cute.arch.sync_warp()  # all lanes have read the rows' state
    p.arrive()


def finish(member: Member, work: Work) -> list[Float32]:
    """Write each row's log-sum-exp. Returns the factors that normalise O, see `Softmax.finish`."""
    softmax, half, warp = member.softmax, member.half, member.warp
    totals = [reduce_row(softmax.total[r], lambda a, b: a + b) for r in range(ROWS_PER_THREAD)]
    maxima = [reduce_row(softmax.row_max[r], cute.arch.fmax) for r in range(ROWS_PER_THREAD)]
    store_pairs(member.sums, half, warp, list(zip(totals, maxima)))
    cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=HALVES * WARPS_PER_WARPGROUP * WARP)
    is_first = cute.arch.lane_idx() % LANES_PER_ROW == 0
    for r, (total, row_max) in enumerate(member.sums.load(1 - half, warp)):
        softmax.total[r] = Float32(cutlass.select_(is_first, totals[r] + total, Float32(0.0)))  # of four threads
        softmax.row_max[r] = cute.arch.fmax(maxima[r], row_max)
    return softmax.finish(work, member.first_row(work), writes_lse=half == 0)
