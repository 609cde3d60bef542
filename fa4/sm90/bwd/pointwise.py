"""Pointwise part of a step: P and dS with all kinds of masks and scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...bwd.device.captured_grads import CapturedGrads
from ...core.constant import Constant
from ...core.fragment_coords import FragmentCoords
from ...core.fragment_values import FragmentValues
from ...core.scoring import Scoring
from ...core.traced import bind
from ...core.vec_io import store_vec
from ...pipeline.fragment import LANES_PER_ROW, first_column, row_registers
from .common.config import WARPGROUP
from .common.pointwise import KeepBits, Statistic, keep_bits_at, own_keys, p_of, pack, query_bounds, query_of
from .common.work import Sm90BackwardWork, StepCoord
from .context import Sm90BackwardContext


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


def step_scores(context: Sm90BackwardContext, work: Sm90BackwardWork, coord: StepCoord, is_partial: bool) -> StepScores:
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


def by_key(s: Any, queries: int) -> list[list]:
    """Return elements, or values derived from them, grouped by this thread's keys."""
    return [[s[i] for i in row_registers(queries, r)] for r in range(2)]


def to_accumulator_order(grouped: list[list]) -> list:
    """Return elements grouped by key in accumulator order."""
    return [grouped[i // 2 % 2][query_of(i)] for i in range(2 * len(grouped[0]))]


def mask_missing(x: list[Float32], work: Sm90BackwardWork) -> list[Float32]:
    """Return the elements with -inf for keys that do not exist."""
    values = cute.make_rmem_tensor(len(x), Float32)
    for i, value in enumerate(x):
        values[i] = value
    _mask_missing(values, work)
    return [values[i] for i in range(len(x))]


@cute.jit
def _mask_missing(x: cute.Tensor, work: Sm90BackwardWork):
    """Mask in place; only the CTA of the last keys has missing keys."""
    if (work.n_block + 1) * work.mask.tile_n > work.k.count:
        keys = own_keys(work)
        for i in cutlass.range_constexpr(cute.size(x)):
            x[i] = Float32(cutlass.select_(keys[i // 2 % 2] < work.k.count, x[i], -Float32.inf))


def scoring(context: Sm90BackwardContext, scores: StepScores) -> Scoring:
    """Return the stages that the scores of a step pass through."""
    over_cap = context.args.scale_over_cap if context.cfg.has_softcap else None
    return Scoring(over_cap, scores.score, scores.mask)


def compute_p(context: Sm90BackwardContext, s: cute.Tensor, minus_lse: Statistic, scores: StepScores) -> list[Float32]:
    """Return P^T. With softcap or score_mod, also replace `s` by the unmasked logits."""
    cfg, stages = context.cfg, scoring(context, scores)
    for i, x in enumerate(logits_of(stages, s, cfg.tile_m)):
        s[i] = x
    x = to_accumulator_order(stages.masked(by_key(s, cfg.tile_m), lambda r, c: minus_lse[c]))
    if scores.sparse_work is not None:
        x = mask_missing(x, scores.sparse_work)
    return p_of(context, x, minus_lse, scores.bounds)


def logits_of(stages: Scoring, s: cute.Tensor, queries: int) -> list[Float32]:
    """Return a step's logits, unmasked. Softcap is elementwise, so it takes them in accumulator order."""
    if stages.score_mod is not None:
        return to_accumulator_order(stages.logits(by_key(s, queries)))
    (logits,) = stages.logits([[s[i] for i in range(cute.size(s))]])
    return logits


def compute_ds(
    context: Sm90BackwardContext,
    s: cute.Tensor,
    p: list[Float32],
    minus_delta: Statistic,
    dp: cute.Tensor,
    scores: StepScores,
) -> list[Int32]:
    """Return dS^T, rounded, two elements per register. s: from `compute_p`."""
    stages = scoring(context, scores)
    (p,) = stages.times_softcap_grad([p], [[s[i] for i in range(len(p))]])
    grads = [dp[i] if scores.keep_bits is None else dp[i] * scores.keep_bits.factor(i) for i in range(len(p))]
    ds = [x * (grads[i] + minus_delta[query_of(i)]) for i, x in enumerate(p)]
    p_by_key = by_key(p, context.cfg.tile_m)
    ds = to_accumulator_order(stages.score_grads(p_by_key, by_key(ds, context.cfg.tile_m)))
    if scores.captured_grads is not None:
        scores.captured_grads.add(scores.score, p_by_key)
    return pack(ds, context.cfg.dtype)


def pack_p(context: Sm90BackwardContext, p: list[Float32], scores: StepScores) -> list[Int32]:
    """Return P^T as the operand of dV: rounded, two elements per register."""
    p = p if scores.keep_bits is None else [x * scores.keep_bits.factor(i) for i, x in enumerate(p)]
    return pack(p, context.cfg.dtype)


def clear_ds(context: Sm90BackwardContext, stage: Int32, panel: Int32 | int) -> None:
    """Store zeros as a consumer's dS to its panel in shared memory."""
    tile = context.cfg.ds_tile
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    coord = context.smem.pointer("dS", Int32) + (stage * tile.nbytes + panel * tile.panel_bytes) // 4 + 4 * thread
    for i in range(tile.panel_bytes // (16 * WARPGROUP)):
        store_vec(coord + i * (4 * WARPGROUP), [Int32(0)] * 4)
