"""What a thread does to scores between the products: P and dS, the row statistics they need, and dS's way to shared
memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...core.captured_grads import CapturedGrads
from ...core.constant import Constant
from ...core.dropout import Dropout
from ...core.fragment_coords import FragmentCoords
from ...core.fragment_values import FragmentValues
from ...core.score import SoftcapAgain
from ...core.scoring import Scoring
from ...core.traced import bind
from ...core.vec_io import load_floats, pack_half, store_vec
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..fragment import LANES_PER_ROW, ROWS_PER_WARP, first_column, row_elements, row_in_warp
from .dropout import Kept
from .placement import WARPGROUP


def own_keys(work) -> tuple[Int32, Int32]:
    """This thread's."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    key = work.n_block * work.mask.tile_n + warp * ROWS_PER_WARP
    return key + row_in_warp(0), key + row_in_warp(1)


def seen_by_key(work, m_block: Int32) -> list[tuple[Int32, Int32]]:
    """[first, stop) for each of this thread's two keys: the queries that see it, counted from this thread's first one
    of a block."""
    query = m_block * work.mask.tile_m + first_column()
    bounds = [work.mask.queries(key) for key in own_keys(work)]
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


@dataclass(frozen=True)
class At(Constant):
    """What a step's scores go through.

    bounds: see `seen_by_key`; None where no query misses a key. score, mask: a thread's elements as a score_mod and a
    mask_mod see them. listed: the work whose blocks come from lists. captured: where gradients of captured tensors are
    added. kept: what dropout leaves.
    """

    bounds: list[tuple[Int32, Int32]] | None = None
    score: FragmentValues | None = None
    mask: FragmentValues | None = None
    listed: Any = None
    captured: CapturedGrads | None = None
    kept: Kept | None = None


def where(context, work, place: tuple[Int32, Int32], is_cut: bool) -> At:
    """At a step of a query head of the group. is_cut: some query may miss some key."""
    cfg, args = context.cfg, context.args
    if cfg.mods is None and not is_cut:
        return At()
    member, i = place
    # Without a mask or functions no score depends on its query block.
    m_block = (work if cfg.mods is not None else work._replace(neighbours=None)).block(i)
    bounds = seen_by_key(work, m_block) if is_cut and not cfg.has_blocks else None
    if cfg.mods is None:
        return At(bounds)
    head, lengths = work.head_kv * cfg.group + member, (work.q.count, work.k.count)
    score_mod, mask_mod = bind(cfg.mods, args.mods, work.batch, head, lengths)
    query = m_block * cfg.tile_m + first_column()
    places = FragmentCoords(own_keys(work), query, cfg.tile_m // LANES_PER_ROW, keys_across=False)
    score = None if score_mod is None else score_mod.at(places, args.scale)
    mask = None if mask_mod is None or (cfg.has_blocks and not is_cut) else mask_mod.at(places)
    if score is not None:
        score.ask_ahead()
    if mask is not None:
        mask.see_ahead()  # hardly a register is left
    captured = CapturedGrads.of(args.mods.captured, cfg, work.batch, work.k, args.seqlen_k, work.n_block)
    kept = kept_at(context, work, head, m_block)
    return At(bounds, score, mask, work if cfg.has_blocks else None, captured, kept)


def kept_at(context, work, head: Int32, m_block: Int32) -> Kept | None:
    """What dropout leaves of a step, if there is any."""
    cfg = context.cfg
    dropout = Dropout.of(cfg.mods, context.args.mods, work.batch, head)
    return None if dropout is None else Kept.of(dropout, m_block * cfg.tile_m, cfg.tile_m, own_keys(work)[0])


def by_key(s: Any, queries: int) -> list[list]:
    """A step's elements, or what was made of them, for each of a thread's keys."""
    return [[s[i] for i in row_elements(queries, r)] for r in range(2)]


def in_order(lines: list[list]) -> list:
    """The elements for each key as accumulators have them."""
    return [lines[i // 2 % 2][query_of(i)] for i in range(2 * len(lines[0]))]


def mask_missing(x: list[Float32], work) -> list[Float32]:
    """-inf where a key does not exist."""
    held = cute.make_rmem_tensor(len(x), Float32)
    for i, value in enumerate(x):
        held[i] = value
    _mask_missing(held, work)
    return [held[i] for i in range(len(x))]


@cute.jit
def _mask_missing(x: cute.Tensor, work):
    """In place; no CTA but that of the last keys has such."""
    if (work.n_block + 1) * work.mask.tile_n > work.k.count:
        keys = own_keys(work)
        for i in cutlass.range_constexpr(cute.size(x)):
            x[i] = Float32(cutlass.select_(keys[i // 2 % 2] < work.k.count, x[i], -Float32.inf))


def scoring(context, at: At) -> Scoring:
    """The stages that a step's scores go through."""
    softcap = SoftcapAgain(context.args.scale_over_cap) if context.cfg.has_softcap else None
    return Scoring(softcap, at.score, at.mask)


def weights(context, s: cute.Tensor, minus_lse: Statistic, at: At) -> list[Float32]:
    """P^T; with a softcap or a score_mod `s` is replaced by the logits that these make of it, not masked."""
    cfg, args, bounds, stages = context.cfg, context.args, at.bounds, scoring(context, at)
    for i, x in enumerate(logits_of(stages, s, cfg.tile_m)):
        s[i] = x
    x = in_order(stages.masked(by_key(s, cfg.tile_m), lambda r, c: minus_lse[c]))
    if at.listed is not None:
        x = mask_missing(x, at.listed)
    p = []
    for i, logit in enumerate(x):
        exponent = logit * args.scale_log2 + minus_lse[query_of(i)]
        if bounds is not None:
            exponent = cutlass.select_(is_seen(cfg, i, *bounds[i // 2 % 2]), exponent, -Float32.inf)
        p.append(cute.math.exp2(exponent, fastmath=True))
    return p


def logits_of(stages: Scoring, s: cute.Tensor, queries: int) -> list[Float32]:
    """A step's logits, not masked. A softcap takes each alone, in the order of the accumulators."""
    if stages.score_mod is not None:
        return in_order(stages.logits(by_key(s, queries)))
    (logits,) = stages.logits([[s[i] for i in range(cute.size(s))]])
    return logits


def slopes(context, s: cute.Tensor, p: list[Float32], minus_delta: Statistic, dp: cute.Tensor, at: At) -> list[Int32]:
    """dS^T, rounded, two to a word. s: of `weights`."""
    stages, p = scoring(context, at), sloped(context, s, p, at)
    grads = [dp[i] if at.kept is None else dp[i] * at.kept.factor(i) for i in range(len(p))]
    ds = [x * (grads[i] + minus_delta[query_of(i)]) for i, x in enumerate(p)]
    lines = by_key(p, context.cfg.tile_m)
    ds = in_order(stages.slopes(lines, by_key(ds, context.cfg.tile_m)))
    if at.captured is not None:
        at.captured.add(at.score, lines)
    return rounded(ds, context.cfg.dtype)


def sloped(context, s: cute.Tensor, p: list[Float32], at: At) -> list[Float32]:
    """P^T times the softcap's derivative. s: of `weights`."""
    (sloped,) = scoring(context, at).sloped([p], [[s[i] for i in range(len(p))]])
    return sloped


def for_dv(context, p: list[Float32], at: At) -> list[Int32]:
    """P^T as dV takes it, rounded, two to a word."""
    p = p if at.kept is None else [x * at.kept.factor(i) for i, x in enumerate(p)]
    return rounded(p, context.cfg.dtype)


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


def clear_ds(context, stage: Int32, panel: Int32 | int) -> None:
    """A warpgroup's dS, all zero, to its panel in shared memory."""
    tile = context.cfg.ds_tile
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    place = context.smem.pointer("dS", Int32) + (stage * tile.nbytes + panel * tile.panel_bytes) // 4 + 4 * thread
    for i in range(tile.panel_bytes // (16 * WARPGROUP)):
        store_vec(place + i * (4 * WARPGROUP), [Int32(0)] * 4)
