"""Reduce role: adds each step's dQ to its float32 sum in global memory, by one bulk addition for each warpgroup's
share: the sum keeps the order in which threads hold dQ.

Deterministic: the key blocks that a query block meets take turns (`bwd.turns`). To wait for one, to add and to pass it
on takes longer than a step, so several warps take the steps in turn. Nobody waits for a CTA that may not run
yet: CTAs that come earlier in the order were launched earlier, or (`Config.shifted`) run at the same time.

Waits:   compute_reduce_dQ.full
Signals: compute_reduce_dQ.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...bwd.turns import counter, pass_turn_on, wait_for_bulk_additions, wait_for_bulk_turn
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
            turn = work.turn(m_block, cfg)
            wait_for_bulk_turn(counter(args.turns, block, head), turn)
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
            with cute.arch.elect_one():
                wait_for_bulk_additions()
                pass_turn_on(counter(args.turns, block, head))
