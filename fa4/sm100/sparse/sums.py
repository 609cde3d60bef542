"""Additions of columns of dV and dK to the float32 sums of their keys. Deterministic: stores to rows of the list's."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...bwd.device.list_work import SparseWork
from ...bwd.lists import SparseContext
from ...core.vec_io import add_floats, bits, store_vec
from ...pipeline.roles import WARP
from .. import tmem

KEYS_OF_THREAD = WARP // tmem.QUAD_ROWS  # of a warp's 32, in the form of `tmem.load_quads`


@cute.jit
def add_columns(
    context: SparseContext,
    work: SparseWork,
    is_dv: cutlass.Constexpr[bool],
    first: Int32,
    values: list[list[list[Float32]]],
    rows: list[Int32],
    exists: list[Boolean],
):
    """Add this thread's columns of dV or dK, scaled, to sums. first: column. values: from `tmem.load_quads`. rows:
    targets of the thread's keys. exists: whether the list has these keys."""
    t = context.args.tensors
    target = t.dv if const_expr(is_dv) else t.dk
    for i in cutlass.range_constexpr(KEYS_OF_THREAD):
        if exists[i]:
            pointer = target.iterator + cute.crd2idx((rows[i], work.head, first), target.layout)
            pointer += cute.arch.lane_idx() % 4 * 2
            for group in cutlass.range_constexpr(len(values[i])):
                pair = values[i][group]
                if const_expr(not is_dv):
                    pair = [x * context.args.scale for x in pair]
                put(pointer + 8 * group, pair, context.cfg.deterministic)


def put(pointer: cute.Pointer, pair: list[Float32], deterministic: bool) -> None:
    if deterministic:
        store_vec(pointer, [bits(x) for x in pair])
    else:
        add_floats(pointer, pair)
