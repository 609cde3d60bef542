"""Exchange of P and of values of rows between the consumers with the same rows in the two CTAs of a pair."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....core.constant import Constant
from ....core.vec_io import bits, load_floats
from ....pipeline.cursor import Cursor
from ....pipeline.fragment import LANES_PER_ROW, ROWS_PER_THREAD, row_in_warp, store_matrices
from ....pipeline.roles import ROWS_PER_WARP, WARP, WARPS_PER_WARPGROUP
from ....pipeline.smem import PANEL_ROW_BYTES
from ....pipeline.tma import bulk_copy_to, store_to
from ...wgmma import ROWS
from .context import WidestContext

FIRST_BARRIER = 1  # of the named barriers of consumers; barrier 0 is the CTA barrier
ROW_BYTES = 4  # of a value of a row


class Exchange(Constant):
    """A consumer's part of the exchange. Each warp has its own rows."""

    def __init__(self, context: WidestContext, index: Int32, warp: Int32) -> None:
        self.context, self.index, self.warp, self.peer = context, index, warp, context.args.order.rank ^ 1

    def send_p(self, packed: list[Int32], cursor: Cursor) -> None:
        """Store P to shared memory, for the consumer's own product, and send it to the peer."""
        tile, smem = self.context.cfg.p_tile, self.context.smem
        p, p_of_peer = (smem.address(name) + self.index * tile.nbytes for name in ("P", "P of peer"))
        cursor.wait()
        store_matrices(p + self.warp * (ROWS_PER_WARP * PANEL_ROW_BYTES), tile, packed)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=FIRST_BARRIER + self.index, number_of_threads=WARPS_PER_WARPGROUP * WARP)
        expect(self.warp, cursor, tile.nbytes)
        copy_p(self, p, p_of_peer, cursor)

    def send_row_values(self, values: cute.Tensor, cursor: Cursor) -> None:
        """Send a float32 of each row to the peer."""
        expect(self.warp, cursor, ROWS * ROW_BYTES)
        store_rows(self, values, cursor)

    def row_values_of_peer(self, cursor: Cursor) -> list[Float32]:
        """Wait for the values of the peer's rows, and return those of this thread's rows."""
        cursor.wait()
        return [load_floats(self.row_value(cursor, r), 1)[0] for r in range(ROWS_PER_THREAD)]

    def row_value(self, cursor: Cursor, r: int) -> cute.Pointer:
        """Return the place of the value of this thread's r-th row."""
        row = cursor.stage * ROWS + self.warp * ROWS_PER_WARP + row_in_warp(r)
        return self.context.smem.pointer("maxima", Float32) + row


@cute.jit
def expect(warp: Int32, cursor: Cursor, nbytes: cutlass.Constexpr[int]):
    """One warp of the consumer: expect from the peer what the consumer sends to it."""
    if warp == 0:
        cursor.expect_tx(nbytes)


@cute.jit
def copy_p(exchange: Exchange, p: Int32, p_of_peer: Int32, cursor: Cursor):
    """One warp of the consumer: start the copy of all rows."""
    if exchange.warp == 0:
        with cute.arch.elect_one():
            bulk_copy_to(exchange.peer, p, p_of_peer, exchange.context.cfg.p_tile.nbytes, cursor.barrier())


@cute.jit
def store_rows(exchange: Exchange, values: cute.Tensor, cursor: Cursor):
    """One of the threads of each row stores its value to the peer's shared memory."""
    if cute.arch.lane_idx() % LANES_PER_ROW == 0:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            target = exchange.row_value(cursor, r).toint()
            store_to(exchange.peer, target, bits(values[r]), cursor.barrier())
