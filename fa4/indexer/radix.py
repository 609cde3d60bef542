"""Kernel of the exact top-k: one CTA selects from one row of scores, see `selection` for the order of scores.

1. A lower bound. From a sample of the row, the CTA finds a score that `topk` to twice as many scores of the row should
   reach (of a small `topk` a few times as many). Rows that fit in the candidates need no bound.
2. One pass over the row collects the scores from this bound on in shared memory, in any order: the candidates.
3. A radix select, 8 bits at a time, finds the last chosen score and how many of its equals are chosen. It reads the
   candidates or, if these are fewer than `topk` or do not fit, the row again. So the result is exact in any case.
4. Bit maps of the scores above it, and of its equals, put the result in the order of indices. Prefix sums over their
   words say which equals are chosen, and where each index goes.

Counts do not depend on the order of additions, so results repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ..core.constant import Constant
from ..core.lanes import inclusive_sum
from ..core.program import Program
from ..core.vec_io import bits, load_floats
from ..pipeline.roles import WARP
from ..pipeline.smem import Region, SmemMap
from ..runtime import jit
from ..runtime.device import Chip

THREADS = 512
WARPS = THREADS // WARP
VECTOR = 4  # scores of a load
BATCH = 4  # loads in flight of a thread
RADIX_BITS = 8
BINS = 1 << RADIX_BITS
LEAST, LARGEST = -(1 << 31), (1 << 31) - 1  # order keys

# Numbers that all threads share: candidates; digit and rest of a radix pass; chosen and equal scores so far.
CANDIDATES, DIGIT, REST, ABOVE, EQUAL = range(5)


@dataclass(frozen=True, slots=True)
class RadixConfig(Constant):
    """The fields are the compile key. keys: upper bound of a row's length. candidates: that fit. sample: scores that a
    bound is found from, at most half of the candidates."""

    keys: int
    candidates: int
    sample: int

    @staticmethod
    def of(columns: int, topk: int) -> RadixConfig:
        """Return the configuration of a call; powers of two, so that few kernels serve all lengths. A small sample is
        faster, but its bound is lower: more scores reach it."""
        keys = max(1 << max(columns - 1, 0).bit_length(), 1 << 13)
        candidates = min(max(1 << max(3 * topk - 1, 0).bit_length(), 1 << 11), 1 << 13)
        sample = candidates // 2
        if 3 * topk <= candidates:  # there is room for what a low bound lets through
            sample = min(sample, max(candidates // 8, 128 * keys // candidates))
        return RadixConfig(keys, candidates, sample)

    @property
    def words(self) -> int:
        """Words of a bit map."""
        return self.keys // 32

    @property
    def smem(self) -> SmemMap:
        return SmemMap(
            Region("keys", 4 * self.candidates),
            Region("indices", 4 * self.candidates),
            Region("above", 4 * self.words),
            Region("equal", 4 * self.words),
            Region("bins", 4 * BINS),
            Region("sums", 8 * WARPS),
            Region("shared", 32),
        )


class Row(NamedTuple):
    """One row. scores: a pointer, aligned to 16 bytes. count: scores in it."""

    scores: cute.Pointer
    count: Int32


class Memory(Constant):
    """Shared memory of a CTA, as tensors."""

    def __init__(self, cfg: RadixConfig) -> None:
        smem = cfg.smem
        self.cfg = cfg
        self.keys, self.indices, self.above, self.equal, self.bins, self.sums, self.shared = (
            cute.make_tensor(smem.pointer(name, Int32), cute.make_layout(smem.sizes[name] // 4)) for name in smem.sizes
        )


def order_key(score: Float32) -> Int32:
    """Return a signed integer in the order of the scores; NaN is the largest."""
    word = bits(score + 0.0)  # -0.0 becomes 0.0
    word = Int32(cutlass.select_(word < 0, word ^ LARGEST, word))
    return Int32(cutlass.select_(score == score, word, Int32(LARGEST)))


def thread_idx() -> Int32:
    return Int32(cute.arch.thread_idx()[0])


@cute.jit
def fill(target: cute.Tensor, count: Int32):
    """Write zeros."""
    for i in cutlass.range(thread_idx(), count, THREADS, unroll=1):
        target[i] = Int32(0)


@cute.jit
def sample(memory: cutlass.Constexpr[Memory], row: Row, count: cutlass.Constexpr[int]):
    """Make `count` scores of the row, equal steps apart, the candidates."""
    step = row.count // count
    for i in cutlass.range(thread_idx(), count, THREADS, unroll=1):
        memory.keys[i] = order_key(load_floats(row.scores + i * step, 1)[0])


@cute.jit
def collect(memory: cutlass.Constexpr[Memory], row: Row, bound: Int32):
    """Make the scores from `bound` on the candidates, as far as they fit, and count them all."""
    last = (row.count - 1) // VECTOR * VECTOR
    for first in cutlass.range(VECTOR * thread_idx(), row.count, VECTOR * THREADS * BATCH, unroll=1):
        starts = [first + VECTOR * THREADS * i for i in range(BATCH)]
        # All loads come first: the compiler would not move them before the atomic additions.
        batch = [load_floats((row.scores + cutlass.min(start, last)).align(16), VECTOR) for start in starts]
        for i in cutlass.range_constexpr(BATCH * VECTOR):
            key, index = order_key(batch[i // VECTOR][i % VECTOR]), starts[i // VECTOR] + i % VECTOR
            if Boolean(key >= bound) & Boolean(index < row.count):
                slot = cute.arch.atomic_add(memory.shared.iterator + CANDIDATES, Int32(1))
                if slot < memory.cfg.candidates:
                    memory.keys[slot] = key
                    memory.indices[slot] = index


@cute.jit
def count_digit(memory: cutlass.Constexpr[Memory], key: Int32, prefix: Int32, shift: cutlass.Constexpr[int]):
    """Count a key in the bin of its digit if its higher digits are those of the prefix."""
    word = key ^ LEAST  # unsigned order
    has_prefix = Boolean(True)
    if const_expr(shift + RADIX_BITS < 32):
        has_prefix = Boolean((word ^ prefix) >> (shift + RADIX_BITS) == 0)
    if has_prefix:
        cute.arch.atomic_add(memory.bins.iterator + ((word >> shift) & (BINS - 1)), Int32(1))


@cute.jit
def choose_digit(memory: cutlass.Constexpr[Memory], rest: Int32):
    """First warp: find the digit of the `rest`-th largest key, and how many of the keys with this digit are needed."""
    lane, each = cute.arch.lane_idx(), BINS // WARP
    last = BINS - 1 - lane * each  # a lane has the bins from here downwards
    counts = [memory.bins[last - i] for i in range(each)]
    own = counts[0]
    for i in cutlass.range_constexpr(1, each):
        own = own + counts[i]
    before = inclusive_sum(own) - own
    for i in cutlass.range_constexpr(each):
        if Boolean(before < rest) & Boolean(before + counts[i] >= rest):
            memory.shared[DIGIT] = last - i
            memory.shared[REST] = rest - before
        before = before + counts[i]


@cute.jit
def select_key(
    memory: cutlass.Constexpr[Memory],
    row: Row,
    count: Int32,
    rank: Int32,
    from_row: cutlass.Constexpr[bool],
):
    """Return the `rank`-th largest key and how many of its equals are among the first `rank`. Of `count` candidates, or
    of all scores of the row."""
    prefix, rest = Int32(0), rank
    for digit in cutlass.range_constexpr(32 // RADIX_BITS):
        shift = 32 - RADIX_BITS * (digit + 1)
        cute.arch.sync_threads()
        fill(memory.bins, Int32(BINS))
        cute.arch.sync_threads()
        if const_expr(from_row):
            for i in cutlass.range(thread_idx(), row.count, THREADS, unroll=1):
                count_digit(memory, order_key(load_floats(row.scores + i, 1)[0]), prefix, shift)
        else:
            for i in cutlass.range(thread_idx(), count, THREADS, unroll=1):
                count_digit(memory, memory.keys[i], prefix, shift)
        cute.arch.sync_threads()
        if thread_idx() < WARP:
            choose_digit(memory, rest)
        cute.arch.sync_threads()
        prefix = prefix | memory.shared[DIGIT] << shift
        rest = memory.shared[REST]
    return prefix ^ LEAST, rest


@cute.jit
def mark(memory: cutlass.Constexpr[Memory], key: Int32, index: Int32, last: Int32):
    """Set the bit of a score in the map of those above the last chosen one, or in that of its equals."""
    bit = Int32(1) << index % 32
    if key > last:
        cute.arch.atomic_or(memory.above.iterator + index // 32, bit)
    elif key == last:
        cute.arch.atomic_or(memory.equal.iterator + index // 32, bit)


@cute.jit
def write_indices(memory: cutlass.Constexpr[Memory], count: Int32, ties: Int32, target: cute.Tensor):
    """Write the indices of the bits in ascending order; of the equals, the first `ties`."""
    warp, lane = thread_idx() // WARP, cute.arch.lane_idx()
    words = cute.ceil_div(count, 32)
    for first in cutlass.range(0, words, THREADS, unroll=1):
        word = first + thread_idx()
        above, equal = Int32(0), Int32(0)
        if word < words:
            above, equal = memory.above[word], memory.equal[word]
        counts = cute.arch.popc(above), cute.arch.popc(equal)
        sums = inclusive_sum(counts[0]), inclusive_sum(counts[1])
        if lane == WARP - 1:
            memory.sums[warp] = sums[0]
            memory.sums[WARPS + warp] = sums[1]
        cute.arch.sync_threads()
        before_above = memory.shared[ABOVE] + sums[0] - counts[0]
        before_equal = memory.shared[EQUAL] + sums[1] - counts[1]
        for i in cutlass.range_constexpr(WARPS):
            before_above = before_above + Int32(cutlass.select_(i < warp, memory.sums[i], Int32(0)))
            before_equal = before_equal + Int32(cutlass.select_(i < warp, memory.sums[WARPS + i], Int32(0)))
        cute.arch.sync_threads()
        if thread_idx() == THREADS - 1:
            memory.shared[ABOVE] = before_above + counts[0]
            memory.shared[EQUAL] = before_equal + counts[1]
        slot = before_above + cutlass.min(before_equal, ties)
        taken = cutlass.min(cutlass.max(ties - before_equal, 0), counts[1])
        for _ in cutlass.range(taken, unroll=1):
            lowest = equal & -equal
            above, equal = above | lowest, equal ^ lowest
        for _ in cutlass.range(counts[0] + taken, unroll=1):
            lowest = above & -above
            target[slot] = 32 * word + cute.arch.popc(lowest - 1)
            above, slot = above ^ lowest, slot + 1
        cute.arch.sync_threads()


@cute.jit
def select_row(memory: cutlass.Constexpr[Memory], row: Row, topk: Int32, target: cute.Tensor):
    """Write the `topk` chosen indices of a row with more scores than that."""
    cfg = memory.cfg
    words = cute.ceil_div(row.count, 32)
    fill(memory.above, words)
    fill(memory.equal, words)
    if thread_idx() < 8:
        memory.shared[thread_idx()] = Int32(0)
    bound = Int32(LEAST)
    if row.count > cfg.candidates:
        size = cfg.sample
        # Of the sample, as many are above the bound as the row's share, and four standard deviations more.
        share = Float32(topk) * (size / Float32(row.count))
        rank = Int32(share + 4.0 * cute.math.sqrt(share)) + 2
        if rank < size:
            sample(memory, row, size)
            bound, _ = select_key(memory, row, Int32(size), rank, False)
    cute.arch.sync_threads()
    collect(memory, row, bound)
    cute.arch.sync_threads()
    found = memory.shared[CANDIDATES]
    if found >= topk and found <= cfg.candidates:
        last, ties = select_key(memory, row, found, topk, False)
        for i in cutlass.range(thread_idx(), found, THREADS, unroll=1):
            mark(memory, memory.keys[i], memory.indices[i], last)
        cute.arch.sync_threads()
        write_indices(memory, row.count, ties, target)
    else:
        last, ties = select_key(memory, row, found, topk, True)
        for i in cutlass.range(thread_idx(), row.count, THREADS, unroll=1):
            mark(memory, order_key(load_floats(row.scores + i, 1)[0]), i, last)
        cute.arch.sync_threads()
        write_indices(memory, row.count, ties, target)


class _TopK(Program[RadixConfig]):
    @cute.jit
    def launch(
        self, scores: cute.Tensor, counts: cute.Tensor, indices: cute.Tensor, cfg: cutlass.Constexpr[RadixConfig],
        stream,
    ):  # fmt: skip
        """scores: (rows, columns) float32; rows start at multiples of 16 bytes, and may be read up to the next one.
        counts: (rows,) int32. indices: (rows, topk) int32."""
        grid, smem = (scores.shape[0], 1, 1), cfg.smem.nbytes
        self.kernel(scores, counts, indices, cfg).launch(grid=grid, block=(THREADS, 1, 1), smem=smem, stream=stream)

    @cute.kernel
    def kernel(
        self, scores: cute.Tensor, counts: cute.Tensor, indices: cute.Tensor, cfg: cutlass.Constexpr[RadixConfig]
    ):
        row_index = Int32(cute.arch.block_idx()[0])
        count, topk = cutlass.min(counts[row_index], scores.shape[1]), indices.shape[1]
        pointer = scores.iterator + cute.crd2idx((row_index, 0), scores.layout)
        target = indices[(row_index, None)]
        if count <= topk:
            for i in cutlass.range(thread_idx(), topk, THREADS, unroll=1):
                target[i] = Int32(cutlass.select_(i < count, i, Int32(-1)))
        else:
            select_row(Memory(cfg), Row(pointer, count), topk, target)

    def fake_args(self, cfg: RadixConfig) -> tuple:
        return jit.fake_tensor(Float32, 2), jit.fake_tensor(Int32, 1, align=4), jit.fake_tensor(Int32, 2, align=4)


_PROGRAM = _TopK("indexer.topk")


def launcher(cfg: RadixConfig, chip: Chip) -> jit.Launcher:
    """Return a launcher that takes (scores, counts, indices), see `_TopK.launch`."""
    return _PROGRAM.launcher(cfg, chip)
