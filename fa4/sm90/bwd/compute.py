"""Compute role, two warpgroups: each has 64 keys, a thread two of them with a quarter of a step's queries; finally dV
and dK.

Per step: S^T = K Q^T and dP^T = V dO^T; P^T = exp2(S^T - lse) while dP^T is computed; dS^T = P^T (dP^T - delta). Then
dV += P^T dO, and dS goes to shared memory; with the other warpgroup's dS there too, dQ; and dK += dS^T Q, beside which
dQ leaves the registers. That it has left is said in the next step, where nothing waits for the fence.

Waits:   load_compute_{K,V,Q,dO}.full, compute_compute_dS.full, compute_reduce_dQ.free
Signals: load_compute_{Q,dO}.free, compute_compute_dS.full, compute_reduce_dQ.full
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...core.constant import Constant
from ...core.score import Softcap
from ...core.words import bits, load_floats, pack_half, store_words
from ...pipeline.channels import Ends
from ...pipeline.cursor import Cursor, consume, produce
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..fragment import ROWS_PER_WARP, first_column, row_in_warp
from ..wgmma import ROWS, wait
from .config import TILE_N
from .epilogue import store_gradients
from .handing import Handing
from .placement import WARPGROUP
from .work import work_tile


@dataclass(frozen=True)
class Team(Constant):
    """What a warpgroup works with at every step: its channels, the products' operands, the sums of dV and dK."""

    ends: Ends
    index: Int32
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_columns: cute.Tensor
    do_columns: cute.Tensor
    dq_a: cute.Tensor
    dq_b: cute.Tensor
    dv: cute.Tensor
    dk: cute.Tensor


@cute.jit
def compute(context):
    cfg = context.cfg
    work = work_tile(context)
    team = team_of(context)
    ends = team.ends
    team.dv.fill(0.0)
    team.dk.fill(0.0)
    if work.blocks > 0:
        consume(ends.load_compute_K).wait()
        consume(ends.load_compute_V).wait()
    q, dq = consume(ends.load_compute_Q), Handing.before_first(ends.compute_reduce_dQ, cfg.reducers)
    follows = Int32(0)  # whether there was a step before
    for _ in cutlass.range(cfg.group, unroll=1):
        for m_block in cutlass.range(work.first, work.full_first, unroll=1):
            step(context, team, work, m_block, q, dq, follows, True)
            q, dq, follows = q.next(), dq.next(), Int32(1)
        for m_block in cutlass.range(work.full_first, work.full_stop, unroll=1):
            step(context, team, work, m_block, q, dq, follows, False)
            q, dq, follows = q.next(), dq.next(), Int32(1)
        if cutlass.const_expr(cfg.has_left):
            for m_block in cutlass.range(work.full_stop, work.stop, unroll=1):
                step(context, team, work, m_block, q, dq, follows, True)
                q, dq, follows = q.next(), dq.next(), Int32(1)
    if follows > 0:
        dq.arrive(team.index)
    store_gradients(context, work, team.dv, team.dk, team.index)


def team_of(context) -> Team:
    """This warpgroup's operands and accumulators."""
    cfg = context.cfg
    index = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_WARPGROUP

    def place(name: str, offset=0) -> cute.Pointer:
        return context.smem.pointer(name, cfg.dtype) + offset

    own_rows = index * (ROWS * PANEL_ROW_BYTES // 2)
    if cfg.dq_by_queries:
        dq_a, dq_b = cfg.dq.a_at(place("dS", own_rows)), cfg.dq.b_at(place("K"))
    else:
        dq_a, dq_b = cfg.dq.a_at(place("K", index * (cfg.k_tile.panel_bytes // 2))), cfg.dq.b_at(place("dS"))
    return Team(
        ends=context.ends("compute"),
        index=index,
        k=cfg.scores.a_at(place("K", own_rows)),
        v=cfg.dp.a_at(place("V", own_rows)),
        q=cfg.scores.b_at(place("Q")),
        do=cfg.dp.b_at(place("dO")),
        q_columns=cfg.dk.b_at(place("Q")),
        do_columns=cfg.dv.b_at(place("dO")),
        dq_a=dq_a,
        dq_b=dq_b,
        dv=cfg.dv.accumulator(),
        dk=cfg.dk.accumulator(),
    )


@cute.jit
def step(
    context,
    team: cutlass.Constexpr[Team],
    work,
    m_block: Int32,
    q: Cursor,
    last_dq: Handing,
    follows: Int32,
    is_cut: cutlass.Constexpr[bool],
):
    """One block of queries; dO and dS go in step with Q.

    last_dq: of the step before, if it `follows` one. is_cut: some query misses some key.
    """
    cfg, ends, stage = context.cfg, team.ends, q.stage
    do, ds_full = q.in_step(consume(ends.load_compute_dO)), q.in_step(consume(ends.compute_compute_dS))
    s, dp, dq = cfg.scores.accumulator(), cfg.dp.accumulator(), cfg.dq.accumulator()
    q.wait()
    cfg.scores.issue(s, team.k[None, None, None, 0], team.q[None, None, None, stage], False)
    do.wait()
    cfg.dp.issue(dp, team.v[None, None, None, 0], team.do[None, None, None, stage], False)
    if follows > 0:
        last_dq.arrive(team.index)
    bounds = seen_by_key(work, m_block) if cutlass.const_expr(is_cut) else None
    rows = context.smem.pointer("rows", Float32) + (stage * (2 * cfg.tile_m) + 2 * first_column())
    minus_lse = Statistic(rows, cfg)

    wait(1)
    p = weights(context, s, minus_lse, bounds)
    minus_delta = Statistic(rows + cfg.tile_m, cfg)
    last_dq.wait_left(team.index)  # here, so that the compiler does not move exp2 behind the wait for dP
    wait(0)
    p_operand, ds_operand = cfg.dv.a_registers(), cfg.dk.a_registers()
    fill(p_operand, rounded(p, cfg.dtype))
    if cutlass.const_expr(cfg.has_softcap):
        # s holds what the softcap made of the scores.
        p = [x * Softcap(context.args.scale_over_cap).slope(s[i]) for i, x in enumerate(p)]
    ds_words = rounded([x * (dp[i] + minus_delta[query_of(i)]) for i, x in enumerate(p)], cfg.dtype)
    fill(ds_operand, ds_words)

    store_ds(context, stage, ds_words)
    cfg.dv.issue(team.dv, p_operand, team.do_columns[None, None, None, stage], True)
    q.in_step(produce(ends.compute_compute_dS)).arrive()
    ds_full.wait()
    issue_dq(cfg, team, dq, stage)
    wait(1)
    do.arrive()
    cfg.dk.issue(team.dk, ds_operand, team.q_columns[None, None, None, stage], True)
    wait(1)
    stage_dq(context, team.index, dq)
    wait(0)
    q.arrive()


def issue_dq(cfg, team: Team, dq: cute.Tensor, stage: Int32) -> None:
    """This warpgroup's share of dQ."""
    of_a, of_b = (stage, 0) if cfg.dq_by_queries else (0, stage)
    cfg.dq.issue(dq, team.dq_a[None, None, None, of_a], team.dq_b[None, None, None, of_b], False)


def seen_by_key(work, m_block: Int32) -> list[tuple[Int32, Int32]]:
    """[first, stop) for each of this thread's two keys: the queries that see it, counted from this thread's first one
    of a block."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    key = work.n_block * TILE_N + warp * ROWS_PER_WARP
    query = m_block * work.mask.tile_m + first_column()
    bounds = [work.mask.queries(key + row_in_warp(r)) for r in range(2)]
    return [(first - query, stop - query) for first, stop in bounds]


def query_of(i: int) -> int:
    """Which of this thread's queries element i of an accumulator belongs to: two of every 8."""
    return i // 4 * 2 + i % 2


class Statistic:
    """One of each of this thread's queries: of every 16, its four lie side by side, see `rows_by_thread`. Loaded ahead
    if registers hold them, else four at a time when first asked for."""

    def __init__(self, pointer: cute.Pointer, cfg) -> None:
        self.pointer, self.loaded = pointer, {}
        if cfg.statistics_ahead:
            for first in range(0, cfg.tile_m // 4, 4):
                self[first]

    def __getitem__(self, query: int) -> Float32:
        first = query // 4 * 4
        if first not in self.loaded:
            self.loaded[first] = load_floats(self.pointer + 4 * first, 4)
        return self.loaded[first][query - first]


def weights(context, s: cute.Tensor, minus_lse: Statistic, bounds: list | None) -> list[Float32]:
    """P^T; with a softcap `s` is replaced by what the cap makes of it. bounds: see `seen_by_key`."""
    cfg, args = context.cfg, context.args
    p = []
    for i in range(cute.size(s)):
        x = s[i]
        if cfg.has_softcap:
            x = Softcap(args.scale_over_cap).apply(x)
            s[i] = x
        x = x * args.scale_log2 + minus_lse[query_of(i)]
        if bounds is not None:
            x = cutlass.select_(is_seen(cfg, i, *bounds[i // 2 % 2]), x, -Float32.inf)
        p.append(cute.math.exp2(x, fastmath=True))
    return p


def is_seen(cfg, i: int, first: Int32, stop: Int32) -> Boolean:
    """Whether the query of element i is one of [first, stop), counted from the query of element 0."""
    ahead = i // 4 * 8 + i % 2
    seen = ahead < stop
    return seen & (ahead >= first) if cfg.has_right else seen


def rounded(x: list[Float32], dtype) -> list[Int32]:
    """Two to a word."""
    return [pack_half(x[i], x[i + 1], dtype) for i in range(0, len(x), 2)]


def fill(operand: cute.Tensor, words: list[Int32]) -> None:
    """Put 16-bit pairs into the registers of a left operand."""
    of_words = cute.recast_tensor(operand, Int32)
    for i, word in enumerate(words):
        of_words[i] = word


def store_ds(context, stage: Int32, words: list[Int32]) -> None:
    """dS to shared memory, a row per query: the 8 x 8 matrices of dS^T are transposed on their way."""
    tile = context.cfg.ds_tile
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    # Lane l names row l % 8 of matrix l / 8: (first, second) 8 keys of 8 queries, then of the next 8.
    query, key = lane % 8 + lane // 16 * 8, warp % WARPS_PER_WARPGROUP * ROWS_PER_WARP + lane // 8 % 2 * 8
    place = context.smem.address("dS") + stage * tile.nbytes + warp // WARPS_PER_WARPGROUP * tile.panel_bytes
    place = place + query * PANEL_ROW_BYTES + ((key // 8 ^ (query & 7)) << 4)
    for i in range(0, len(words), 4):
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
            read_only_args=[place + i // 4 * (16 * PANEL_ROW_BYTES), *words[i : i + 4]],
        )


def stage_dq(context, team: Int32, dq: cute.Tensor) -> None:
    """This warpgroup's dQ to its place in shared memory: four elements of every thread, then the next four."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    place = context.smem.pointer("dQ", Float32) + team * (context.cfg.dq_bytes // 4) + 4 * thread
    for i in range(0, cute.size(dq), 4):
        store_words(place + i * WARPGROUP, [bits(dq[i + j]) for j in range(4)])
