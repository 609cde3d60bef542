"""Branches of a kernel that run each warp's role."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ..core.constant import Constant
from .roles import WARPS_PER_WARPGROUP, RoleTable


@cute.jit
def run_roles(table: cutlass.Constexpr[RoleTable], context: Constant, first: cutlass.Constexpr[int] = 0):
    """Branch each warp to its role's body, called with `context`. Unused warps only release their registers.

    The first branch is by warpgroup (all its warps must execute the same setmaxnreg), the second by role. Each branch
    is in the `else` of the previous one: the compiler merges parts of independent branches, and then cannot prove that
    a warp's control flow is uniform. Only code that setmaxnreg dominates gets its registers.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    end = table.groups[first][-1].warps[1]
    if const_expr(first + 1 == len(table.groups)):
        _run_group(table, context, first)
    else:
        if warp < end:
            _run_group(table, context, first)
        else:
            run_roles(table, context, first + 1)


@cute.jit
def _run_group(table: cutlass.Constexpr[RoleTable], context: Constant, group: cutlass.Constexpr[int]):
    regs = table.groups[group][0].regs
    if const_expr(regs > table.launch_regs()):
        cute.arch.setmaxregister_increase(regs)
    elif const_expr(regs < table.launch_regs()):
        cute.arch.setmaxregister_decrease(regs)
    _run_role(table, context, group, 0)


@cute.jit
def _run_role(
    table: cutlass.Constexpr[RoleTable], context: Constant, group: cutlass.Constexpr[int], index: cutlass.Constexpr[int]
):
    """Run role `index` of a group or a later one. Warps after the last role do nothing."""
    role, others = table.groups[group][index], len(table.groups[group]) - index - 1
    body, stop = role.body, role.warps[1]  # a run-time branch cannot carry a record of functions
    if const_expr(others == 0 and stop % WARPS_PER_WARPGROUP == 0):
        body(context)
    else:
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < stop:
            body(context)
        elif const_expr(others > 0):
            _run_role(table, context, group, index + 1)
