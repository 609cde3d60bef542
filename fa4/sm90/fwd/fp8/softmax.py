"""Online softmax with P in e4m3. A share of P may come from `core.line.Line`, in float16."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....core.fragment_coords import reduce_row
from ....core.line import Line, in_sum, is_in_share
from ....core.vec_io import add_f16x2, as_float, bits, floats_of_f16x2, pack_f16x2_as_e4m3, pack_word
from ....fwd.device.softmax import BlockScores, Softmax, reduce_in_chains
from ....fwd.device.work import Work
from ....pipeline.fragment import ROWS_PER_THREAD, row_registers
from .context import Fp8Context

WORD = 4  # numbers of P that a thread packs into a word


class Fp8Softmax(Softmax):
    """line_max: largest of this thread's scores of a row whose P is on the line. A P on the line is a pair of float16
    numbers, in the register of its first number."""

    def __init__(self, context: Fp8Context):
        super().__init__(context)
        self.cfg = context.cfg
        self.line_max = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)

    def reset(self, work: Work, first_row: Int32) -> None:
        super().reset(work, first_row)
        self.line_max.fill(-Float32.inf)

    def maxima(self, rows: list[list[Float32]]) -> list[Float32]:
        """Return the maxima of this thread's part of the rows."""
        if not self.cfg.line:
            return [reduce_in_chains(x, cute.arch.fmax) for x in rows]
        found = []
        for r, x in enumerate(rows):
            on_line, others = (
                [value for i, value in enumerate(x) if self.is_on_line(i // WORD) == is_line]
                for is_line in (True, False)
            )
            line_max = reduce_in_chains(on_line, cute.arch.fmax)
            self.line_max[r] = cute.arch.fmax(self.line_max[r], line_max)
            found.append(cute.arch.fmax(line_max, reduce_in_chains(others, cute.arch.fmax)))
        return found

    def is_on_line(self, word: int) -> bool:
        """True if this word of a thread's part of a row comes from the line."""
        return is_in_share(word, self.cfg.line)

    def line(self, r: int, row_max_scaled: Float32) -> Line:
        return Line(self.log2_scale(r), -row_max_scaled, has_packed_fma=False)

    def exponentials(self, s: cute.Tensor, rows: list[list[Float32]], scores: BlockScores, is_masked: bool) -> None:
        if not self.cfg.line:
            super().exponentials(s, rows, scores, is_masked)
            return
        for r, x in enumerate(rows):
            offset, scale, registers = self.row_max_scaled[r], self.log2_scale(r), row_registers(2 * cute.size(s), r)
            if is_masked:
                offset = Float32(cutlass.select_(offset == -Float32.inf, Float32(0.0), offset))
            line, floats, halves = self.line(r, offset), list[Float32](), list[Int32]()
            for first in range(0, len(x), WORD):
                numbers = x[first : first + WORD]
                if self.is_on_line(first // WORD):
                    pairs = [line.pair(*numbers[:2]), line.pair(*numbers[2:])]
                    p = [as_float(half) for half in pairs]
                    halves = [add_f16x2(*pair) for pair in zip(halves, pairs)] if halves else pairs
                else:
                    p = [cute.math.exp2(value * scale - offset, fastmath=True) for value in numbers]
                    floats += p
                for i, p_i in zip(registers[first : first + WORD : WORD // len(p)], p):
                    s[i] = p_i
            floats += floats_of_f16x2(add_f16x2(*halves))
            self.total[r] = self.total[r] + reduce_in_chains(floats, lambda a, b: a + b)

    def packed(self, s: cute.Tensor, r: int, word: int) -> Int32:
        """Return a word of P, rounded to e4m3. word: of this thread's part of row r."""
        registers = row_registers(2 * cute.size(s), r)[WORD * word : WORD * word + WORD]
        if self.is_on_line(word):
            return pack_f16x2_as_e4m3(bits(s[registers[0]]), bits(s[registers[2]]))
        return pack_word([s[i] for i in registers], self.cfg.v_dtype)

    def counted_p(self, r: int, row_max: Float32, largest_p: Float32) -> Float32 | None:
        if not self.cfg.line:
            return None
        line_max = reduce_row(self.line_max[r], cute.arch.fmax)
        return in_sum(self.line(r, self.row_max_scaled[r]), line_max, row_max, largest_p)
