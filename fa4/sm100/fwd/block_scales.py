"""Scales of blocks of 32 numbers in the forward: chunks of a Q tile and of a key block, see `sm100.block_scales`.

They are loaded with the numbers that they belong to, and mma copies them before the first product that reads them. P
has the scale 1, which softmax writes to tensor memory once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8

from ...core.rows import Rows
from ...fwd.device.work import Work
from ...pipeline.cursor import Cursor
from ...pipeline.tma import bulk_load
from .context import Sm100ForwardContext
from .work import row_tile


def load_scales_of_q(context: Sm100ForwardContext, work: Work, tile: int, q: Cursor) -> None:
    """Whole warp: start loading the scales of a Q tile; its barrier counts them."""
    cfg = context.cfg
    index = row_tile(context, work, tile)
    if cfg.varlen:
        index = index + first_tile(work, work.query_rows, cfg.packed_heads, cfg.tile_m)
    at, target = (work.batch, work.head, index), scales_in_smem(context, "Q", tile)
    _load(context, context.args.cache.q_scales, at, target, cfg.scale_bytes, q.barrier(tile))


def load_scales_of_keys(
    context: Sm100ForwardContext, scales: cute.Tensor, nbytes: int, work: Work, block: Int32, kv: Cursor
) -> None:
    """Whole warp: start loading the scales of K or V of a key block; the barrier of its stage counts them."""
    cfg = context.cfg
    if cfg.varlen:
        block = block + first_tile(work, work.keys.rows, 1, cfg.tile_n)
    at = work.batch, work.head_kv, block
    _load(context, scales, at, scales_in_smem(context, "KV", kv.stage), nbytes, kv.barrier())


def first_tile(work: Work, rows: Rows, packed: int, tile: int) -> Int32:
    """Index of the first tile of a packed sequence among those of all."""
    return rows.first * packed // tile + work.batch


def _load(
    context: Sm100ForwardContext,
    scales: cute.Tensor,
    at: tuple[Int32, Int32, Int32],
    target: cute.Pointer,
    nbytes: int,
    barrier: cute.Pointer,
) -> None:
    """at: batch, head and tile."""
    batch, head, tile = at
    tile = cutlass.min(tile, cute.size(scales, mode=[2]) - 1)  # a tile without rows has no scales
    coord = (0 if context.cfg.varlen else batch, head, tile, 0)
    with cute.arch.elect_one():
        bulk_load(scales.iterator + cute.crd2idx(coord, scales.layout), target, nbytes, barrier)


def scales_in_smem(context: Sm100ForwardContext, name: str, index: int | Int32) -> cute.Pointer:
    """The scales of a Q tile ("Q") or of a stage of K and V ("KV")."""
    return context.smem.pointer(f"{name} scales", Uint8) + index * context.cfg.scale_bytes
