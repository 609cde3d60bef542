"""Pointwise part of a step that both kernels share: row statistics, P from logits, dropout, dS to shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ....core.constant import Constant
from ....core.dropout import Dropout, apply_dropout
from ....core.vec_io import load_floats, pack_half
from ....mods.ir.dropout import KEYS
from ....pipeline.fragment import LANES_PER_ROW, first_column, row_in_warp
from ....pipeline.roles import ROWS_PER_WARP, WARPS_PER_WARPGROUP
from ....pipeline.smem import PANEL_ROW_BYTES
from .context import Sm90StepsContext
from .work import Sm90BackwardWork

PAIR = 2 * KEYS  # queries: the bits of 16 keys for two queries fill a word


def own_keys(work: Sm90BackwardWork) -> tuple[Int32, Int32]:
    """Return this thread's two keys."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    key = work.n_block * work.mask.tile_n + warp * ROWS_PER_WARP
    return key + row_in_warp(0), key + row_in_warp(1)


def query_bounds(work: Sm90BackwardWork, m_block: Int32) -> list[tuple[Int32, Int32]]:
    """Return the range [first, stop) of queries that see each of this thread's two keys, counted from this thread's
    first query of the block."""
    query = m_block * work.mask.tile_m + first_column()
    bounds = [work.mask.queries(key) for key in own_keys(work)]
    return [(first - query, stop - query) for first, stop in bounds]


def query_of(i: int) -> int:
    """Return which of this thread's queries accumulator element i belongs to; a thread has two of every 8."""
    return i // 4 * 2 + i % 2


def rows_of(context: Sm90StepsContext, stage: Int32) -> cute.Pointer:
    """Return a pointer to this thread's first -lse * log2(e) of a step's queries; -delta is tile_m floats behind."""
    return context.smem.pointer("rows", Float32) + (stage * (2 * context.cfg.tile_m) + 2 * first_column())


class Statistic:
    """Statistic of this thread's queries; of every 16 queries its four are contiguous, see `ThreadOrderedBlocks`.
    Loaded in advance if registers can hold all, else four at a time at their first use."""

    def __init__(self, pointer: cute.Pointer, cfg) -> None:
        self.pointer = pointer
        self.loaded: dict[int, Any] = {}
        if cfg.statistics_ahead:
            for first in range(0, cfg.tile_m // 4, 4):
                self[first]

    def __getitem__(self, query: int) -> Float32:
        first = query // 4 * 4
        if first not in self.loaded:
            self.loaded[first] = load_floats(self.pointer + 4 * first, 4)
        return self.loaded[first][query - first]


def keep_bits_at(context: Sm90StepsContext, work: Sm90BackwardWork, head: Int32, m_block: Int32) -> KeepBits | None:
    """Return the keep bits of a step, or None without dropout."""
    cfg = context.cfg
    dropout = Dropout.of(cfg.mods, context.args.mods, work.batch, head)
    return None if dropout is None else KeepBits.of(dropout, m_block * cfg.tile_m, cfg.tile_m, own_keys(work)[0])


def p_of(
    context: Sm90StepsContext, logits: list[Float32], minus_lse: Statistic, bounds: list[tuple[Int32, Int32]] | None
) -> list[Float32]:
    """Return P^T. bounds: see `query_bounds`; None if no query misses a key."""
    p = []
    for i, logit in enumerate(logits):
        exponent = logit * context.args.scale_log2 + minus_lse[query_of(i)]
        if bounds is not None:
            exponent = cutlass.select_(is_in_bounds(context.cfg, i, *bounds[i // 2 % 2]), exponent, -Float32.inf)
        p.append(cute.math.exp2(exponent, fastmath=True))
    return p


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


def store_ds(context: Sm90StepsContext, stage: Int32, panel: Int32 | int, packed: list[Int32]) -> None:
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


@dataclass(frozen=True)
class KeepBits(Constant):
    """Keep bits of dropout. A warp has 16 keys; a thread has two of them, and the same two of every 8 queries. Of a
    step it has one word per query q of the thread among the first 32 of every 64. Bits 0 and 8 are its two keys with
    query q, bits 16 and 24 its keys with query q + 32."""

    packed: list[Int32]
    scale: Float32

    @staticmethod
    def of(dropout: Dropout, query: Int32, count: int, key: Int32) -> KeepBits:
        """Return the keep bits of `count` queries from `query` on, a multiple of 64. key: this thread's first key.

        Each thread computes the words of the query with its lane number in every 32, and gets the words of its own
        queries by shuffles.
        """
        lane, block = cute.arch.lane_idx(), key // KEYS
        upper = Uint32(key - row_in_warp(0)) % KEYS  # 16 if the warp has the second half of the block's keys
        packed = []
        for first in range(0, count, PAIR):
            low, high = (Uint32(dropout.word(query + (first + i * KEYS + lane), block)) for i in range(2))
            both = ((low >> upper) & Uint32(0xFFFF)) | ((high >> upper) << Uint32(16))
            for column in range(0, KEYS, 8):
                for i in range(2):
                    word = cute.arch.shuffle_sync(Int32(both), offset=first_column() + (column + i))
                    packed.append(Int32(Uint32(word) >> Uint32(lane // LANES_PER_ROW)))
        return KeepBits(packed, dropout.scale)

    def factor(self, i: int) -> Float32:
        """Return the factor of P and dP at accumulator element i: 1 / (1 - p), or 0 if dropped."""
        return apply_dropout(*self.bit(i), self.scale)

    def bit(self, i: int) -> tuple[list[Int32], int]:
        """Return the word of accumulator element i and the position of its bit."""
        group, of_pair = divmod(i // 4, PAIR // 8)  # octets of queries
        group = group * (KEYS // 8) + of_pair % (KEYS // 8)
        return [self.packed[2 * group + i % 2]], 16 * (of_pair // (KEYS // 8)) + 8 * (i // 2 % 2)
