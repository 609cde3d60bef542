"""Select kernel: lists of key blocks become lists of key rows, of which attention makes its page tables.

A CTA has a list. It marks the keys of the list's blocks in a bit map, adds those of the window, and writes the rows of
the marked keys: in ascending order, each once. So kernels that run queries side by side gather near rows at a time, and
add their gradients to near rows. Longer sequences have several bit maps, one after the other. See
`fa4.sparse.selection.selected_rows`, which computes the same in torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...core.arguments import fake_numbers
from ...core.cache import page_at
from ...core.lanes import inclusive_sum
from ...core.program import Program
from ...core.sequence import sequence_of
from ...pipeline.roles import WARP
from ...pipeline.smem import Region, SmemMap
from ...runtime import jit
from ..launchers import SelectConfig

_WARPS = 8
_THREADS = WARP * _WARPS
_WORDS = 4096  # of a bit map, 32 keys each
_IN_FLIGHT = 4  # entries of a list that a thread loads before it uses any
_SMEM = SmemMap(Region("marked", 4 * _WORDS), Region("sums", 4 * _WARPS))


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
        self.kernel(x, n, cfg).launch(grid=(lists, 1, 1), block=(_THREADS, 1, 1), smem=_SMEM.nbytes, stream=stream)

    @cute.kernel
    def kernel(self, x: SelectTensors, n: SelectNumbers, cfg: cutlass.Constexpr[SelectConfig]):
        thread = cute.arch.thread_idx()[0]
        lists = x.indices.shape[1]
        token, number = cute.arch.block_idx()[0] // lists, cute.arch.block_idx()[0] % lists
        query = _query(x, n, n.first + token, cfg)
        stop = query.end
        if const_expr(cfg.causal):
            stop = cutlass.min(query.position + 1, stop)
        marked, sums = (
            cute.make_tensor(_SMEM.pointer(name, Int32), nbytes // 4) for name, nbytes in _SMEM.sizes.items()
        )
        kept = Int32(0)
        for first in cutlass.range(0, stop, 32 * _WORDS, unroll=1):
            words = cutlass.min(cute.ceil_div(stop - first, 32), _WORDS)
            for word in cutlass.range(thread, words, _THREADS, unroll=1):
                marked[word] = Int32(0)
            cute.arch.sync_threads()
            _mark(x, token, number, query, marked, first, words, cfg)
            cute.arch.sync_threads()
            kept = _write(x, n, query, marked, sums, token, number, first, words, stop, kept, cfg)
        if thread == 0:
            x.kept[token, number] = cutlass.min(kept, x.rows.shape[2])

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
def _mark(
    x: SelectTensors,
    token: Int32,
    number: Int32,
    query: Query,
    marked: cute.Tensor,
    first: Int32,
    words: Int32,
    cfg: cutlass.Constexpr[SelectConfig],
):
    """Set the bits of the list's keys from `first` on. A thread sets as many at a time as a word has of a block."""
    at_a_time = math.gcd(cfg.granularity, 32)
    steps = cfg.granularity // at_a_time
    indices = x.indices[token, number, None]
    blocks = Int32(cute.size(indices))
    if const_expr(cfg.has_counts):
        blocks = cutlass.min(x.counts[token, number], blocks)
    blocks_of_sequence = cute.ceil_div(query.end, cfg.granularity)
    for start in cutlass.range(cute.arch.thread_idx()[0], blocks * steps, _THREADS * _IN_FLIGHT, unroll=1):
        loaded = cute.make_rmem_tensor(_IN_FLIGHT, Int32)
        for i in cutlass.range_constexpr(_IN_FLIGHT):
            block = Int32(-1)
            if start + i * _THREADS < blocks * steps:
                block = indices[(start + i * _THREADS) // steps]
            loaded[i] = block
        for i in cutlass.range_constexpr(_IN_FLIGHT):
            if (loaded[i] >= 0) & (loaded[i] < blocks_of_sequence):
                key = loaded[i] * cfg.granularity + (start + i * _THREADS) % steps * at_a_time - first
                if (key >= 0) & (key < 32 * words):
                    bits = Int32(-1) if const_expr(at_a_time == 32) else Int32((1 << at_a_time) - 1) << key % 32
                    cute.arch.atomic_or(marked.iterator + key // 32, bits)


def _bits_below(count: Int32) -> Int32:
    """Return a word whose lowest `count` bits are set; none if that is negative, all from 32 on."""
    some = (Int32(1) << cutlass.min(cutlass.max(count, 0), 31)) - 1
    return Int32(cutlass.select_(count >= 32, Int32(-1), some))


@cute.jit
def _kept_bits(
    marked: Int32, first: Int32, query: Query, stop: Int32, window: Int32, cfg: cutlass.Constexpr[SelectConfig]
) -> Int32:
    """Return the bits of keys that the query attends to, of the 32 from `first` on."""
    bits = marked & _bits_below(stop - first)
    if const_expr(cfg.has_window):
        upto = cutlass.min(query.position + 1, query.end) - first
        bits = bits | (_bits_below(upto) & ~_bits_below(query.position - window - first))
    return bits


@cute.jit
def _write(
    x: SelectTensors,
    n: SelectNumbers,
    query: Query,
    marked: cute.Tensor,
    sums: cute.Tensor,
    token: Int32,
    number: Int32,
    first: Int32,
    words: Int32,
    stop: Int32,
    kept: Int32,
    cfg: cutlass.Constexpr[SelectConfig],
) -> Int32:
    """Write the rows of the keys that the query attends to; return how many there are, with the `kept` before. A warp
    has a stretch of words, and writes after the rows of the warps before it."""
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rows = x.rows[token, number, None]
    stretch = cute.ceil_div(words, _THREADS) * WARP
    start = warp * stretch
    end = cutlass.min(start + stretch, words)
    own = Int32(0)
    for word in cutlass.range(start + lane, end, WARP, unroll=1):
        bits = _kept_bits(marked[word], first + 32 * word, query, stop, n.window, cfg)
        marked[word] = bits  # this lane reads it again
        own = own + cute.arch.popc(bits)
    own = cute.arch.warp_reduction_sum(own)
    if lane == 0:
        sums[warp] = own
    cute.arch.sync_threads()
    place, total = kept, kept
    for i in cutlass.range_constexpr(_WARPS):
        place = place + Int32(cutlass.select_(i < warp, sums[i], Int32(0)))
        total = total + sums[i]
    for base in cutlass.range(start, end, WARP, unroll=1):
        bits = Int32(0)
        if base + lane < end:
            bits = marked[base + lane]
        count = cute.arch.popc(bits)
        upto = inclusive_sum(count)
        slot = place + upto - count
        for _ in cutlass.range(count, unroll=1):
            lowest = bits & -bits
            row = first + 32 * (base + lane) + cute.arch.popc(lowest - 1)
            if slot < cute.size(rows):
                rows[slot] = _row_in_memory(x, n, query, number, row, cfg)
            bits, slot = bits ^ lowest, slot + 1
        place = place + cute.arch.shuffle_sync(upto, WARP - 1)
    cute.arch.sync_threads()  # the bit map and sums may be written again
    return total


@cute.jit
def _row_in_memory(
    x: SelectTensors, n: SelectNumbers, query: Query, number: Int32, row: Int32, cfg: cutlass.Constexpr[SelectConfig]
) -> Int32:
    where = query.base + row
    if const_expr(cfg.page_size is not None):
        page = page_at(x.page_table[query.sequence, None], row // cfg.page_size, Int32(1 << 24))
        where = page * cfg.page_size + row % cfg.page_size
    if const_expr(cfg.per_head):
        where = where * n.heads + number * n.heads // x.indices.shape[1]
    return where


KERNEL = _Select("select_rows")
