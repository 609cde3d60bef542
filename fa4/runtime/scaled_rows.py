"""Cache rows of latents with factors inside, 656 bytes each: the layout that FlashMLA and vLLM ("fp8_ds_mla") use.

    bytes 0 to 511    e4m3: the latent's 512 columns, divided by the factor of their tile
    bytes 512 to 527  four float32: factors of the tiles, of 128 columns each
    bytes 528 to 655  bfloat16: the 64 rotated columns

A key is bfloat16: its first 512 columns are the products e4m3 * factor, rounded to bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.uint8  # of a cache of such rows
LATENT, ROPE = 512, 64  # columns
TILE = 128  # columns with the same factor
FACTORS = LATENT  # the first byte of the factors
ROTATED = FACTORS + 4 * LATENT // TILE  # the first byte of the rotated columns
BYTES_OF_ROW = ROTATED + 2 * ROPE
HEAD_DIM = LATENT + ROPE

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_FACTOR = torch.finfo(torch.float32).tiny


def values(rows: Tensor) -> Tensor:
    """Return the keys, (..., 576) bfloat16, of rows (..., 656) uint8; the values are their first 512 columns."""
    codes = rows[..., :LATENT].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, TILE))
    factors = rows[..., FACTORS:ROTATED].clone().view(torch.float32)
    latent = (codes * factors[..., None]).flatten(-2).bfloat16()
    return torch.cat((latent, rows[..., ROTATED:].clone().view(torch.bfloat16)), -1)


def quantised(keys: Tensor) -> Tensor:
    """Return rows (..., 656) uint8 of keys (..., 576) bfloat16. A factor is the largest magnitude of its tile, NaN not
    counted, divided by 448, at least the smallest normal float32."""
    tiles = keys[..., :LATENT].float().unflatten(-1, (-1, TILE))
    largest = tiles.abs().where(~tiles.isnan(), 0.0).amax(-1)
    factors = (largest / LARGEST).clamp(min=SMALLEST_FACTOR)
    codes = (tiles / factors[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).flatten(-2)
    parts = codes, factors, keys[..., LATENT:].contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], -1)
