"""Select kernel: lists of key blocks become lists of key rows, of which attention makes its page tables.

A warp reads a list in order, 32 keys at a time; a ballot tells each lane how many keys before its own are kept, and so
where its row goes. See `fa4.sparse.selection.selected_rows`, which computes the same in torch.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ...core.arguments import fake_numbers
from ...core.cache import page_at
from ...core.program import Program
from ...core.sequence import sequence_of
from ...runtime import jit
from ..launchers import SelectConfig

_WARP, _WARPS = 32, 4
_IN_FLIGHT = 4  # keys per lane whose blocks are loaded before any is used


class SelectTensors(NamedTuple):
    """indices (tokens, lists, blocks), counts (tokens, lists), others as in `fa4.sparse_attention`. Results: rows
    (tokens, lists, rows kept) and kept (tokens, lists). All int32."""

    indices: cute.Tensor
    counts: cute.Tensor  # or None
    cu_seqlens_q: cute.Tensor  # or None
    cu_seqlens_k: cute.Tensor  # or None
    seqused_k: cute.Tensor  # or None
    page_table: cute.Tensor  # or None
    rows: cute.Tensor
    kept: cute.Tensor


class SelectNumbers(NamedTuple):
    """first: number of the first of the tokens in the batch. queries, keys: of a padded sequence. heads: of k."""

    first: Int32
    queries: Int32
    keys: Int32
    window: Int32
    heads: Int32


class Query(NamedTuple):
    """sequence: of a query. position: as the keys are counted. end: number of the sequence's keys. base: row of its
    first key in k."""

    sequence: Int32
    position: Int32
    end: Int32
    base: Int32


class _Select(Program[SelectConfig]):
    @cute.jit
    def launch(self, x: SelectTensors, n: SelectNumbers, cfg: cutlass.Constexpr[SelectConfig], stream):
        lists = x.indices.shape[0] * x.indices.shape[1]
        self.kernel(x, n, cfg).launch(
            grid=(cute.ceil_div(lists, _WARPS), 1, 1), block=(_WARP * _WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: SelectTensors, n: SelectNumbers, cfg: cutlass.Constexpr[SelectConfig]):
        lane = cute.arch.lane_idx()
        warp = cute.arch.block_idx()[0] * _WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lists = x.indices.shape[1]
        if warp < x.indices.shape[0] * lists:
            token, number = warp // lists, warp % lists
            query = _query(x, n, n.first + token, cfg)
            indices, rows = x.indices[token, number, None], x.rows[token, number, None]
            blocks = Int32(cute.size(indices))
            if const_expr(cfg.has_counts):
                blocks = cutlass.min(x.counts[token, number], blocks)
            kept = Int32(0)
            total = blocks * cfg.granularity
            for start in cutlass.range(0, total, _WARP * _IN_FLIGHT, unroll=1):
                loaded = cute.make_rmem_tensor(_IN_FLIGHT, Int32)
                for i in cutlass.range_constexpr(_IN_FLIGHT):
                    key = start + i * _WARP + lane
                    block = Int32(-1)
                    if key < total:
                        block = indices[key // cfg.granularity]
                    loaded[i] = block
                for i in cutlass.range_constexpr(_IN_FLIGHT):
                    key = start + i * _WARP + lane
                    # A number past 2^31 / granularity would wrap: such a block is past every end.
                    row = cutlass.min(loaded[i], query.end) * cfg.granularity + key % cfg.granularity
                    is_kept = (loaded[i] >= 0) & (loaded[i] < query.end) & (row < query.end)
                    if const_expr(cfg.causal):
                        is_kept = is_kept & (row <= query.position)
                    if const_expr(cfg.has_window):
                        is_kept = is_kept & ((row > query.position) | (row < query.position - n.window))
                    kept = _keep(x, n, query, rows, number, row, Boolean(is_kept), kept, cfg)
            if const_expr(cfg.has_window):
                first = cutlass.max(query.position - n.window, 0)
                stop = cutlass.min(query.position + 1, query.end)
                for start in cutlass.range(first, stop, _WARP, unroll=1):
                    row = start + lane
                    kept = _keep(x, n, query, rows, number, row, Boolean(row < stop), kept, cfg)
            if lane == 0:
                x.kept[token, number] = cutlass.min(kept, Int32(cute.size(rows)))

    def fake_args(self, cfg: SelectConfig) -> tuple:
        def fake(rank: int, exists: bool = True) -> cute.Tensor | None:
            return jit.fake_tensor(Int32, rank, align=4) if exists else None

        tensors = SelectTensors(
            fake(3), fake(2, cfg.has_counts), fake(1, cfg.packed_q), fake(1, cfg.packed_k), fake(1, cfg.has_used),
            fake(2, cfg.page_size is not None), fake(3), fake(2),
        )  # fmt: skip
        return tensors, fake_numbers(SelectNumbers)


@cute.jit
def _query(x: SelectTensors, n: SelectNumbers, token: Int32, cfg: cutlass.Constexpr[SelectConfig]) -> Query:
    sequence, first, queries = token // n.queries, Int32(0), n.queries
    if const_expr(cfg.packed_q):
        sequence = sequence_of(x.cu_seqlens_q, token)
        first = x.cu_seqlens_q[sequence]
        queries = x.cu_seqlens_q[sequence + 1] - first
    else:
        first = sequence * n.queries
    end, base = n.keys, sequence * n.keys
    if const_expr(cfg.packed_k):
        base = x.cu_seqlens_k[sequence]
        end = x.cu_seqlens_k[sequence + 1] - base
    if const_expr(cfg.has_used):
        end = x.seqused_k[sequence]
    is_used = token < first + queries  # false past the last sequence
    end = Int32(cutlass.select_(is_used, end, Int32(0)))
    return Query(sequence, token - first + end - queries, end, base)


@cute.jit
def _keep(
    x: SelectTensors,
    n: SelectNumbers,
    query: Query,
    rows: cute.Tensor,
    number: Int32,
    row: Int32,
    is_kept: Boolean,
    kept: Int32,
    cfg: cutlass.Constexpr[SelectConfig],
) -> Int32:
    """Whole warp: write the lanes' rows that are kept; return how many are, with those before."""
    ballot = cute.arch.vote_ballot_sync(is_kept)
    place = kept + cute.arch.popc(ballot & ((Int32(1) << cute.arch.lane_idx()) - 1))
    if is_kept & (place < cute.size(rows)):
        where = query.base + row
        if const_expr(cfg.page_size is not None):
            page = page_at(x.page_table[query.sequence, None], row // cfg.page_size, Int32(1 << 24))
            where = page * cfg.page_size + row % cfg.page_size
        if const_expr(cfg.per_head):
            where = where * n.heads + number * n.heads // x.indices.shape[1]
        rows[place] = where
    return kept + cute.arch.popc(ballot)


KERNEL = _Select("select_rows")
