"""Scales of blocks of 32 numbers in the forward, on the host; see `block_scales`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.spec import E8M0_ONE, MX_BLOCK, AttentionInputs, Cache
from ..scale_chunks import as_chunks, in_tiles, sequences_of
from .config import Sm100ForwardConfig


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
