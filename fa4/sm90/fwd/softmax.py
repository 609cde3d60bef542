"""Online softmax of a team's rows, two to a thread, a row's columns split over four threads; in base 2."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...core.constant import Constant
from ...core.score import Softcap
from ...core.visible import hide
from ...core.words import pack_half
from ...fwd.rows import is_written, normalise, place_of, query_of, result
from ..fragment import LANES_PER_ROW, ROWS_PER_THREAD, across_row, own_columns, row_elements, row_in_warp

CHAINS = 4  # of the row's maximum and sum: independent ones, to hide the latency of each


class Softmax(Constant):
    """The state of a thread's rows, in registers.

    reference: what is subtracted in the exponent: a maximum of the row so far in log2 units, or something within
    `rescale_threshold` below it; -inf before the row has seen a key. total: this thread's part of the sum of P at that
    reference. factor: what the last change of the reference multiplies O by. first, stop: the row sees keys
    first <= key < stop.
    """

    def __init__(self, context):
        self.context = context
        self.reference, self.total, self.factor = (cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(3))
        self.first, self.stop = (cute.make_rmem_tensor(ROWS_PER_THREAD, Int32) for _ in range(2))

    def reset(self, work, first_row: Int32) -> None:
        """Before a work tile; first_row: of this warp, in the sequence."""
        self.reference.fill(-Float32.inf)
        self.total.fill(0.0)
        for r in range(ROWS_PER_THREAD):
            query = query_of(self.context.cfg, first_row + row_in_warp(r))
            self.first[r], self.stop[r] = work.mask.keys(query)

    def weigh(self, s: cute.Tensor, block: Int32, is_masked: bool) -> Boolean:
        """S -> P in place, for one key block; returns whether O must be multiplied by `factor`, row by row: the same
        for all rows of a warp."""
        cfg, args = self.context.cfg, self.context.args
        rows = [self.visible(s, r, block, is_masked) for r in range(ROWS_PER_THREAD)]
        tops = [in_chains(x, cute.arch.fmax) for x in rows]
        # Not so while a row has seen no key: -inf - -inf.
        grows = [top * args.scale_log2 - self.reference[r] > cfg.rescale_threshold for r, top in enumerate(tops)]
        has_grown = cute.arch.vote_any_sync(grows[0] | grows[1])
        follow(self, tops, has_grown)
        for r, x in enumerate(rows):
            reference = self.reference[r]
            if is_masked:
                reference = Float32(cutlass.select_(reference == -Float32.inf, Float32(0.0), reference))
            weights = [cute.math.exp2(value * args.scale_log2 - reference, fastmath=True) for value in x]
            for i, weight in zip(row_elements(2 * cute.size(s), r), weights):
                s[i] = weight
            # The block's sum first: adding each weight to the running total would round it hundreds of times.
            self.total[r] = self.total[r] + in_chains(weights, lambda a, b: a + b)
        return has_grown

    def visible(self, s: cute.Tensor, r: int, block: Int32, is_masked: bool) -> list[Float32]:
        """Row r's scores, -inf where the row does not see the key."""
        cfg = self.context.cfg
        x = [s[i] for i in row_elements(2 * cute.size(s), r)]
        if cfg.has_softcap:
            x = [Softcap(self.context.args.scale_over_cap).apply(value) for value in x]
        if is_masked:
            begin = block * cfg.tile_n
            first = own_columns(self.first[r] - begin) if cfg.has_left else None
            x = hide(x, first, own_columns(self.stop[r] - begin))
        return x

    def finish(self, work, first_row: Int32) -> list[Float32]:
        """Write each row's log-sum-exp; returns the factors that normalise O, 0 for a row that saw no key or holds no
        data."""
        norms = []
        for r in range(ROWS_PER_THREAD):
            row = first_row + row_in_warp(r)
            total = across_row(self.total[r], lambda a, b: a + b)
            norm, lse = normalise(self.context, work, row, query_of(self.context.cfg, row), self.reference[r], total)
            write_lse(self.context, work, row, lse)
            norms.append(norm)
        return norms

    def finish_empty(self, work, first_row: Int32) -> None:
        """The same for rows that see no key."""
        for r in range(ROWS_PER_THREAD):
            row = first_row + row_in_warp(r)
            query = query_of(self.context.cfg, row)
            _, lse = normalise(self.context, work, row, query, -Float32.inf, Float32(0.0))
            write_lse(self.context, work, row, lse)


@cute.jit
def follow(softmax, tops, has_grown: Boolean):
    """Let the references of the rows that have grown follow, where some row of the warp has; tops: the maxima of each
    thread's part of its rows."""
    if has_grown:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            before = softmax.reference[r]
            candidate = across_row(tops[r], cute.arch.fmax) * softmax.context.args.scale_log2
            shrink = before - candidate
            grows = shrink < -softmax.context.cfg.rescale_threshold
            factor = cutlass.select_(grows, cute.math.exp2(shrink, fastmath=True), Float32(1.0))
            softmax.factor[r] = Float32(factor)
            softmax.total[r] = softmax.total[r] * Float32(factor)
            softmax.reference[r] = Float32(cutlass.select_(grows, candidate, before))


def pack(s: cute.Tensor, p: cute.Tensor) -> None:
    """P, rounded to 16 bits, as the next product's operand, or as the first steps of it."""
    words = cute.recast_tensor(p, Int32)
    for i in range(cute.size(s) // 2):
        words[i] = pack_half(s[2 * i], s[2 * i + 1], p.element_type)


def in_chains(values: list[Float32], combine) -> Float32:
    """All values combined, in independent chains."""
    chains = list(values[:CHAINS])
    for i, value in enumerate(values[CHAINS:]):
        chains[i % CHAINS] = combine(chains[i % CHAINS], value)
    while len(chains) > 1:
        chains = [combine(*chains[i : i + 2]) for i in range(0, len(chains), 2)]
    return chains[0]


@cute.jit
def write_lse(context, work, row: Int32, lse: Float32):
    """One of the threads that share a row writes it, if the row has a place."""
    if is_written(context.cfg, work, row) and cute.arch.lane_idx() % LANES_PER_ROW == 0:
        place = result(context, "lse", work)
        place[place_of(context.cfg, row), 0] = lse
