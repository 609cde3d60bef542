"""Work tile of a pair, and its rows."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from ....fwd.device.work import Work, work_tile
from ...stages import CTA_ROWS, PAIR
from .context import WidestContext


def work_of_pair(context: WidestContext) -> Work:
    return work_tile(context, Int32(cute.arch.block_idx()[0]) // PAIR)


def first_row(context: WidestContext, work: Work) -> Int32:
    """Index of this CTA's first row in the sequence."""
    return (work.m_block * PAIR + context.args.order.rank) * CTA_ROWS
