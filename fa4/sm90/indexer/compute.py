"""Compute role, consumers of one warpgroup with some rows each: products with all heads, ReLU, sum over heads.

A product is S^T, 64 keys by (row, head). A thread holds two keys and, of every eight (row, head) pairs, two
neighbouring ones: it adds up a quarter of the heads of each row, and four threads exchange the rest. The weights of its
quarter stay in registers.

Waits:   load_compute_Q.full, load_compute_K.full
Signals: load_compute_K.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...core.constant import Constant
from ...core.vec_io import load_floats
from ...pipeline.cursor import Cursor, Lane, consume
from ...pipeline.fragment import LANES_PER_ROW, ROWS_PER_THREAD, row_in_warp, row_registers
from ...pipeline.roles import ROWS_PER_WARP, WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..wgmma import ROWS
from ..wgmma_order import wait
from .context import Keys, ScoresContext, Work
from .load import key_row

PAIR = 2  # rows whose sums four threads exchange together


@cute.jit
def compute(context: ScoresContext):
    ends, work = context.ends("compute"), Work.here(context)
    if work.sequence <= work.last_sequence:
        consumer = Consumer(context, work)
        consume(ends.load_compute_Q, Lane(consumer.index, context.cfg.consumers)).wait()
        loop(consumer, work, consume(ends.load_compute_K))


@cute.jit
def loop(consumer: Consumer, work: Work, k: Cursor):
    for sequence in cutlass.range(work.sequence, work.last_sequence + 1, unroll=1):
        keys = Keys.of(consumer.context, work, sequence)
        outputs = consumer.outputs(keys)
        for i in cutlass.range(keys.blocks, unroll=1):
            k.wait()
            block_scores(consumer, keys, outputs, keys.first_block + i, k)
            k = k.next()


def block_scores(consumer: Consumer, keys: Keys, outputs: Outputs, block: Int32, k: Cursor) -> None:
    """Store the scores of a key block. Factors of keys are loaded while the first product is computed."""
    cfg = consumer.cfg
    consumer.start(0, k)
    of_parts = [block * cfg.tile_n + part * ROWS + consumer.key for part in range(cfg.parts)]
    scales = [k_scale(consumer, keys, key) if cfg.has_k_descale else Float32(1.0) for key in of_parts]
    for part, (key, scale) in enumerate(zip(of_parts, scales)):
        wait(0)
        if part + 1 == cfg.parts:
            k.arrive()
        store(consumer, outputs, key, scale)
        if part + 1 < cfg.parts:
            consumer.start(part + 1, k)


class Outputs(Constant):
    """Where a thread stores scores: of each pair of rows, or a single last one, the number of keys that its row sees (0
    if it has no row there), and the address of its scores."""

    def __init__(self, counts: list[Int32], pointers: list[cute.Pointer]) -> None:
        self.counts, self.pointers = counts, pointers


class Consumer(Constant):
    """Operands and registers of one consumer; created once. key: this thread's key of each 64, after the exchange.
    s: a product. weights: of each row."""

    def __init__(self, context: ScoresContext, work: Work) -> None:
        cfg, smem = context.cfg, context.smem
        self.context, self.cfg, self.kq = context, cfg, cfg.kq
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.index = warp // WARPS_PER_WARPGROUP
        self.first = work.first + self.index * cfg.tokens
        self.lane = cute.arch.lane_idx() % LANES_PER_ROW
        self.key = warp % WARPS_PER_WARPGROUP * ROWS_PER_WARP + row_in_warp(0) + self.lane // 2 * 8
        part_elements = ROWS * PANEL_ROW_BYTES * 8 // cfg.dtype.width
        keys = smem.pointer("K", cfg.dtype)
        self.k = [self.kq.a_at(keys + part * part_elements) for part in range(cfg.parts)]
        self.q = self.kq.b_at(smem.pointer("Q", cfg.dtype))
        self.s = self.kq.accumulator()
        self.weights = [self.load_weights(self.first + token) for token in range(cfg.tokens)]

    def load_weights(self, row: Int32) -> list[Float32]:
        """Load the weights of this thread's heads. A row past the last one gets those of the last; its scores are not
        stored."""
        weights = self.context.args.tensors.weights
        row = cutlass.min(row, weights.shape[0] - 1)
        source = weights.iterator + cute.crd2idx((row, self.lane * 2), weights.layout)
        return [x for i in range(0, self.cfg.heads, 8) for x in load_floats((source + i).align(8), 2)]

    def outputs(self, keys: Keys) -> Outputs:
        """Return where this thread stores scores of a sequence."""
        tensors, counts, pointers = self.context.args.tensors, [], []
        for token in range(0, self.cfg.tokens, PAIR):
            is_pair = token + 1 < self.cfg.tokens
            row = self.first + token + (self.lane % 2 if is_pair else 0)
            is_row = Boolean(row >= keys.first) & Boolean(row < keys.stop)
            if not is_pair:
                is_row = is_row & Boolean(self.lane % 2 == 0)
            row = Int32(cutlass.select_(is_row, row, keys.first))
            counts.append(Int32(cutlass.select_(is_row, tensors.counts[row], Int32(0))))
            own = row - self.context.args.range.first
            pointers.append(tensors.scores.iterator + cute.crd2idx((own, 0), tensors.scores.layout))
        return Outputs(counts, pointers)

    def start(self, part: int, k: Cursor) -> None:
        """Start S^T of 64 keys of a block and this consumer's rows."""
        q = self.q[None, None, None, self.index]
        self.kq.issue(self.s, self.k[part][None, None, None, k.stage], q, False)

    def sums(self, token: int) -> list[Float32]:
        """Return the sums over this thread's heads of a row, for its two keys."""
        result, count = [], self.cfg.heads // LANES_PER_ROW
        weights = self.weights[token]
        for r in range(ROWS_PER_THREAD):
            registers = row_registers(self.cfg.columns, r)[token * count : (token + 1) * count]
            total = Float32(0.0)
            for register, weight in zip(registers, weights):
                total = total + weight * cute.arch.fmax(self.s[register], Float32(0.0), nan=True)
            result.append(total)
        return result


def exchange(low: Float32, high: Float32, has_high: Boolean, offset: int) -> Float32:
    """Add what this thread and the one at distance `offset` hold of one number: `high` if `has_high`, else `low`."""
    own = Float32(cutlass.select_(has_high, high, low))
    other = Float32(cutlass.select_(has_high, low, high))
    return own + cute.arch.shuffle_sync_bfly(other, offset=offset)


def k_scale(consumer: Consumer, keys: Keys, key: Int32) -> Float32:
    """Return the factor of a key, past the last one that of the last."""
    key = cutlass.min(key, keys.count - 1)
    return consumer.context.args.tensors.k_descale[key_row(consumer.context, keys, key)]


@cute.jit
def store(consumer: Consumer, outputs: Outputs, key: Int32, scale: Float32):
    """Add up the scores of 64 keys and a consumer's rows, and store those that rows see. Each thread stores one score
    of each pair of rows."""
    for i in cutlass.range_constexpr(len(outputs.counts)):
        tokens = range(PAIR * i, min(PAIR * (i + 1), consumer.cfg.tokens))
        has_second = Boolean(consumer.lane // 2 == 1)
        of_keys = [consumer.sums(token) for token in tokens]
        both = [exchange(first, second, has_second, 2) for first, second in of_keys]
        if const_expr(len(both) == 1):
            both = [both[0], both[0]]
        score = exchange(both[0], both[1], Boolean(consumer.lane % 2 == 1), 1) * scale
        if key < outputs.counts[i]:
            target = outputs.pointers[i] + key
            cute.make_tensor(target, cute.make_layout(1))[0] = score
