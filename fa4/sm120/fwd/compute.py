"""Compute role, consumers of four warps with 16 rows of the work tile each: products, softmax, store of O.

Waits:   load_compute_Q.full, load_compute_K.full, load_compute_V.full
Signals: load_compute_Q.free, load_compute_K.free, load_compute_V.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8

from ...core.vec_io import pack_e2m1, pack_word
from ...fwd.device.attend import attend
from ...fwd.device.consumer import Consumer
from ...fwd.device.ping_pong import PingPong
from ...fwd.device.softmax import Softmax
from ...fwd.device.work import Work
from ...fwd.variant import OutStore
from ...pipeline.cursor import Cursor, Lane, consume
from ...pipeline.fragment import ROWS_PER_THREAD, row_registers
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ..mma import N_OF_LOAD, ROWS_OF_MATRIX, OrderedRowsOfK, RowsOfK, RowsOfV, Scale, TokenPairsOfV, add_product
from ..product import Product
from .block_scales import BlockScales, UnitScales
from .context import Sm120ForwardContext
from .e2m1 import NUMBERS, E2m1Scales, E2m1Softmax

_REGS_OF_N = 4  # accumulators of a thread for eight columns


@cute.jit
def compute(context: Sm120ForwardContext):
    cfg, ends = context.cfg, context.ends("compute")
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    consumer = WarpConsumer(context, warp // WARPS_PER_WARPGROUP)
    q = consume(ends.load_compute_Q, Lane(consumer.index, cfg.consumers))
    attend(context, consumer, consumer.softmax(context), q, consume(ends.load_compute_K), consume(ends.load_compute_V))


class WarpConsumer(Consumer):
    """Operands and registers of a warp of a consumer; created once."""

    k: RowsOfK
    v: RowsOfV
    scales: UnitScales

    def __init__(self, context: Sm120ForwardContext, index: Int32):
        cfg, smem = context.cfg, context.smem
        self.cfg, self.index, self.rank = cfg, index, Int32(0)
        self.ping_pong = PingPong(cfg.consumers, index, cfg.ping_pong)
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        self.q_ptr = smem.pointer("Q", Uint8)
        self.q = cute.make_rmem_tensor(cfg.q_regs, Int32)
        self.p = cute.make_rmem_tensor(cfg.p_regs, Int32)
        self.o = cute.make_rmem_tensor(cfg.head_dim_v // 2, Float32)
        self.factor = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)  # of O, due before the next product is added
        self.k_address, self.v_address = smem.address("K"), smem.address("V")
        if cfg.multiplies_e2m1:
            self.k, self.v, self.scales = OrderedRowsOfK(cfg.k_tile), TokenPairsOfV(cfg.v_tile), E2m1Scales(context)
        else:
            self.k, self.v = RowsOfK(cfg.k_tile), RowsOfV(cfg.v_tile)
            self.scales = BlockScales(context) if cfg.has_block_scales else UnitScales()
        if cfg.out_store is not OutStore.DIRECT:
            self.out = smem.pointer("O", cfg.dtype) + (index * (cfg.q_step // 2) + self.warp * (cfg.o_tile.nbytes // 2))

    def softmax(self, context: Sm120ForwardContext) -> Softmax:
        """Return the softmax of this warp's rows."""
        return E2m1Softmax(context, self.scales.p) if isinstance(self.scales, E2m1Scales) else Softmax(context)

    def accumulator(self, is_half: bool) -> cute.Tensor:
        return cute.make_rmem_tensor((self.cfg.half_n if is_half else self.cfg.tile_n) // 2, Float32)

    def begin(self, work: Work) -> None:
        self.o.fill(0.0)
        self.factor.fill(1.0)
        self.scales.load_q(work, self.first_row(work))

    def prefetch_k(self, work: Work, block: Int32) -> None:
        self.scales.load_k(work, block)

    def prefetch(self, work: Work, block: Int32, following: Int32) -> None:
        self.scales.load_v(work, block)
        self.scales.load_k(work, following)

    def start_s(self, s: cute.Tensor, q: Cursor, k: Cursor, is_half: bool) -> None:
        cfg, scales = self.cfg, self.scales
        address = self.k_address + k.stage * cfg.k_tile.nbytes
        scales.ready_k(k.stage)
        # Beside these products, and without a branch: behind one, ptxas would move O for each product.
        self._multiply_o()
        s.fill(0.0)
        for step in range(cfg.product.steps(cfg.head_dim)):
            rows = [self.q[4 * step + i] for i in range(4)]
            for n in range(0, 2 * cute.size(s), N_OF_LOAD):
                for i, keys in enumerate(self.k.load(address, step, n)):
                    first = n + i * ROWS_OF_MATRIX
                    _add(cfg.product, s, first, rows, keys, scales.of_q(step), scales.of_k(step, first))

    def start_o(self, v: Cursor, has_o: Boolean) -> None:
        cfg, scales = self.cfg, self.scales
        address = self.v_address + v.stage * cfg.v_tile.nbytes
        scales.ready_v(v.stage)
        for step in range(cfg.product.steps(cfg.tile_n)):
            rows = [self.p[4 * step + i] for i in range(4)]
            for n in range(0, cfg.head_dim_v, N_OF_LOAD):
                for i, columns in enumerate(self.v.load(address, step, n)):
                    first = n + i * ROWS_OF_MATRIX
                    _add(cfg.product, self.o, first, rows, columns, scales.of_p(step), scales.of_v(step, first))

    def begin_last(self) -> None:
        self._multiply_o()

    def wait(self, pending: int) -> None:
        """A product is complete when its instruction is."""

    def release(self, k: Cursor, v: Cursor) -> None:
        k.arrive()
        v.arrive_after(k)

    def settle(self, softmax: Softmax, v: Cursor) -> None:
        """V has been released."""

    def rescale(self, softmax: Softmax, has_grown: Boolean) -> None:
        for r in range(ROWS_PER_THREAD):
            self.factor[r] = Float32(cutlass.select_(has_grown, softmax.factor[r], Float32(1.0)))

    def pack(self, s: cute.Tensor) -> None:
        """Round P to operands A: of each half of a step over keys, a word of each row; 0 for keys behind those of s."""
        numbers = NUMBERS // 2 * self.cfg.product.per_byte
        for i in range(self.cfg.p_regs):
            half, r = divmod(i, ROWS_PER_THREAD)
            values = [s[x] for x in row_registers(2 * cute.size(s), r)[half * numbers : (half + 1) * numbers]]
            if not values:
                self.p[i] = Int32(0)
            elif self.cfg.multiplies_e2m1:
                self.p[i] = pack_e2m1(values)
            else:
                self.p[i] = pack_word(values, self.cfg.v_dtype)

    def _multiply_o(self) -> None:
        for i in range(cute.size(self.o)):
            self.o[i] = self.o[i] * self.factor[i // 2 % 2]


def _add(
    product: Product, c: cute.Tensor, n: int, a: list[Int32], b: list[Int32], a_scale: Scale, b_scale: Scale
) -> None:
    """Add a product to the accumulators of columns n to n + 7."""
    registers = range(n // ROWS_OF_MATRIX * _REGS_OF_N, (n // ROWS_OF_MATRIX + 1) * _REGS_OF_N)
    for i, x in zip(registers, add_product(product, [c[i] for i in registers], a, b, a_scale, b_scale)):
        c[i] = x
