"""Products of e2m1: scales of 16 numbers of q, k and v, and the rounding of P.

Scales are words of four: of 64 columns of a row of Q or K, of 64 keys of a column of V. Those of a key block are loaded
to shared memory beside K and V (`plan.arranged`); those of Q are loaded to registers. Lane t of a quad has the words of
keys 16 u + 4 t + 2 w + e of 32, see `mma`, and those of columns 32 i + 8 t + g of V, where g is the quad.

P: a row's largest P is 2688 when O was rescaled last, which is at each growth of the maximum. Sixteen keys have a
scale, their largest P / 6, rounded to e4m3, at least 2^-9. So the largest P is exactly 6 x 448. A P of at most 2^-11,
2^-22.4 of the row's largest, becomes 0. Instead of P, exponentials are P / scale: the logarithm of the scale, which
follows from the largest score, is a part of the exponent.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8

from ...core.fragment_coords import FragmentCoords
from ...core.vec_io import load_vec
from ...fwd.device.load import load_block
from ...fwd.device.softmax import BlockScores, Softmax, reduce_in_chains
from ...fwd.device.work import Work
from ...pipeline.cursor import Cursor
from ...pipeline.fragment import ROWS_PER_THREAD, row_registers
from ...pipeline.tma import bulk_load
from ...runtime import nvfp4
from ..mma import KEY_ORDER, ROWS_OF_MATRIX, Scale, first_key
from ..product import OF_E2M1, SCALES_OF_WORD
from .block_scales import LoadedScales
from .config import E2M1_COLUMNS
from .context import Sm120ForwardContext

NUMBERS = 8  # of a register of P
_LOG2_LARGEST = 2.584962500721156  # 6, the largest number of e2m1


class E2m1Scales(LoadedScales):
    """Scales of a thread: of its row of Q, of K and V of a key block, and of P, which the softmax writes."""

    def __init__(self, context: Sm120ForwardContext) -> None:
        super().__init__(context)
        cfg, self.smem = self.cfg, context.smem
        self.steps, self.steps_of_keys = OF_E2M1.steps(cfg.head_dim), OF_E2M1.steps(cfg.tile_n)
        self.words_of_v = -(-cfg.head_dim_v // E2M1_COLUMNS)  # of a step
        self.q = cute.make_rmem_tensor(self.steps, Int32)
        self.k = cute.make_rmem_tensor(self.steps * (cfg.tile_n // E2M1_COLUMNS), Int32)
        self.v = cute.make_rmem_tensor(self.steps_of_keys * self.words_of_v, Int32)
        self.p = cute.make_rmem_tensor(self.steps_of_keys, Int32)

    def load_q(self, work: Work, first_row: Int32) -> None:
        """first_row: of this warp, as a row of the sequence."""
        self._load_words(self.q, 0, self.row_of_q(self.tensors.q_scales, work, first_row))

    def ready_k(self, stage: Int32) -> None:
        cfg = self.cfg
        key, of_key = self.quad // 4 * 16 + self.lane * 4 + self.quad % 4, SCALES_OF_WORD * self.steps
        first = self.smem.pointer("K scales", Uint8) + stage * cfg.scale_bytes[0] + key * of_key
        for i in range(cfg.tile_n // E2M1_COLUMNS):
            self._load_words(self.k, i * self.steps, first + i * (E2M1_COLUMNS * of_key))

    def ready_v(self, stage: Int32) -> None:
        column = self.lane * ROWS_OF_MATRIX + self.quad
        first = self.smem.pointer("V scales", Uint8) + stage * self.cfg.scale_bytes[1] + column * SCALES_OF_WORD
        for i in range(self.steps_of_keys * self.words_of_v):
            self.v[i] = load_vec(first + i * (E2M1_COLUMNS * SCALES_OF_WORD), 1)[0]

    def of_q(self, step: int) -> Scale:
        return Scale(self.q[step])

    def of_k(self, step: int, n: int) -> Scale:
        return Scale(self.k[n // E2M1_COLUMNS * self.steps + step], lane=n // ROWS_OF_MATRIX % SCALES_OF_WORD)

    def of_p(self, step: int) -> Scale:
        return Scale(self.p[step])

    def of_v(self, step: int, n: int) -> Scale:
        return Scale(self.v[step * self.words_of_v + n // E2M1_COLUMNS], lane=n // ROWS_OF_MATRIX % SCALES_OF_WORD)

    def _load_words(self, words: cute.Tensor, first: int, ptr: cute.Pointer) -> None:
        for step, word in enumerate(load_vec(ptr, self.steps)):
            words[first + step] = word


class E2m1Softmax(Softmax):
    """Softmax whose P is divided by the scales of 16 keys. p_scales: words of the scales, of each step over keys."""

    def __init__(self, context: Sm120ForwardContext, p_scales: cute.Tensor):
        super().__init__(context)
        self.p_scales: Any = p_scales
        # Of the words of both halves of a quad, the bytes of the row whose scales this lane passes.
        row = cute.arch.lane_idx() % ROWS_PER_THREAD
        self.selector = Int32(cutlass.select_(row == 0, Int32(0x5140), Int32(0x7362)))

    def coords(self, first: Int32, count: int) -> FragmentCoords:
        return FragmentCoords(self.rows, first + first_key(), count, **KEY_ORDER)

    def columns_below(self, limit: Int32) -> Int32:
        coords = FragmentCoords((), Int32(0), 0, **KEY_ORDER)
        return cutlass.max(coords.below(limit - first_key()), 0)

    def softmax_step(self, s: cute.Tensor, scores: BlockScores, is_masked: bool) -> Boolean:
        rows = self.masked_scores(s, scores, is_masked)
        largest = [
            [reduce_in_chains(x[i : i + NUMBERS], cute.arch.fmax) for i in range(0, len(x), NUMBERS)] for x in rows
        ]
        has_grown = self.raise_maxima([reduce_in_chains(x, cute.arch.fmax) for x in largest])
        codes = [self._write_row(s, r, x, largest[r], is_masked) for r, x in enumerate(rows)]
        for step in range(OF_E2M1.steps(self.context.cfg.tile_n)):
            word = Int32(0)  # of keys behind those of s
            if step < len(codes[0]):
                own = codes[0][step] | codes[1][step] << 16
                other = cute.arch.shuffle_sync_bfly(own, offset=2, mask=-1, mask_and_clamp=31)
                word = _permuted(own, other, self.selector)
            self.p_scales[step] = word
        return has_grown

    def _write_row(
        self, s: cute.Tensor, r: int, x: list[Float32], largest: list[Float32], is_masked: bool
    ) -> list[Int32]:
        """Write P / scale of a row to s, and add P to `total`. Returns the codes of the scales, two in a word."""
        cfg, scale, offset = self.context.cfg, self.log2_scale(r), self.row_max_scaled[r]
        if is_masked or cfg.mods is not None:
            offset = Float32(cutlass.select_(offset == -Float32.inf, Float32(0.0), offset))
        wanted = []
        for block in largest:
            other = cute.arch.shuffle_sync_bfly(block, offset=1, mask=-1, mask_and_clamp=31)
            exponent = cute.arch.fmax(block, other) * scale - (offset + _LOG2_LARGEST)
            wanted.append(cute.arch.fmax(cute.math.exp2(exponent, fastmath=True), Float32(nvfp4.SMALLEST_SCALE)))
        codes, total = list[Int32](), Float32(0.0)
        for first in range(0, len(wanted), 2):
            pair = wanted[first : first + 2]
            code, *scales = _as_e4m3(pair[0], pair[-1])
            codes.append(code)
            for i, of_block in zip(range(first, first + len(pair)), scales):
                less = offset + cute.math.log2(of_block, fastmath=True)
                values = x[i * NUMBERS : (i + 1) * NUMBERS]
                p = [cute.math.exp2(value * scale - less, fastmath=True) for value in values]
                for j, p_j in zip(row_registers(2 * cute.size(s), r)[i * NUMBERS : (i + 1) * NUMBERS], p):
                    s[j] = p_j
                total = total + reduce_in_chains(p, lambda a, b: a + b) * of_block
        self.total[r] = self.total[r] + total
        return codes


def load_k(context: Sm120ForwardContext, work: Work, block: Int32, cursor: Cursor):
    """Load a block of K and its scales."""
    _load(context, "k", context.cfg.scale_bytes[0], work, block, cursor)


def load_v(context: Sm120ForwardContext, work: Work, block: Int32, cursor: Cursor):
    """Load a block of V and its scales."""
    _load(context, "v", context.cfg.scale_bytes[1], work, block, cursor)


def _load(context: Sm120ForwardContext, name: str, nbytes: int, work: Work, block: Int32, cursor: Cursor):
    load_block(context, name, work, block, cursor, nbytes)
    scales: Any = getattr(context.args.cache, f"{name}_scales")
    source = scales.iterator + cute.crd2idx((work.batch, work.head_kv, block, 0), scales.layout)
    target = context.smem.pointer(f"{name.upper()} scales", Uint8) + cursor.stage * nbytes
    with cute.arch.elect_one():
        bulk_load(source, target, nbytes, cursor.barrier())


def _as_e4m3(low: Float32, high: Float32) -> tuple[Int32, Float32, Float32]:
    """Round two floats to e4m3; return their codes in a word, and what they stand for."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 code, low, high;
        .reg .b32 pair;
        cvt.rn.satfinite.e4m3x2.f32 code, {$r1}, {$r0};
        cvt.u32.u16 {$w0}, code;
        cvt.rn.f16x2.e4m3x2 pair, code;
        mov.b32 {low, high}, pair;
        cvt.f32.f16 {$w1}, low;
        cvt.f32.f16 {$w2}, high;
        }""",
        write_only_types=[Int32, Float32, Float32],
        read_only_args=[low, high],
    )


def _permuted(a: Int32, b: Int32, selector: Int32) -> Int32:
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[a, b, selector]
    )
