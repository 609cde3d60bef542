"""Scales of blocks of 32 x 32 numbers in the backward, on the host; see `block_scales`."""

from __future__ import annotations

from torch import Tensor

from ...runtime.spec import MX_BLOCK, BlockScales
from ..scale_chunks import as_chunks, in_tiles
from .config import TILE_N, Sm100BackwardConfig


def in_chunks(scales: BlockScales, cfg: Sm100BackwardConfig) -> BlockScales:
    """Return the chunks of each tile, (batch, heads, tiles, bytes)."""
    return BlockScales(
        _chunks(scales.q, cfg.tile_m, cfg.scale_chunks["Q"]),
        _chunks(scales.k, TILE_N, cfg.scale_chunks["K"]),
        _chunks(scales.v, TILE_N, cfg.scale_chunks["V"]),
        _chunks(scales.do, cfg.tile_m, cfg.scale_chunks["dO"]),
    )


def _chunks(scales: Tensor, tile: int, chunks: int) -> Tensor:
    blocks = in_tiles(scales, tile, None, MX_BLOCK).transpose(2, 3)  # (batch, tiles, heads, blocks, column blocks)
    by_rows, by_columns = (x.repeat_interleave(MX_BLOCK, -2) for x in (blocks, blocks.transpose(-2, -1)))
    return as_chunks(by_rows) if chunks == 1 else as_chunks(by_rows, by_columns)
