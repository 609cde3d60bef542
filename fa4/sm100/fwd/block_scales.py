"""Scales of blocks of 32 numbers in the forward: chunks of a Q tile and of a key block, see `sm100.block_scales`.

They are loaded with the numbers that they belong to, and mma copies them before the first product that reads them. P
has the scale 1, which softmax writes to tensor memory once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint8
from torch import Tensor

from ...core.sequence import Rows
from ...fwd.device.work import Work
from ...pipeline.cursor import Cursor
from ...pipeline.tma import bulk_load
from ...runtime.spec import E8M0_ONE, MX_BLOCK, AttentionInputs, Cache
from ..block_scales import as_chunks, in_tiles, sequences_of
from .config import Sm100ForwardConfig, Sm100ForwardContext
from .work import row_tile


def in_chunks(cache: Cache, inputs: AttentionInputs, cfg: Sm100ForwardConfig) -> Cache:
    """Return the cache with scales in chunks, (batch, heads, tiles, bytes). Those of packed sequences are (1, heads,
    tiles, bytes), and the tiles of a sequence begin at `first_tile`. heads: of q divided by `packed_heads`, of k."""
    packed, cu_q, cu_k = cfg.packed_heads, inputs.cu_seqlens_q, inputs.cu_seqlens_k
    q_rows = cache.q_scales.unflatten(-2, (-1, packed)).transpose(-3, -2).flatten(-4, -3)
    of_q = in_tiles(q_rows, cfg.tile_m, None if cu_q is None else cu_q * packed)
    of_k = in_tiles(cache.k_scales, cfg.tile_n, cu_k)
    of_v = in_tiles(_with_defined_ends(cache.v_scales, inputs), cfg.tile_n, cu_k, MX_BLOCK)
    # (batch, tiles, rows, heads, blocks), of v (batch, tiles, blocks, heads, columns)
    chunks = (as_chunks(x.transpose(2, 3)) for x in (of_q, of_k, of_v.transpose(2, 4)))
    return cache._replace(**dict(zip(("q_scales", "k_scales", "v_scales"), chunks)))


def _with_defined_ends(scales: Tensor, inputs: AttentionInputs) -> Tensor:
    """Return scales of v, with 1 for blocks without a key: P is 0 there, and 0 times a NaN is NaN."""
    if inputs.cu_seqlens_k is None:
        if inputs.seqused_k is None:
            return scales
        first = MX_BLOCK * torch.arange(scales.shape[1], device=scales.device)
        return torch.where((first < inputs.seqused_k[:, None])[..., None, None], scales, E8M0_ONE)
    bounds = inputs.cu_seqlens_k
    counts = bounds.diff() if inputs.seqused_k is None else torch.minimum(bounds.diff(), inputs.seqused_k)
    sequence, first = sequences_of(
        scales.shape[0], bounds // MX_BLOCK + torch.arange(len(bounds), device=bounds.device)
    )
    return torch.where((MX_BLOCK * first < counts[sequence])[:, None, None], scales, E8M0_ONE)


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
