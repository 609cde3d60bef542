"""Scales of blocks of 32 x 32 numbers in the backward: chunks of each tile, see `sm100.block_scales`.

A product reduces columns of a tile (S and dP) or rows (dV, dK and dQ). A block of 32 rows and 32 columns has one scale,
so the same numbers serve both; the first chunk of a tile is for products that reduce columns, the second for those that
reduce rows. P and dS have the scale 1, which compute writes to tensor memory once.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Uint8

from ...pipeline.cursor import Cursor
from ...pipeline.tma import bulk_load
from ..block_scales import copy_scales
from ..mma import CHUNK_COLUMNS
from .context import Sm100BackwardContext
from .work import Sm100BackwardWork

COLUMNS, ROWS = 0, 1  # what a product reduces: index of a tile's chunk


def load_scales(
    context: Sm100BackwardContext, cursor: Cursor, work: Sm100BackwardWork, name: str, coord: tuple[Int32, Int32]
) -> None:
    """Whole warp: start loading the scales of a tile at coord = (head, block); its barrier counts them."""
    nbytes, scales = context.cfg.scale_bytes(name), getattr(context.args.scales, name.lower())
    offset = cute.crd2idx((work.batch, *coord, 0), scales.layout)
    with cute.arch.elect_one():
        bulk_load(scales.iterator + offset, _in_smem(context, name, cursor.stage), nbytes, cursor.barrier())


def _in_smem(context: Sm100BackwardContext, name: str, stage: Int32) -> cute.Pointer:
    return context.smem.pointer(f"{name} scales", Uint8) + stage * context.cfg.scale_bytes(name)


def copy_scales_of(context: Sm100BackwardContext, base: Int32, name: str, stage: Int32 | int = 0) -> None:
    """One thread of mma, when a tile is full: copy its scales to tensor memory. The products that read these columns
    before are complete: the stage of shared memory was free when it was loaded."""
    if context.cfg.has_block_scales:
        address = _address(context, base, name, stage)
        copy_scales(_in_smem(context, name, stage), address, context.cfg.scale_bytes(name))


def scales_of_product(
    context: Sm100BackwardContext, base: Int32, a: str | None, b: str, reduced: int, stage: Int32 | int = 0
) -> tuple[Int32, Int32] | None:
    """Return tensor-memory addresses of the scales of a product's operands; None if they have none.

    Args:
        a: tile of A; None for P or dS.
        b: tile of B.
        reduced: `COLUMNS` or `ROWS`.
        stage: of b.
    """
    if not context.cfg.has_block_scales:
        return None
    of_a = base + context.tmem.ones if a is None else _address(context, base, a, 0)
    return of_a, _address(context, base, b, stage) + reduced * CHUNK_COLUMNS


def _address(context: Sm100BackwardContext, base: Int32, name: str, stage: Int32 | int) -> Int32:
    return base + getattr(context.tmem, f"{name}_scales") + stage * context.cfg.scale_columns(name)
