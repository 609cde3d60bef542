"""Transposition of e4m3 values, (batch, keys, heads, columns) -> (batch, heads, columns, keys), for tensor cores that
read 8-bit operands only along the reduction.

Of every 16 keys, position 4t + c holds key 2t + c for c < 2, and key 2t + c + 6 for the others: the order in which the
threads of a score's row hold the weights, see `sm90.fwd.fp8`. Keys past the sequence's end become zeros, because
memory there may hold NaN, and 0 * NaN is NaN.

A thread transposes 32 keys of 4 columns in registers. Eight threads load a sector of 32 columns of a key together, and
four store 128 bytes of a column.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, const_expr

from ...core.program import Program
from ...core.vec_io import load_vec, store_vec
from ...runtime import jit
from ..launchers import TRANSPOSED_KEYS, TransposeConfig

WARP = 32
KEYS, COLUMNS = 32, 4  # of a thread
ALONG_COLUMNS, ALONG_KEYS = 8, 4  # threads of a warp
assert TRANSPOSED_KEYS == KEYS * ALONG_KEYS  # of a CTA


class _Transpose(Program[TransposeConfig]):
    @cute.jit
    def launch(
        self, v: cute.Tensor, result: cute.Tensor, seqused_k: cute.Tensor | None,
        cfg: cutlass.Constexpr[TransposeConfig], stream,
    ):  # fmt: skip
        """v: (batch, keys, heads, columns) uint8. result: (batch, heads, columns, keys rounded up) uint8."""
        batch, heads, _, keys = result.shape
        warps = -(-cfg.columns // (ALONG_COLUMNS * COLUMNS))
        grid = (batch, heads, keys // TRANSPOSED_KEYS)
        self.kernel(v, result, seqused_k, cfg).launch(grid=grid, block=(WARP * warps, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, v: cute.Tensor, result: cute.Tensor, seqused_k: cute.Tensor | None,
        cfg: cutlass.Constexpr[TransposeConfig],
    ):  # fmt: skip
        batch, head, block = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        first = block * TRANSPOSED_KEYS + thread % WARP // ALONG_COLUMNS * KEYS
        column = (thread // WARP * ALONG_COLUMNS + thread % ALONG_COLUMNS) * COLUMNS
        count = v.shape[1]
        if const_expr(seqused_k is not None):
            count = cutlass.min(count, seqused_k[batch])
        if column < cfg.columns:
            words, source = [], v[(batch, None, head, None)]
            for i in cutlass.range_constexpr(KEYS):
                key = cutlass.min(first + i, cutlass.max(count - 1, 0))
                (word,) = load_vec(source.iterator + cute.crd2idx((key, column), source.layout), 1)
                words.append(Int32(cutlass.select_(first + i < count, word, Int32(0))))
            by_column = [transposed_words(words[i : i + 16]) for i in range(0, KEYS, 16)]
            rows = result[(batch, head, None, None)]
            for c in cutlass.range_constexpr(COLUMNS):
                target = rows.iterator + cute.crd2idx((column + c, first), rows.layout)
                for i in cutlass.range_constexpr(KEYS // 16):
                    store_vec(target + 16 * i, by_column[i][c])

    def fake_args(self, cfg: TransposeConfig) -> tuple:
        v, result = jit.fake_tensor(Uint8, 4), jit.fake_tensor(Uint8, 4, contiguous=True)
        return v, result, jit.fake_tensor(Int32, 1, align=4) if cfg.has_seqused_k else None


def transposed_words(words: list[Int32]) -> list[list[Int32]]:
    """Return, for each of four columns, four words of its bytes of 16 keys, in the order of the products. words: four
    columns of each key."""
    rows: list[list[Int32]] = [[] for _ in range(COLUMNS)]
    for t in range(4):
        for row, word in zip(rows, _transpose_bytes([words[i] for i in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)])):
            row.append(word)
    return rows


def _transpose_bytes(words: list[Int32]) -> list[Int32]:
    """Transpose a matrix of 4 x 4 bytes, one row in a word."""
    return cute.arch.inline_ptx(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, {$r0}, {$r1}, 0x5140;
        prmt.b32 b, {$r2}, {$r3}, 0x5140;
        prmt.b32 c, {$r0}, {$r1}, 0x7362;
        prmt.b32 d, {$r2}, {$r3}, 0x7362;
        prmt.b32 {$w0}, a, b, 0x5410;
        prmt.b32 {$w1}, a, b, 0x7632;
        prmt.b32 {$w2}, c, d, 0x5410;
        prmt.b32 {$w3}, c, d, 0x7632;
        }""",
        write_only_types=[Int32] * 4,
        read_only_args=words,
    )


KERNEL = _Transpose("fwd.transpose")
