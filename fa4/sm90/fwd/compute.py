"""Compute role, consumers of one warpgroup with 64 rows of the work tile each: products, softmax, store of O.

Per key block, S = Q K^T of this block and O += P V of the previous block are issued together. While the second product
runs, softmax turns S into the next P. O leaves through shared memory; each warp stores its own 16 rows. A warp waits
for its bulk store only before it writes the buffer again, and at its end.

Waits:   load_compute_Q.full, load_compute_K.full, load_compute_V.full; of 8-bit numbers
         convert_compute_K.full, convert_compute_V.full
Signals: load_compute_Q.free, load_compute_K.free, load_compute_V.free; of 8-bit numbers
         convert_compute_K.free, convert_compute_V.free
"""

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ...fwd.device.attend import attend
from ...fwd.device.consumer import Consumer
from ...fwd.device.ping_pong import PingPong
from ...fwd.device.softmax import Softmax, pack
from ...fwd.variant import KvLoad, OutStore
from ...pipeline.cursor import Cursor, Lane, consume
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..wgmma_order import pin, settle, wait
from .context import Sm90ForwardContext


@cute.jit
def compute(context: Sm90ForwardContext):
    cfg = context.cfg
    ends = context.ends("compute")
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    consumer = ForwardConsumer(context, warp // WARPS_PER_WARPGROUP)
    softmax = Softmax(context)
    q = consume(ends.load_compute_Q, Lane(consumer.index, cfg.consumers))
    if const_expr(cfg.converts_kv):
        k, v = consume(ends.convert_compute_K), consume(ends.convert_compute_V)
    elif const_expr(cfg.kv_load is KvLoad.GATHER):
        k, v = consume(ends.gather_compute_K), consume(ends.gather_compute_V)
    else:
        k, v = consume(ends.load_compute_K), consume(ends.load_compute_V)
    attend(context, consumer, softmax, q, k, v)


class ForwardConsumer(Consumer):
    """Operands and registers of one consumer; created once."""

    def __init__(self, context: Sm90ForwardContext, index: Int32):
        cfg, smem = context.cfg, context.smem
        self.cfg, self.index, self.ping_pong = cfg, index, PingPong(cfg.consumers, index, cfg.ping_pong)
        self.rank = context.args.order.rank
        self.qk, self.pv = cfg.qk, cfg.pv
        self.half_qk = replace(self.qk, n=cfg.half_n)
        self.q_ptr = smem.pointer("Q", cfg.dtype)
        self.q = self.qk.a_registers() if cfg.holds_q else self.qk.a_at(self.q_ptr)
        own_keys = index * (cfg.keys_between_consumers * PANEL_ROW_BYTES // 2)
        self.k = self.qk.b_at(smem.pointer("K", cfg.dtype) + own_keys)
        self.v = self.pv.b_at(smem.pointer("V", cfg.v_dtype) + own_keys)
        self.o, self.p = self.pv.accumulator(), self.pv.a_registers()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        if cfg.out_store is not OutStore.DIRECT:
            self.out = smem.pointer("O", cfg.dtype) + (index * (cfg.o_step // 2) + warp * (cfg.o_tile.nbytes // 2))
        self.warp = warp

    def begin_last(self) -> None:
        if self.cfg.one_block:  # new registers, which hold nothing during the softmax
            self.o = self.pv.accumulator()
            self.o.fill(0.0)
            settle(self.o)

    def accumulator(self, is_half: bool) -> cute.Tensor:
        return (self.half_qk if is_half else self.qk).accumulator()

    def start_s(self, s: cute.Tensor, q: Cursor, k: Cursor, is_half: bool) -> None:
        q_rows = self.q if self.cfg.holds_q else self.q[None, None, None, q.stage]
        product = self.half_qk if is_half else self.qk
        product.issue(s, q_rows, self.k[None, None, None, k.stage], False)

    def start_o(self, v: Cursor, has_o: Boolean) -> None:
        self.pv.issue(self.o, self.p, self.v[None, None, None, v.stage], has_o)

    def wait(self, pending: int) -> None:
        wait(pending)

    def settle(self, softmax: Softmax, v: Cursor) -> None:
        pin(softmax.total[0], softmax.total[1])
        wait(0)
        v.arrive()

    def pack(self, s: cute.Tensor) -> None:
        pack(s, self.p)
