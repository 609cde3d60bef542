"""Tile rows of the portable kernels: which tile for which head dim and how much shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Chip
from ..mods.dropout import KEYS
from ..spec import AttentionSpec


def padded(head_dim: int) -> int:
    """The head dim that tiles are made for: the next multiple of 32. Columns beyond head_dim hold zeros."""
    return (head_dim + 31) // 32 * 32


@dataclass(frozen=True)
class ForwardTiles:
    """tile_m query rows by tile_n keys, `warps` stacked along the rows, K and V in rings of `stages` tiles."""

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


# (largest padded head dim, tiles), the first that fits the head dim and the chip's shared memory. Measured on an H100
# (bf16, 16k tokens, hidden 2048, TFLOP/s) beside seven other tiles: d=128 4k full / causal 381 / 324, d=64 324 / 301;
# next best 371 (256x64, 8 warps) and 369 (2 stages) at d=128 full, 330 / 289 (128x128) at d=64.
_FORWARD = (
    (128, ForwardTiles(128, 64, 4, 1, 2)),
    (256, ForwardTiles(128, 64, 8, 1, 1)),
    (256, ForwardTiles(64, 64, 4, 1, 1)),
)
# For at most 64 rows a head (decode): one 16-row group a warp. Measured on an H100, one row, 8 sequences of 8192 keys,
# 32 heads on 8: 2436 GB/s of keys and values, against 2367 with two stages of 64 keys.
_FORWARD_SHORT = (
    (128, ForwardTiles(64, 128, 4, 1, 2)),
    (256, ForwardTiles(64, 64, 4, 1, 2)),
)


def forward_tiles(head_dim: int, head_dim_v: int, chip: Chip, rows: int | None) -> ForwardTiles:
    """The tiles for a problem with `rows` query rows a head; None for many."""
    largest = max(padded(head_dim), padded(head_dim_v))
    table = _FORWARD_SHORT if rows is not None and rows <= 64 else _FORWARD
    for limit, tiles in table:
        if largest <= limit and tiles.smem_bytes(head_dim, head_dim_v) <= chip.smem_per_block:
            return tiles
    raise ValueError(f"head_dim ({head_dim}, {head_dim_v}) has no forward tiles on {chip}")


@dataclass(frozen=True)
class BackwardTiles:
    """tile_m query rows by tile_n keys; Q and dO in rings of `stages` tiles.

    warps_s, warps_kv, warps_q: the grid of warps over S and dP (rows by keys), dK and dV (keys by head dim), and dQ
    (rows by head dim).
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
    def words_per_row(self) -> int:
        """Of keep bits, where there is dropout."""
        return -(-self.tile_n // KEYS)

    @property
    def words_bytes(self) -> int:
        return 4 * self.tile_m * self.words_per_row

    def fits(self, head_dim: int, head_dim_v: int, chip: Chip, has_dropout: bool = False) -> bool:
        """Whether 16-column groups divide evenly among the warps, and the tiles fit the chip's shared memory."""
        d, dv = padded(head_dim), padded(head_dim_v)
        across_kv, across_q = 16 * self.warps_kv[1], 16 * self.warps_q[1]
        even = d % across_kv == 0 and dv % across_kv == 0 and d % across_q == 0
        smem_bytes = self.smem_bytes(head_dim, head_dim_v) + (self.words_bytes if has_dropout else 0)
        return even and smem_bytes <= chip.smem_per_block


# (largest padded head dim, tiles), the first whose warps divide the head dims and that fits the shared memory.
# Measured on an H100 (4k, full / causal, TFLOP/s): d=64 300 / 271, next best 276 / 253 (64x128); d=128 338 / 298, next
# best 305 / 275 (64x64 with two blocks an SM); d=256 268 / 256, 253 / 247 with dK and dV cut 4 by 2 among the warps.
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
    """The backward's tiles for a head dim on a chip."""
    largest = max(padded(head_dim), padded(head_dim_v))
    for limit, tiles in _BACKWARD:
        if largest <= limit and tiles.fits(head_dim, head_dim_v, chip, has_dropout):
            return tiles
    raise ValueError(f"head_dim ({head_dim}, {head_dim_v}) has no backward tiles on {chip}")


# How many (head, sequence) pairs advance together (`core.order`); 1 keeps a head's blocks side by side. Measured on
# an H100, d=128, TFLOP/s for sections of 1 / 4 / 16: causal forward 4k 315 / 326 / 344, 16k 350 / 369 / 362; causal
# backward 4k 298 / 322 / 308; deterministic 4k 298 / 306 / 307, causal 254 / 279 / 291, 16k 315 / 319 / 306.
# Without a mask 1 is as good as any.
LARGEST_L2_GROUP = 16
SHARED_BYTES = 32 * 2**20  # what a section's pairs may keep in L2 for each other


def forward_l2_group(spec: AttentionSpec, seqlen_k: int) -> int:
    """Pairs that advance together in the forward; their keys and values stay in L2."""
    if spec.window_left is None and spec.window_right is None and not spec.has_blocks:
        return 1
    per_pair = 2 * seqlen_k * (spec.head_dim + spec.head_dim_v) // spec.group
    return max(1, min(LARGEST_L2_GROUP, SHARED_BYTES // max(per_pair, 1)))
