"""MMA role, one warp, one elected thread: issues every product; the leader of a CTA pair issues for both CTAs.

Two Q tiles ping-pong. Per work tile: S0 = Q0 K, S1 = Q1 K of the last key block. Then per block and Q tile: O += P V,
and S = Q K of the next block (key blocks descend). P aliases S. The matrix unit works in order: the next S may
overwrite P once PV is issued. With P in shared memory, the next S comes first.

Waits:   load_mma_Q.full, load_mma_KV.full (for 8-bit K and V convert_mma_KV.full), mma_softmax_S.free,
         softmax_mma_Ptail.full (softmax_mma_P.full, mma_correction_O.free)
Signals: mma_softmax_S.full, mma_correction_O.full, load_mma_Q.free, load_mma_KV.free (convert_mma_KV.free),
         softmax_mma_P.free
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ...core.constant import Constant
from ...fwd.variant import KvLoad, OutStore
from ...pipeline.cursor import ALL, Cursor, consume, produce
from ...pipeline.ends import LEADER, End, Ends
from .. import tmem
from ..block_scales import copy_scales
from ..mma import CHUNK_COLUMNS, Umma, k_per_mma
from .block_scales import scales_in_smem
from .config import Schedule, Sm100ForwardConfig
from .context import Sm100ForwardContext
from .work import Queue


@cute.jit
def mma(context: Sm100ForwardContext):
    if context.args.order.rank == LEADER:
        ends, addresses = context.ends("mma"), TmemAddresses(context)
        if const_expr(context.cfg.p_in_smem):
            issue_with_p_in_smem(context, ends, addresses)
        elif const_expr(context.cfg.s_stages == 1):
            issue_ping_pong(context, ends, addresses)
        else:
            issue_ahead(context, ends, addresses)
    elif const_expr(context.cfg.schedule is Schedule.DYNAMIC):
        read_queue(context)


@cute.jit
def read_queue(context: Sm100ForwardContext):
    """Release every response: the channel counts a warp of each role in both CTAs of a pair."""
    queue = Queue.first(context, context.ends("mma"))
    while queue.has_tile():
        queue = queue.next()


@cute.jit
def issue_ping_pong(context: Sm100ForwardContext, ends: cutlass.Constexpr[Ends], addresses: TmemAddresses):
    """One S per Q tile: its next S follows O += P V."""
    cfg = context.cfg
    qk, pv = cfg.qk, cfg.pv
    q_address, kv_address = context.smem.address("Q"), context.smem.address("KV")
    q_descriptors = [qk.a.at(q_address + tile * cfg.q_tile.nbytes) for tile in range(cfg.q_tiles)]
    q, kv = consume(ends.load_mma_Q, ALL), consume(kv_end(cfg, ends))
    # S.free means: the P head is stored, and O is ready for the next addition. mma waits for it after it commits S and
    # before it issues the next S. So the first S of the kernel needs no wait: the cursor starts one iteration ahead.
    s = produce(ends.mma_softmax_S, ALL, ahead=1)
    ptail = consume(ends.softmax_mma_Ptail, ALL)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            k = qk.b.at(kv_address + kv.stage * cfg.kv_stage_bytes)
            for tile in cutlass.range_constexpr(cfg.q_tiles):
                q.wait(tile)
                if const_expr(tile == 0):
                    kv.wait()
                with cute.arch.elect_one():
                    qk.issue(addresses.S[tile], q_descriptors[tile], k, False)
                    s.commit(tile)
            with cute.arch.elect_one():
                kv.commit()
            kv = kv.next()

            for i in cutlass.range(work.count - 1, unroll=1):
                kv.wait()
                v = pv.b.at(kv_address + kv.stage * cfg.kv_stage_bytes)
                v_cursor = kv
                kv = kv.next()
                k = qk.b.at(kv_address + kv.stage * cfg.kv_stage_bytes)
                for tile in cutlass.range_constexpr(cfg.q_tiles):
                    issue_pv(cfg, addresses, tile, v, i > 0, s, ptail)
                    if const_expr(tile == 0):
                        kv.wait()
                    with cute.arch.elect_one():
                        if const_expr(tile == cfg.q_tiles - 1):
                            v_cursor.commit()
                        qk.issue(addresses.S[tile], q_descriptors[tile], k, False)
                        s.commit(tile)
                        if const_expr(tile == cfg.q_tiles - 1):
                            kv.commit()
                kv = kv.next()
                s = s.next()

            if const_expr(cfg.out_store is not OutStore.TMA_OVER_Q):
                with cute.arch.elect_one():
                    for tile in cutlass.range_constexpr(cfg.q_tiles):
                        q.commit(tile)
            q = q.next()
            kv.wait()
            v = pv.b.at(kv_address + kv.stage * cfg.kv_stage_bytes)
            for tile in cutlass.range_constexpr(cfg.q_tiles):
                issue_pv(cfg, addresses, tile, v, work.count > 1, s, ptail)
                with cute.arch.elect_one():
                    if const_expr(tile == cfg.q_tiles - 1):
                        kv.commit()
                    ends.mma_correction_O.commit_full(tile)
            kv = kv.next()
            s = s.next()
        queue = queue.next()


@cute.jit
def issue_with_p_in_smem(context: Sm100ForwardContext, ends: cutlass.Constexpr[Ends], addresses: TmemAddresses):
    """One S per Q tile: its next S precedes O += P V, so it is there when softmax is."""
    cfg = context.cfg
    q, kv = consume(ends.load_mma_Q, ALL), consume(ends.load_mma_KV)
    s, p = produce(ends.mma_softmax_S, ALL), consume(ends.softmax_mma_P, ALL)
    o = produce(ends.mma_correction_O, ALL)
    qk = Operation(cfg.qk, "Q", addresses.S, addresses.Q_scales, addresses.KV_scales, cfg.scale_bytes)
    pv = Operation(cfg.pv, "P", addresses.O, addresses.P_scales, addresses.KV_scales, cfg.v_scale_bytes)
    freed = 0 if const_expr(cfg.out_store is OutStore.TMA_OVER_Q) else cfg.q_tiles  # Q tiles that this role frees

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            for tile in cutlass.range_constexpr(cfg.q_tiles):
                q.wait(tile)
                issue_of_tile(context, tile, qk, s, kv, False, copies_a=True)
            kv, s = kv.next(), s.next()
            for i in cutlass.range(work.count, unroll=1):
                v = kv
                if i + 1 == work.count:
                    with cute.arch.elect_one():
                        for tile in cutlass.range_constexpr(freed):
                            q.commit(tile)
                if i + 1 < work.count:
                    for tile in cutlass.range_constexpr(cfg.q_tiles):
                        issue_of_tile(context, tile, qk, s, kv, False)
                    v, s = kv.next(), s.next()
                for tile in cutlass.range_constexpr(cfg.q_tiles):
                    if i == 0:
                        o.wait(tile)
                    issue_of_tile(context, tile, pv, p, v, i > 0)
                kv, p = v.next(), p.next()
            with cute.arch.elect_one():
                for tile in cutlass.range_constexpr(cfg.q_tiles):
                    o.commit(tile)
            q, o = q.next(), o.next()
        queue = queue.next()


class Operation(NamedTuple):
    """A product of each Q tile: D (+)= A B. a: region of shared memory with the tiles of A. d, a_scales: tensor-memory
    addresses of D and of the scales of A, for each tile. b_scales: that of the scales of B in the first stage. Both are
    None without scales. b_scale_bytes: those of a stage."""

    product: Umma
    a: str
    d: list[Int32]
    a_scales: list[Int32] | None
    b_scales: Int32 | None
    b_scale_bytes: int


def issue_of_tile(
    context: Sm100ForwardContext,
    tile: int,
    operation: Operation,
    ready: Cursor,
    kv: Cursor,
    accumulate: bool | Boolean,
    copies_a: bool = False,
):
    """D (+)= A B of one Q tile; B is at `kv`. ready: position in the channel that tells when the product may begin; the
    product commits it. copies_a: the scales of A are not in tensor memory yet."""
    cfg, smem, product = context.cfg, context.smem, operation.product
    assert product.a is not None
    if tile == 0:
        kv.wait()
    ready.wait(tile)
    a_descriptor = product.a.at(smem.address(operation.a) + tile * product.a.tile.nbytes)
    b_descriptor = product.b.at(smem.address("KV") + kv.stage * cfg.kv_stage_bytes)
    with cute.arch.elect_one():
        scales = None
        if operation.a_scales is not None:
            scales = operation.a_scales[tile], operation.b_scales + kv.stage * cfg.scale_columns
            if copies_a:
                copy_scales(scales_in_smem(context, operation.a, tile), scales[0], cfg.scale_bytes)
            if tile == 0:
                copy_scales(scales_in_smem(context, "KV", kv.stage), scales[1], operation.b_scale_bytes)
        product.issue(operation.d[tile], a_descriptor, b_descriptor, accumulate, scales=scales)
        ready.commit(tile)
        if tile == cfg.q_tiles - 1:
            kv.commit()


@cute.jit
def issue_ahead(context: Sm100ForwardContext, ends: cutlass.Constexpr[Ends], addresses: TmemAddresses):
    """Two S of one Q tile: S of the next key block precedes O += P V of this one, so it is there when softmax is."""
    cfg = context.cfg
    q, kv = consume(ends.load_mma_Q, 0), consume(kv_end(cfg, ends))
    s, ptail = produce(ends.mma_softmax_S, ahead=1), consume(ends.softmax_mma_Ptail)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            q.wait()
            issue_s(context, addresses, s, kv)
            kv = kv.next()
            for i in cutlass.range(work.count, unroll=1):
                if i + 1 < work.count:
                    issue_s(context, addresses, s.next(), kv)
                    kv = kv.next()
                else:
                    if const_expr(cfg.out_store is not OutStore.TMA_OVER_Q):
                        with cute.arch.elect_one():
                            q.commit()
                kv.wait()
                v = cfg.pv.b.at(context.smem.address("KV") + kv.stage * cfg.kv_stage_bytes)
                issue_pv(cfg, addresses, 0, v, i > 0, s, ptail)
                with cute.arch.elect_one():
                    kv.commit()
                    ends.mma_correction_O.commit_full(0)
                kv = kv.next()
                s = s.next()
            q = q.next()
        queue = queue.next()


@cute.jit
def issue_s(context: Sm100ForwardContext, addresses: TmemAddresses, s: Cursor, kv: Cursor):
    """S = Q K of the key block at `kv`, to the stage of `s`. The product that read the P there has been issued."""
    cfg, qk = context.cfg, context.cfg.qk
    kv.wait()
    k = qk.b.at(context.smem.address("KV") + kv.stage * cfg.kv_stage_bytes)
    with cute.arch.elect_one():
        qk.issue(addresses.S[0] + s.stage * cfg.tile_n, qk.a.at(context.smem.address("Q")), k, False)
        s.commit()
        kv.commit()


def kv_end(cfg: Sm100ForwardConfig, ends: Ends) -> End:
    """Channel end that supplies K and V."""
    if cfg.converts_kv:
        return ends.convert_mma_KV
    return ends.gather_mma_KV if cfg.kv_load is KvLoad.GATHER else ends.load_mma_KV


class TmemAddresses(Constant):
    """TMEM addresses of S, P, O and scales of blocks per Q tile, relative to the run-time `tmem.base`."""

    def __init__(self, context: Sm100ForwardContext):
        cfg, base, tmem_map = context.cfg, tmem.base(context.smem), context.tmem

        def by_tile(first: int, step: int) -> list[Int32]:
            return [base + first + tile * step for tile in range(cfg.q_tiles)]

        self.S = by_tile(tmem_map.S, cfg.tile_n)
        self.P = None if cfg.p_in_smem else by_tile(tmem_map.P, cfg.tile_n)
        self.O = by_tile(tmem_map.O, cfg.o_columns)
        self.Q_scales = self.P_scales = self.KV_scales = None
        if cfg.has_block_scales:
            self.Q_scales = by_tile(tmem_map.Q_scales, cfg.scale_columns)
            self.P_scales = by_tile(tmem_map.P_scales, CHUNK_COLUMNS)
            self.KV_scales = base + tmem_map.KV_scales


def issue_pv(
    cfg: Sm100ForwardConfig, addresses: TmemAddresses, tile: int, v, accumulate: Boolean, s: Cursor, ptail: Cursor
):
    """O += P V for one Q tile: the P head as soon as it is stored, then the P tail."""
    pv = cfg.pv
    head_steps = cfg.p_head // k_per_mma(pv.dtype.width)
    o, p = addresses.O[tile], addresses.P[tile]
    stage = tile
    if cfg.s_stages == 2:
        p, stage = p + s.stage * cfg.tile_n, None
    s.wait(stage)
    with cute.arch.elect_one():
        pv.issue(o, p, v, accumulate, range(head_steps))
    s.at_iteration_of(ptail).wait(stage)
    with cute.arch.elect_one():
        pv.issue(o, p, v, True, range(head_steps, pv.steps))
