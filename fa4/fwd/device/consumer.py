"""Consumer: four warps with 64 rows of a work tile, 16 each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...core.constant import Constant
from ...core.mask import Blocks, range_blocks
from ...pipeline.cursor import Cursor
from ...pipeline.fragment import load_matrices
from ...pipeline.roles import ROWS_PER_WARP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..consumers import ROWS
from .ping_pong import PingPong
from .queue import row_tile
from .rows import query_of
from .softmax import Softmax, rescale
from .work import Work


class ConsumerRows(Constant):
    """Rows of one consumer. A subclass sets its attributes.

    index: of the consumer in the CTA. rank: of the CTA in the cluster of a work tile. warp: of this warp in the
    consumer.
    """

    cfg: Any
    index: Int32
    rank: Int32
    warp: Int32

    def first_row(self, work: Work) -> Int32:
        """Return the first row of this warp in a work tile, as a row of the sequence."""
        return self.row_tile(work) * ROWS + self.warp * ROWS_PER_WARP

    def row_tile(self, work: Work) -> Int32:
        return row_tile(self.cfg, work, self.rank, self.index)


class Consumer(ConsumerRows):
    """What `attend` asks of a chip's consumer. A subclass sets the attributes.

    q_ptr: Q in shared memory. q: registers of this warp's rows of Q, if it keeps them. o: accumulators of O.
    p: operand of the product with V, if it is in registers.
    """

    q_ptr: cute.Pointer
    q: cute.Tensor
    o: cute.Tensor
    p: cute.Tensor
    ping_pong: PingPong

    @property
    def trims(self) -> bool:
        """True if the consumer skips key blocks that only other consumers' rows see: blocks right of the diagonal, or
        all blocks but one if the consumer has no rows. The second case alone pays only with many consumers."""
        cfg = self.cfg
        return cfg.rows > (1 if cfg.has_right else 2) * cfg.tile_n and not cfg.has_blocks

    def blocks(self, work: Work) -> Blocks:
        """Return the key blocks of a work tile that the consumer's rows see (at least one), and which are unmasked."""
        of_tile = range_blocks(work.block_iter)
        if not self.trims:
            return of_tile
        index = self.row_tile(work)
        of_rows = replace(work.mask, tile_m=ROWS).key_blocks(index)
        has_rows = index * ROWS < work.q.count * self.cfg.rows_per_query
        stop = cutlass.min(Int32(cutlass.select_(has_rows, of_rows.stop, Int32(0))), of_tile.stop)
        stop = cutlass.max(stop, of_tile.first + 1)
        full_stop = cutlass.max(cutlass.min(of_rows.full_stop, stop), of_tile.first)
        full_first = cutlass.max(cutlass.min(of_rows.full_first, full_stop), of_tile.first)
        return Blocks(of_tile.first, full_first, full_stop, stop)

    def load_q_registers(self, q: Cursor) -> None:
        """Load this warp's rows of Q into registers."""
        packed = cute.recast_tensor(self.q, Int32)
        q_rows = self.q_ptr.toint() + q.stage * self.cfg.q_step + self.warp * (ROWS_PER_WARP * PANEL_ROW_BYTES)
        for i, pair in enumerate(load_matrices(q_rows, self.cfg.q_tile, cute.size(packed))):
            packed[i] = pair

    def is_second_half_masked(self, work: Work, blocks: Blocks) -> Boolean:
        """True if the second half of the last key block is masked for all of the consumer's rows."""
        last_row = (self.row_tile(work) + 1) * ROWS - 1
        _, stop = work.mask.keys(query_of(self.cfg, last_row))
        return Boolean(stop - (blocks.stop - 1) * self.cfg.tile_n <= self.cfg.half_n)

    def accumulator(self, is_half: bool) -> cute.Tensor:
        """Return new accumulators of S of a key block, or of its first half."""
        raise NotImplementedError

    def start_s(self, s: cute.Tensor, q: Cursor, k: Cursor, is_half: bool) -> None:
        """Start S = Q K^T."""
        raise NotImplementedError

    def start_o(self, v: Cursor, has_o: Boolean) -> None:
        """Start O += P V; without `has_o`, O = P V. A consumer may clear O in `begin` instead."""
        raise NotImplementedError

    def wait(self, pending: int) -> None:
        """Wait until at most `pending` of the products are not complete."""
        raise NotImplementedError

    def release(self, k: Cursor, v: Cursor) -> None:
        """Called once S is computed and O += P V has started: release K, and V if that is complete."""
        k.arrive()

    def settle(self, softmax: Softmax, v: Cursor) -> None:
        """Called after a softmax step: wait for the product that it overlaps, and release V, unless `release` has."""
        raise NotImplementedError

    def rescale(self, softmax: Softmax, has_grown: Boolean) -> None:
        """Multiply O by the softmax's factors if the maximum of a row of the warp has grown."""
        rescale(self.o, softmax.factor, has_grown)

    def pack(self, s: cute.Tensor) -> None:
        """Round P for the next product."""
        raise NotImplementedError

    def begin(self, work: Work) -> None:
        """Called before the first key block of a work tile."""

    def begin_last(self) -> None:
        """Called before the last product is added to O."""

    def prefetch_k(self, work: Work, block: Int32) -> None:
        """Called before the first key block: load what its S needs beside K."""

    def prefetch(self, work: Work, block: Int32, following: Int32) -> None:
        """Called once S of `block` is computed: load what O of this block and S of the next need beside V and K."""
