"""Pointwise part of a step: P and dS with the row statistics they need, and the store of dS to shared memory."""

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
from ...core.score import BackwardSoftcap
from ...core.scoring import Scoring
from ...core.traced import bind
from ...core.vec_io import load_floats, pack_half, store_vec
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..fragment import LANES_PER_ROW, ROWS_PER_WARP, first_column, row_in_warp, row_registers
from .dropout import KeepBits
from .placement import WARPGROUP


def own_keys(work) -> tuple[Int32, Int32]:
    """Return this thread's two keys."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    key = work.n_block * work.mask.tile_n + warp * ROWS_PER_WARP
    return key + row_in_warp(0), key + row_in_warp(1)


def query_bounds(work, m_block: Int32) -> list[tuple[Int32, Int32]]:
    """Return the range [first, stop) of queries that see each of this thread's two keys, counted from this thread's
    first query of the block."""
    query = m_block * work.mask.tile_m + first_column()
    bounds = [work.mask.queries(key) for key in own_keys(work)]
    return [(first - query, stop - query) for first, stop in bounds]


def query_of(i: int) -> int:
    """Return which of this thread's queries accumulator element i belongs to; a thread has two of every 8."""
    return i // 4 * 2 + i % 2


def rows_of(context, stage: Int32) -> cute.Pointer:
    """Return a pointer to this thread's first -lse * log2(e) of a step's queries; -delta is tile_m floats behind."""
    return context.smem.pointer("rows", Float32) + (stage * (2 * context.cfg.tile_m) + 2 * first_column())


class Statistic:
    """Statistic of this thread's queries; of every 16 queries its four are contiguous, see `ThreadOrderedBlocks`.
    Loaded in advance if registers can hold all, else four at a time at their first use."""

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
class StepScores(Constant):
    """Context of a step's scores. bounds: see `query_bounds`; None if no query misses a key. score, mask: values of
    score_mod and mask_mod at this thread's elements. sparse_work: the work, if its blocks come from block lists.
    captured_grads: where gradients of captured tensors are added. keep_bits: of dropout."""

    bounds: list[tuple[Int32, Int32]] | None = None
    score: FragmentValues | None = None
    mask: FragmentValues | None = None
    sparse_work: Any = None
    captured_grads: CapturedGrads | None = None
    keep_bits: KeepBits | None = None


def step_scores(context, work, coord: tuple[Int32, Int32], is_partial: bool) -> StepScores:
    """Return the context of a step at (query head of the group, step). is_partial: some query may miss some key."""
    cfg, args = context.cfg, context.args
    if cfg.mods is None and not is_partial:
        return StepScores()
    member, i = coord
    # Without a mask or mods, no score depends on its query block.
    m_block = (work if cfg.mods is not None else work._replace(neighbours=None)).block(i)
    bounds = query_bounds(work, m_block) if is_partial and not cfg.has_blocks else None
    if cfg.mods is None:
        return StepScores(bounds)
    head, lengths = work.head_kv * cfg.group + member, (work.q.count, work.k.count)
    score_mod, mask_mod = bind(cfg.mods, args.mods, work.batch, head, lengths)
    query = m_block * cfg.tile_m + first_column()
    coords = FragmentCoords(own_keys(work), query, cfg.tile_m // LANES_PER_ROW, cols_are_keys=False)
    score = None if score_mod is None else score_mod.at(coords, args.scale)
    mask = None if mask_mod is None or (cfg.has_blocks and not is_partial) else mask_mod.at(coords)
    if score is not None:
        score.prefetch_loads()
    if mask is not None:
        mask.precompute_mask()  # few registers are left
    captured_grads = CapturedGrads.of(args.mods.captured, cfg, work.batch, work.k, args.seqlen_k, work.n_block)
    keep_bits = keep_bits_at(context, work, head, m_block)
    return StepScores(bounds, score, mask, work if cfg.has_blocks else None, captured_grads, keep_bits)


def keep_bits_at(context, work, head: Int32, m_block: Int32) -> KeepBits | None:
    """Return the keep bits of a step, or None without dropout."""
    cfg = context.cfg
    dropout = Dropout.of(cfg.mods, context.args.mods, work.batch, head)
    return None if dropout is None else KeepBits.of(dropout, m_block * cfg.tile_m, cfg.tile_m, own_keys(work)[0])


def by_key(s: Any, queries: int) -> list[list]:
    """Return elements, or values derived from them, grouped by this thread's keys."""
    return [[s[i] for i in row_registers(queries, r)] for r in range(2)]


def to_accumulator_order(grouped: list[list]) -> list:
    """Return elements grouped by key in accumulator order."""
    return [grouped[i // 2 % 2][query_of(i)] for i in range(2 * len(grouped[0]))]


def mask_missing(x: list[Float32], work) -> list[Float32]:
    """Return the elements with -inf for keys that do not exist."""
    values = cute.make_rmem_tensor(len(x), Float32)
    for i, value in enumerate(x):
        values[i] = value
    _mask_missing(values, work)
    return [values[i] for i in range(len(x))]


@cute.jit
def _mask_missing(x: cute.Tensor, work):
    """Mask in place; only the CTA of the last keys has missing keys."""
    if (work.n_block + 1) * work.mask.tile_n > work.k.count:
        keys = own_keys(work)
        for i in cutlass.range_constexpr(cute.size(x)):
            x[i] = Float32(cutlass.select_(keys[i // 2 % 2] < work.k.count, x[i], -Float32.inf))


def scoring(context, scores: StepScores) -> Scoring:
    """Return the stages that the scores of a step pass through."""
    softcap = BackwardSoftcap(context.args.scale_over_cap) if context.cfg.has_softcap else None
    return Scoring(softcap, scores.score, scores.mask)


def compute_p(context, s: cute.Tensor, minus_lse: Statistic, scores: StepScores) -> list[Float32]:
    """Return P^T. With softcap or score_mod, also replace `s` by the unmasked logits."""
    cfg, args, bounds, stages = context.cfg, context.args, scores.bounds, scoring(context, scores)
    for i, x in enumerate(logits_of(stages, s, cfg.tile_m)):
        s[i] = x
    x = to_accumulator_order(stages.masked(by_key(s, cfg.tile_m), lambda r, c: minus_lse[c]))
    if scores.sparse_work is not None:
        x = mask_missing(x, scores.sparse_work)
    p = []
    for i, logit in enumerate(x):
        exponent = logit * args.scale_log2 + minus_lse[query_of(i)]
        if bounds is not None:
            exponent = cutlass.select_(is_in_bounds(cfg, i, *bounds[i // 2 % 2]), exponent, -Float32.inf)
        p.append(cute.math.exp2(exponent, fastmath=True))
    return p


def logits_of(stages: Scoring, s: cute.Tensor, queries: int) -> list[Float32]:
    """Return a step's logits, unmasked. Softcap is elementwise, so it takes them in accumulator order."""
    if stages.score_mod is not None:
        return to_accumulator_order(stages.logits(by_key(s, queries)))
    (logits,) = stages.logits([[s[i] for i in range(cute.size(s))]])
    return logits


def compute_ds(
    context, s: cute.Tensor, p: list[Float32], minus_delta: Statistic, dp: cute.Tensor, scores: StepScores
) -> list[Int32]:
    """Return dS^T, rounded, two elements per register. s: from `compute_p`."""
    stages, p = scoring(context, scores), dp_factor(context, s, p, scores)
    grads = [dp[i] if scores.keep_bits is None else dp[i] * scores.keep_bits.factor(i) for i in range(len(p))]
    ds = [x * (grads[i] + minus_delta[query_of(i)]) for i, x in enumerate(p)]
    p_by_key = by_key(p, context.cfg.tile_m)
    ds = to_accumulator_order(stages.score_grads(p_by_key, by_key(ds, context.cfg.tile_m)))
    if scores.captured_grads is not None:
        scores.captured_grads.add(scores.score, p_by_key)
    return pack(ds, context.cfg.dtype)


def dp_factor(context, s: cute.Tensor, p: list[Float32], scores: StepScores) -> list[Float32]:
    """Return P^T times the derivative of softcap. s: from `compute_p`."""
    (dp_factor,) = scoring(context, scores).times_softcap_grad([p], [[s[i] for i in range(len(p))]])
    return dp_factor


def pack_p(context, p: list[Float32], scores: StepScores) -> list[Int32]:
    """Return P^T as the operand of dV: rounded, two elements per register."""
    p = p if scores.keep_bits is None else [x * scores.keep_bits.factor(i) for i, x in enumerate(p)]
    return pack(p, context.cfg.dtype)


def is_in_bounds(cfg, i: int, first: Int32, stop: Int32) -> Boolean:
    """True if the query of element i is in [first, stop), counted from the query of element 0."""
    query = i // 4 * 8 + i % 2
    is_in = query < stop
    return is_in & (query >= first) if cfg.has_right else is_in


def pack(x: list[Float32], dtype) -> list[Int32]:
    """Round to `dtype` and pack two elements per register."""
    return [pack_half(x[i], x[i + 1], dtype) for i in range(0, len(x), 2)]


def fill(operand: cute.Tensor, packed: list[Int32]) -> None:
    """Copy packed 16-bit pairs to the registers of a left operand."""
    pairs = cute.recast_tensor(operand, Int32)
    for i, pair in enumerate(packed):
        pairs[i] = pair


def store_ds(context, stage: Int32, panel: Int32 | int, packed: list[Int32]) -> None:
    """Store a consumer's dS to its panel in shared memory, a row per query; stmatrix transposes the 8 x 8 matrices of
    dS^T."""
    tile = context.cfg.ds_tile
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    # Lane l names row l % 8 of matrix l / 8: (first, second) 8 keys of 8 queries, then of the next 8.
    query, key = lane % 8 + lane // 16 * 8, warp % WARPS_PER_WARPGROUP * ROWS_PER_WARP + lane // 8 % 2 * 8
    coord = context.smem.address("dS") + stage * tile.nbytes + panel * tile.panel_bytes
    coord = coord + query * PANEL_ROW_BYTES + ((key // 8 ^ (query & 7)) << 4)
    for i in range(0, len(packed), 4):
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
            read_only_args=[coord + i // 4 * (16 * PANEL_ROW_BYTES), *packed[i : i + 4]],
        )


def clear_ds(context, stage: Int32, panel: Int32 | int) -> None:
    """Store zeros as a consumer's dS to its panel in shared memory."""
    tile = context.cfg.ds_tile
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    coord = context.smem.pointer("dS", Int32) + (stage * tile.nbytes + panel * tile.panel_bytes) // 4 + 4 * thread
    for i in range(tile.panel_bytes // (16 * WARPGROUP)):
        store_vec(coord + i * (4 * WARPGROUP), [Int32(0)] * 4)
