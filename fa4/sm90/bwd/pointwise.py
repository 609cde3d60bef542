"""What a thread does to scores between the products: P and dS, the row statistics they need, and dS's way to shared
memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...core.score import Softcap
from ...core.words import load_floats, pack_half
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..fragment import ROWS_PER_WARP, first_column, row_in_warp


def seen_by_key(work, m_block: Int32) -> list[tuple[Int32, Int32]]:
    """[first, stop) for each of this thread's two keys: the queries that see it, counted from this thread's first one
    of a block."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    key = work.n_block * work.mask.tile_n + warp * ROWS_PER_WARP
    query = m_block * work.mask.tile_m + first_column()
    bounds = [work.mask.queries(key + row_in_warp(r)) for r in range(2)]
    return [(first - query, stop - query) for first, stop in bounds]


def query_of(i: int) -> int:
    """Which of this thread's queries element i of an accumulator belongs to: two of every 8."""
    return i // 4 * 2 + i % 2


def rows_of(context, stage: Int32) -> cute.Pointer:
    """This thread's first statistic of a step's queries: -lse * log2(e); those of -delta lie tile_m floats behind."""
    return context.smem.pointer("rows", Float32) + (stage * (2 * context.cfg.tile_m) + 2 * first_column())


class Statistic:
    """One of each of this thread's queries: of every 16, its four lie side by side, see `config.ByThread`. Loaded ahead
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


def slopes(context, s: cute.Tensor, p: list[Float32], minus_delta: Statistic, dp: cute.Tensor) -> list[Int32]:
    """dS^T, rounded, two to a word. s: of `weights`."""
    if context.cfg.has_softcap:
        p = [x * Softcap(context.args.scale_over_cap).slope(s[i]) for i, x in enumerate(p)]
    return rounded([x * (dp[i] + minus_delta[query_of(i)]) for i, x in enumerate(p)], context.cfg.dtype)


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


def store_ds(context, stage: Int32, panel: Int32 | int, words: list[Int32]) -> None:
    """A warpgroup's dS to its panel in shared memory, a row per query: the 8 x 8 matrices of dS^T are transposed on
    their way."""
    tile = context.cfg.ds_tile
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    # Lane l names row l % 8 of matrix l / 8: (first, second) 8 keys of 8 queries, then of the next 8.
    query, key = lane % 8 + lane // 16 * 8, warp % WARPS_PER_WARPGROUP * ROWS_PER_WARP + lane // 8 % 2 * 8
    place = context.smem.address("dS") + stage * tile.nbytes + panel * tile.panel_bytes
    place = place + query * PANEL_ROW_BYTES + ((key // 8 ^ (query & 7)) << 4)
    for i in range(0, len(words), 4):
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
            read_only_args=[place + i // 4 * (16 * PANEL_ROW_BYTES), *words[i : i + 4]],
        )
