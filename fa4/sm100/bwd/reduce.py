"""Reduce role, four warps: adds each step's dQ to its float32 accumulator in global memory.

A thread has one query (or, `dq_transposed`, one column of Q). In a pair each CTA has half of the queries, and a query
two threads: lane l + 64 has the second half of the columns of lane l. Chunks of tensor-memory columns go through two
stages of shared memory, in the accumulator's own order, so that one bulk addition of contiguous bytes takes a chunk.

Deterministic: the key blocks that a query block (of a pair, each half of it) meets take turns, see `bwd.semaphores`. CTAs
that come earlier in the order were launched earlier and wait for nobody later, so every wait ends. A step's first
chunks are staged while products do not need shared memory; then the turn is waited for. It is passed on in the step
after it, at the same place: the additions are done by then, where to wait for them at once would hold up the next dQ,
and the products, which need dQ's place. The CTA's next dQ depends on nobody's turn.

Waits:   mma_reduce_dQ.full
Signals: mma_reduce_dQ.free
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...bwd.semaphores import release_semaphore, wait_bulk_semaphore, wait_for_bulk_additions
from ...core.vec_io import bits, store_vec
from ...pipeline.cursor import ALL, Cursor, consume
from ...pipeline.tma import bulk_add
from .. import tmem
from .config import CHUNK, CHUNK_BYTES, DQ_STAGES, LANES
from .work import work_tile


@cute.jit
def reduce(context):
    cfg, args = context.cfg, context.args
    ends = context.ends("reduce")
    issues = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == context.first_reduce_warp
    work = work_tile(context)
    products, stage = consume(ends.mma_reduce_dQ, ALL), Int32(0)
    owed = Int32(NONE)
    for member in cutlass.range(cfg.group, unroll=1):
        head = work.head_kv * cfg.group + member
        of_head = work.of_head(context, member)
        for i in cutlass.range(of_head.first, of_head.stop, unroll=1):
            m_block = of_head.block(i)
            products.wait(0)
            block = work.row_block + m_block
            order_index = OrderedAdd.at(context, work, m_block, head, owed)
            target = args.dq_sum[None, block, head].iterator + work.rank * (cfg.tile_m * cfg.columns // cfg.ctas)
            stage = add_to_accumulator(context, products, target, issues, stage, order_index)
            if cutlass.const_expr(cfg.deterministic):
                owed = order_index.own
            products = products.next()
    if cutlass.const_expr(cfg.deterministic):  # noqa: SIM102  one is decided at compile time
        if issues:
            release_owed(context, owed)
    if issues:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


NONE = -1  # turn is owed


class OrderedAdd(NamedTuple):
    """Where the counter of a query block (of a pair, of a half of it) is, what it must have reached before this CTA
    adds, and which counter is to be counted up before that: `release_owed`."""

    own: Int32
    place: Int32
    owed: Int32

    @staticmethod
    def at(context, work, m_block: Int32, head: Int32, owed: Int32) -> OrderedAdd | None:
        """None where additions have no order."""
        cfg = context.cfg
        if not cfg.deterministic:
            return None
        block = (work.row_block + m_block) * cfg.ctas + work.rank
        own = Int32(cute.crd2idx((block, head), context.args.semaphores.layout))
        return OrderedAdd(own, work.order_index(m_block, head, context), owed)


@cute.jit
def release_owed(context, owed: Int32):
    """The warp that issues additions: pass on the turn of the step before, if there was one."""
    if owed != NONE:
        wait_for_bulk_additions()
        with cute.arch.elect_one():
            release_semaphore(context.args.semaphores.iterator + owed)


@cute.jit
def acquire_order(context, order_index: OrderedAdd):
    """The same warp, before a step's additions."""
    release_owed(context, order_index.owed)
    wait_bulk_semaphore(context.args.semaphores.iterator + order_index.own, order_index.place)


@cute.jit
def add_to_accumulator(context, products: Cursor, target: cute.Pointer, issues: Boolean, stage: Int32, order_index):
    """Add one step's dQ, DQ_STAGES chunks at a time; returns the stage after the last one used.

    Args:
        products: this step's dQ in tensor memory, whose first part is there.
        target: the block's accumulator (of a pair, this CTA's half), chunk after chunk.
        issues: whether this warp is the one that issues (and waits for) the additions.
        stage: the next stage of shared memory.
        turn: waited for before the first addition, if they have an order, else None.
    """
    cfg = context.cfg
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    address = tmem.lane_address(context.tmem.dQ, warp)
    lane = cute.arch.thread_idx()[0] % LANES
    chunks, last = cfg.dq_columns // CHUNK, cfg.dq_parts - 1
    if cutlass.const_expr(cfg.dq_transposed):
        # The next dP waits for the place of these 64 rows. They lie in the first 16 lanes of each warp.
        high = tmem.load(tmem.lane_address(context.tmem.dQ_high, warp), cfg.tile_m)
        tmem.wait_loads()
        products.arrive(0)
        if cutlass.const_expr(cfg.deterministic):  # noqa: SIM102  one is decided at compile time
            if issues:
                acquire_order(context, order_index)
        row = lane // 32 * 16 + lane % 32
        part = target + chunks * (CHUNK_BYTES // 4)
        add_chunk(context, high, row, cfg.columns - LANES, part, issues, stage, lane % 32 < 16)
        stage = (stage + 1) % DQ_STAGES
        products.wait(last)
    for first in cutlass.range_constexpr(0, chunks, DQ_STAGES):
        batch = range(first, min(first + DQ_STAGES, chunks))
        loaded = [tmem.load(address + chunk * CHUNK, CHUNK) for chunk in batch]
        tmem.wait_loads()
        if cutlass.const_expr(batch[-1] == chunks - 1):
            products.arrive(last)
        if cutlass.const_expr(cfg.deterministic and first == 0 and not cfg.dq_transposed):
            add_in_order(context, loaded, lane, target, issues, stage, order_index)
            stage = (stage + len(loaded)) % DQ_STAGES
        else:
            for i in cutlass.range_constexpr(len(loaded)):
                part = target + batch[i] * (CHUNK_BYTES // 4)
                add_chunk(context, loaded[i], lane, LANES, part, issues, stage)
                stage = (stage + 1) % DQ_STAGES
    return stage


@cute.jit
def add_in_order(context, chunks: list, row: Int32, target: cute.Pointer, issues: Boolean, stage: Int32, order_index):
    """Stage a step's first chunks, as many as there are stages or fewer; then wait for the turn, and add them."""
    if issues:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=context.dq_staging, number_of_threads=LANES)
    for i in cutlass.range_constexpr(len(chunks)):
        place_chunk(chunks[i], stage_place(context, (stage + i) % DQ_STAGES), row, LANES)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.dq_staging, number_of_threads=LANES)
    if issues:
        acquire_order(context, order_index)
        for i in cutlass.range_constexpr(len(chunks)):
            place = stage_place(context, (stage + i) % DQ_STAGES)
            issue_addition(place, target + i * (CHUNK_BYTES // 4))


def stage_place(context, stage: Int32) -> cute.Pointer:
    return context.smem.pointer("dQ", Float32) + stage * (CHUNK_BYTES // 4)


def place_chunk(dq: list, place: cute.Pointer, row: Int32, rows: int) -> None:
    """A chunk, (columns / 4, rows, 4) floats: this thread's row of it."""
    for column in range(0, len(dq), 4):
        store_vec(place + (column * rows + 4 * row), [bits(x) for x in dq[column : column + 4]])


@cute.jit
def issue_addition(place: cute.Pointer, target: cute.Pointer):
    """Start to add a chunk, as a group of its own."""
    with cute.arch.elect_one():
        bulk_add(place, target, CHUNK_BYTES)
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def add_chunk(
    context,
    dq: list,
    row: Int32,
    rows: cutlass.Constexpr[int],
    target: cute.Pointer,
    issues: Boolean,
    stage: Int32,
    takes_part: Boolean = True,
):
    """Stage a chunk, `place_chunk`, this thread's row being `row`, and start adding it."""
    place = stage_place(context, stage)
    if issues:
        cute.arch.cp_async_bulk_wait_group(DQ_STAGES - 1, read=True)  # the stage's last addition has read it
    cute.arch.barrier(barrier_id=context.dq_staging, number_of_threads=LANES)
    if takes_part:
        place_chunk(dq, place, row, rows)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.dq_staging, number_of_threads=LANES)
    if issues:
        issue_addition(place, target)
