"""Reduce role: adds each step's dQ to its float32 sum in global memory, by one bulk addition for each warpgroup's
share: the sum keeps the order in which threads hold dQ.

Deterministic: the key blocks that a query block meets add to it one after the other. A counter for each query block
says how many have; a warp waits until it reaches its CTA's place in the order, and counts up when its additions are
done. That takes longer than a step, so several warps take the steps in turn. Nobody waits for a CTA that may not run
yet: CTAs that come earlier in the order were launched earlier, or (`Config.shifted`) run at the same time.

Waits:   compute_reduce_dQ.full
Signals: compute_reduce_dQ.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...pipeline.tma import bulk_add
from .config import TEAMS
from .work import work_tile


@cute.jit
def reduce(context):
    cfg, args = context.cfg, context.args
    dq = context.ends("reduce").compute_reduce_dQ
    own = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - context.first_reduce_warp
    work = work_tile(context)
    steps = cutlass.select_(own < cfg.reducers, work.blocks * cfg.group, 0)
    share = cfg.dq_bytes // 4
    cute.arch.griddepcontrol_wait()  # the sums are cleared by the statistics kernel
    for i in cutlass.range(own, steps, cfg.reducers, unroll=1):
        head = work.head_kv * cfg.group + i // work.blocks
        m_block = work.block(work.first + i % work.blocks, cfg.shifted)
        block = work.row_block + m_block
        if cutlass.const_expr(cfg.deterministic):
            wait_for_turn(args.turns, block, head, work.turn(m_block, cfg))
        target, place = args.dq_sum[None, block, head].iterator, context.smem.pointer("dQ", Float32)
        for team in cutlass.range_constexpr(TEAMS):
            dq.wait_full(own * TEAMS + team, i // cfg.reducers & 1)
            with cute.arch.elect_one():
                bulk_add(place + team * share, target + team * share, cfg.dq_bytes)
                cute.arch.cp_async_bulk_commit_group()
        for team in cutlass.range_constexpr(TEAMS):
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(TEAMS - 1 - team, read=True)
            dq.arrive_read(own * TEAMS + team)
        if cutlass.const_expr(cfg.deterministic):
            pass_turn_on(args.turns, block, head)


@cute.jit
def wait_for_turn(turns: cute.Tensor, block: Int32, head: Int32, turn: Int32):
    """Until `turn` key blocks have added to a query block."""
    counter = turns.iterator + cute.crd2idx((block, head), turns.layout)
    done = Int32(-1)
    while done != turn:
        done = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")  # additions after the wait come after those before it


@cute.jit
def pass_turn_on(turns: cute.Tensor, block: Int32, head: Int32):
    """Count this CTA's additions, once they are done."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
        counter = turns.iterator + cute.crd2idx((block, head), turns.layout)
        cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
