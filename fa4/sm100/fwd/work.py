"""Work tiles of a CTA, and their key blocks and row tiles.

Every role has the same loop:

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        ...
        queue = queue.next()
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...core.mask import range_blocks
from ...fwd.device.work import Work, work_tile
from ...pipeline.cursor import Cursor, consume
from ...pipeline.ends import Ends
from .config import Schedule
from .context import Sm100ForwardContext


class Queue:
    """Position of a role in the order of work tiles. Immutable: `queue = queue.next()`."""

    def __init__(self, context: Sm100ForwardContext, index: Int32, responses: Cursor | None):
        self.context, self.index, self.responses = context, index, responses

    @staticmethod
    def first(context: Sm100ForwardContext, ends: Ends) -> Queue:
        """Return the position of this CTA's first tile. ends: the channel ends of the role."""
        is_dynamic = context.cfg.schedule is Schedule.DYNAMIC
        responses = consume(ends.schedule_all_index) if is_dynamic else None
        return Queue(context, Int32(cute.arch.block_idx()[0]) // context.cfg.ctas, responses)

    def has_tile(self) -> Boolean:
        return self.index < self.context.args.tiles

    def tile(self) -> Work:
        return work_tile(self.context, self.index)

    def next(self) -> Queue:
        order = self.context.args.order
        if self.responses is None:
            return Queue(self.context, self.index + order.stride, None)
        # The response holds the index of the first CTA that is replaced, if one had not started yet.
        self.responses.wait()
        index, _, _, is_taken = cute.arch.clc_response(self.context.smem.pointer("index", Int32))
        self.responses.arrive()
        index = Int32(cutlass.select_(is_taken != 0, index // self.context.cfg.ctas, self.context.args.tiles))
        return Queue(self.context, index, self.responses.next())

    def __extract_mlir_values__(self):
        return [self.index.ir_value(), *([] if self.responses is None else self.responses.__extract_mlir_values__())]

    def __new_from_mlir_values__(self, values):
        responses = None if self.responses is None else self.responses.__new_from_mlir_values__(values[1:])
        return Queue(self.context, Int32(values[0]), responses)


def key_block(context: Any, work: Work, i: Int32) -> Int32:
    """Index of the i-th key block to process: in the order of the block mask's lists, else from last to first. With
    `sawtooth`, every other work tile takes its unmasked blocks in ascending order."""
    if context.cfg.has_blocks:
        return work.block_iter.block(i)
    b = range_blocks(work.block_iter)
    descending = b.stop - 1 - i
    if not context.cfg.sawtooth:
        return Int32(descending)
    is_ascending = Boolean(work.index // context.args.order.stride % 2 == 1)
    is_full = (descending >= b.full_first) & (descending < b.full_stop)
    ascending = b.full_first + (b.full_stop - 1 - descending)
    return Int32(cutlass.select_(is_ascending & is_full, ascending, descending))


def row_tile(context: Sm100ForwardContext, work: Work, tile: Int32 | int) -> Int32:
    """Index of the block of `tile_m` rows of the sequence that is this CTA's Q tile `tile`."""
    cfg = context.cfg
    return (work.m_block * cfg.q_tiles + tile) * cfg.ctas + context.args.order.rank


def rows_in_smem(context: Sm100ForwardContext, name: str) -> cute.Tensor:
    """One float per row of the CTA, of scales one per row of every S. The softmax warpgroups are the first warps, so a
    thread index is a row index."""
    rows = context.cfg.cta_rows * (context.cfg.s_stages if name == "scale" else 1)
    return cute.make_tensor(context.smem.pointer(name, Float32), cute.make_layout(rows))
