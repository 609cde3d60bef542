"""Tile tables of the portable kernels, by head dim and shared-memory size."""

from __future__ import annotations

from dataclasses import dataclass

from ..mods.ir.dropout import KEYS
from ..runtime.device import Chip
from ..runtime.spec import AttentionSpec


def padded(head_dim: int) -> int:
    """Head dim of the tiles: the next multiple of 32. Columns beyond head_dim are zeros."""
    return (head_dim + 31) // 32 * 32


@dataclass(frozen=True)
class ForwardTiles:
    """tile_m query rows by tile_n keys; `warps` are stacked along the rows; K and V each have `stages` stages."""

    tile_m: int
    tile_n: int
    warps: int
    stages: int = 1
    blocks_per_sm: int = 1

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}, {self.warps} warps, {self.stages} stage(s)"

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        d, dv = padded(head_dim), padded(head_dim_v)
        return 2 * (self.tile_m * max(d, dv) + self.stages * self.tile_n * (d + dv))


# (largest padded head dim, tiles); the first row that fits the head dim and the chip's shared memory is used. Chosen
# from eight tiles on an H100 (bf16, TFLOP/s full / causal): d=128 381 / 324, next 371 full (256x64, 8 warps); d=64
# 324 / 301, next 330 / 289 (128x128).
_FORWARD = (
    (128, ForwardTiles(128, 64, 4, 1, 2)),
    (256, ForwardTiles(128, 64, 8, 1, 1)),
    (256, ForwardTiles(64, 64, 4, 1, 1)),
)
# For at most 64 rows per head (decode): one 16-row group per warp. On an H100 with one row and 8192 keys, 2436 GB/s of
# K and V, 2367 with two stages of 64 keys.
_FORWARD_SHORT = (
    (128, ForwardTiles(64, 128, 4, 1, 2)),
    (256, ForwardTiles(64, 64, 4, 1, 2)),
)


def forward_tiles(head_dim: int, head_dim_v: int, chip: Chip, rows: int | None) -> ForwardTiles:
    """Return the forward tiles. rows: query rows per head, None for many.

    Raises:
        ValueError: no row fits.
    """
    largest = max(padded(head_dim), padded(head_dim_v))
    table = _FORWARD_SHORT if rows is not None and rows <= 64 else _FORWARD
    for limit, tiles in table:
        if largest <= limit and tiles.smem_bytes(head_dim, head_dim_v) <= chip.smem_per_block:
            return tiles
    raise ValueError(f"head_dim ({head_dim}, {head_dim_v}) has no forward tiles on {chip}")


@dataclass(frozen=True)
class BackwardTiles:
    """tile_m query rows by tile_n keys; Q and dO each have `stages` stages.

    warps_s, warps_kv, warps_q: grid of warps over S and dP (rows by keys), over dK and dV (keys by head dim), and over
    dQ (rows by head dim).
    """

    tile_m: int
    tile_n: int
    stages: int
    warps_s: tuple[int, int]
    warps_kv: tuple[int, int]
    warps_q: tuple[int, int]
    blocks_per_sm: int = 1

    @property
    def warps(self) -> int:
        return self.warps_s[0] * self.warps_s[1]

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}, {self.warps} warps, {self.stages} stage(s)"

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        d, dv, m, n = padded(head_dim), padded(head_dim_v), self.tile_m, self.tile_n
        return 2 * ((n + self.stages * m) * (d + dv) + 2 * m * n) + 8 * self.stages * m

    @property
    def keep_words_per_row(self) -> int:
        """32-bit words of dropout keep bits per row."""
        return -(-self.tile_n // KEYS)

    @property
    def keep_bits_bytes(self) -> int:
        return 4 * self.tile_m * self.keep_words_per_row

    def fits(self, head_dim: int, head_dim_v: int, chip: Chip, has_dropout: bool = False) -> bool:
        """True if the warps divide the 16-column groups evenly and the tiles fit the chip's shared memory."""
        d, dv = padded(head_dim), padded(head_dim_v)
        columns_kv, columns_q = 16 * self.warps_kv[1], 16 * self.warps_q[1]
        divides = d % columns_kv == 0 and dv % columns_kv == 0 and d % columns_q == 0
        smem_bytes = self.smem_bytes(head_dim, head_dim_v) + (self.keep_bits_bytes if has_dropout else 0)
        return divides and smem_bytes <= chip.smem_per_block


# (largest padded head dim, tiles); the first row whose warps divide the head dims and that fits shared memory is used.
# On an H100 (4k, TFLOP/s full / causal): d=64 300 / 271, next 276 / 253 (64x128); d=128 338 / 298, next 305 / 275
# (64x64, two CTAs per SM); d=256 268 / 256, next 253 / 247 (dK and dV on 4 x 2 warps).
_BACKWARD = (
    (64, BackwardTiles(128, 128, 2, (4, 2), (4, 2), (4, 2))),
    (128, BackwardTiles(64, 128, 2, (2, 4), (4, 2), (2, 4))),
    (128, BackwardTiles(64, 128, 2, (2, 4), (4, 2), (4, 2))),
    (128, BackwardTiles(64, 64, 1, (2, 2), (2, 2), (2, 2))),
    (256, BackwardTiles(64, 64, 2, (2, 4), (2, 4), (2, 4))),
    (256, BackwardTiles(64, 64, 2, (2, 4), (4, 2), (4, 2))),
    (256, BackwardTiles(64, 64, 1, (2, 4), (4, 2), (4, 2))),
    (256, BackwardTiles(32, 32, 1, (2, 2), (2, 2), (2, 2))),
)


def backward_tiles(head_dim: int, head_dim_v: int, chip: Chip, has_dropout: bool = False) -> BackwardTiles:
    """Return the backward tiles.

    Raises:
        ValueError: no row fits.
    """
    largest = max(padded(head_dim), padded(head_dim_v))
    for limit, tiles in _BACKWARD:
        if largest <= limit and tiles.fits(head_dim, head_dim_v, chip, has_dropout):
            return tiles
    raise ValueError(f"head_dim ({head_dim}, {head_dim_v}) has no backward tiles on {chip}")


# Largest L2 swizzle group: (head, sequence) pairs that advance together (`core.order`). On an H100, d=128, causal 4k,
# TFLOP/s for groups of 1 / 4 / 16: forward 315 / 326 / 344, backward 298 / 322 / 308, deterministic 254 / 279 / 291.
# Without a mask, 1 is as fast as any.
LARGEST_L2_GROUP = 16
L2_GROUP_BYTES = 32 * 2**20  # bytes that the pairs of a group share in L2


def forward_l2_group(spec: AttentionSpec, seqlen_k: int) -> int:
    """Pairs that advance together in the forward, so that their K and V stay in L2."""
    if spec.window_left is None and spec.window_right is None and not spec.has_blocks:
        return 1
    pair_bytes = 2 * seqlen_k * (spec.head_dim + spec.head_dim_v) // spec.group
    return max(1, min(LARGEST_L2_GROUP, L2_GROUP_BYTES // max(pair_bytes, 1)))
