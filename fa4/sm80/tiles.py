"""Tile tables of the portable kernels: tuned values, each row with its condition and its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..mods.ir.dropout import KEYS
from ..runtime.choice import Choice, Condition, Rule, choose
from ..runtime.device import Chip
from ..runtime.spec import AttentionSpec


def padded(head_dim: int) -> int:
    """Head dim of the tiles: the next multiple of 32. Columns beyond head_dim are zeros."""
    return (head_dim + 31) // 32 * 32


LARGEST_V_SLICE = 256  # columns of O in the registers of a forward's CTA


def v_slices(head_dim_v: int) -> int:
    """CTAs of the forward that share the columns of V and O; each computes the same scores."""
    return -(-head_dim_v // LARGEST_V_SLICE)


def v_slice(head_dim_v: int) -> int:
    """Columns of V and O of a forward's CTA, padded."""
    return padded(-(-head_dim_v // v_slices(head_dim_v)))


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
        d, dv = padded(head_dim), v_slice(head_dim_v)
        return 2 * (self.tile_m * max(d, dv) + self.stages * self.tile_n * (d + dv))

    def fits(self, case: HeadDims) -> bool:
        return self.smem_bytes(case.head_dim, case.head_dim_v) <= case.chip.smem_per_block


@dataclass(frozen=True, slots=True)
class HeadDims:
    """Argument of the conditions of these tables. rows: query rows per head, None for many."""

    head_dim: int
    head_dim_v: int
    chip: Chip
    rows: int | None = None
    has_dropout: bool = False


def _rule(name: str, limit: int, tiles: Any, evidence: str) -> Rule[Any]:
    """Rule for padded head dims up to `limit`, if the warps divide them and the tiles fit the chip's shared memory."""

    def holds(case: HeadDims) -> bool:
        return max(padded(case.head_dim), padded(case.head_dim_v)) <= limit and tiles.fits(case)

    return Rule(
        name, Condition(f"head dims <= {limit}, which warps divide and shared memory holds", holds), tiles, evidence
    )


def _short(rule: Rule[ForwardTiles]) -> Rule[ForwardTiles]:
    few = Condition("at most 64 rows a head", lambda case: case.rows is not None and case.rows <= 64)
    return replace(rule, when=few & rule.when)


def _narrow(rule: Rule[ForwardTiles]) -> Rule[ForwardTiles]:
    """The rule for chips whose multiprocessors do not hold two CTAs with 64 keys."""

    def holds(case: HeadDims) -> bool:
        usual = replace(rule.row, tile_n=64).smem_bytes(case.head_dim, case.head_dim_v)
        return rule.row.blocks_per_sm * (usual + RESERVED) > case.chip.smem_per_block + RESERVED

    return replace(rule, when=rule.when & Condition("two CTAs with 64 keys exceed a multiprocessor", holds))


RESERVED = 1 << 10  # bytes of shared memory that every CTA sets aside

# Evidence: TFLOP/s on an H100, bf16, full / causal, of eight tiles.
FORWARD = (
    # Decode: one 16-row group per warp.
    _short(_rule("few rows, head_dim <= 128", 128, ForwardTiles(64, 128, 4, 1, 2),
                 "one row, 8192 keys: 2436 GB/s of K and V; with two stages of 64 keys 2367")),
    _short(_rule("few rows", 256, ForwardTiles(64, 64, 4, 1, 2), "blocks of 64 keys for the columns")),
    _narrow(_rule("head_dim <= 128, 100 KiB", 128, ForwardTiles(128, 32, 4, 1, 2),
                  "predicted, d=128, full / causal, next 128x64: RTX 5090 221 / 225, 213 / 210; RTX PRO 6000 322 / "
                  "297, 278 / 262; GB10 104 / 96, 90 / 84")),
    _rule("head_dim <= 128", 128, ForwardTiles(128, 64, 4, 1, 2),
          "d=128 381 / 324, next 371 full (256x64, 8 warps); d=64 324 / 301, next 330 / 289 (128x128)"),
    _rule("head_dim <= 256", 256, ForwardTiles(128, 64, 8, 1, 1), "by reasoning"),
    _rule("head_dim <= 256, 64 rows", 256, ForwardTiles(64, 64, 4, 1, 1), "what 100 KiB of shared memory hold"),
    # O in slices of its columns.
    _short(_rule("few rows, head_dim <= 576", 576, ForwardTiles(64, 32, 4, 1, 1), "by reasoning")),
    _rule("head_dim <= 512", 512, ForwardTiles(128, 64, 8, 1, 1),
          "d=512 231 / 222, next 206 / 203 (64x64; 64x32, two CTAs per SM); torch 121 / 114"),
    _rule("head_dim <= 576", 576, ForwardTiles(64, 32, 4, 1, 1), "what shared memory holds"),
    _rule("head_dim <= 576, 32 rows", 576, ForwardTiles(32, 32, 2, 1, 1), "what 100 KiB of shared memory hold"),
)  # fmt: skip


def forward_tiles(head_dim: int, head_dim_v: int, chip: Chip, rows: int | None) -> Choice[ForwardTiles]:
    """Return the forward tiles. rows: query rows per head, None for many.

    Raises:
        ValueError: no row fits.
    """
    return _choose(FORWARD, "forward", HeadDims(head_dim, head_dim_v, chip, rows))


def _choose(table: Sequence[Rule[Any]], direction: str, case: HeadDims) -> Choice[Any]:
    try:
        rule = choose(table, case)
    except LookupError:
        dims = case.head_dim, case.head_dim_v
        raise ValueError(f"head_dim {dims} has no {direction} tiles on {case.chip}") from None
    return Choice(rule.row, (rule,))


@dataclass(frozen=True)
class BackwardTiles:
    """tile_m query rows by tile_n keys; Q and dO each have `stages` stages.

    warps_s, warps_kv, warps_q: grid of warps over S and dP (rows by keys), over dK and dV (keys by head dim), and over
    dQ (rows by head dim). slices: CTAs that share the columns of dQ, dK and dV; each computes the same scores.
    """

    tile_m: int
    tile_n: int
    stages: int
    warps_s: tuple[int, int]
    warps_kv: tuple[int, int]
    warps_q: tuple[int, int]
    blocks_per_sm: int = 1
    slices: int = 1

    @property
    def warps(self) -> int:
        return self.warps_s[0] * self.warps_s[1]

    def __str__(self) -> str:
        slices = f", {self.slices} slices of the columns" if self.slices > 1 else ""
        return f"{self.tile_m}x{self.tile_n}, {self.warps} warps, {self.stages} stage(s){slices}"

    def columns(self, head_dim: int) -> int:
        """Columns of the tiles; those beyond head_dim are zeros. A slice has whole segments of shared memory."""
        if self.slices == 1:
            return padded(head_dim)
        unit = max(64, 16 * self.warps_kv[1], 16 * self.warps_q[1]) * self.slices
        return -(-head_dim // unit) * unit

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        d, dv, m, n = self.columns(head_dim), self.columns(head_dim_v), self.tile_m, self.tile_n
        return 2 * ((n + self.stages * m) * (d + dv) + 2 * m * n) + 8 * self.stages * m

    @property
    def keep_words_per_row(self) -> int:
        """32-bit words of dropout keep bits per row."""
        return -(-self.tile_n // KEYS)

    @property
    def keep_bits_bytes(self) -> int:
        return 4 * self.tile_m * self.keep_words_per_row

    def fits(self, case: HeadDims) -> bool:
        """True if the warps divide the 16-column groups evenly and the tiles fit the chip's shared memory."""
        d, dv = (self.columns(dim) // self.slices for dim in (case.head_dim, case.head_dim_v))
        columns_kv, columns_q = 16 * self.warps_kv[1], 16 * self.warps_q[1]
        divides = d % columns_kv == 0 and dv % columns_kv == 0 and d % columns_q == 0
        smem_bytes = self.smem_bytes(case.head_dim, case.head_dim_v) + (self.keep_bits_bytes if case.has_dropout else 0)
        return divides and smem_bytes <= case.chip.smem_per_block


# Evidence: TFLOP/s on an H100, 4k, full / causal.
BACKWARD = (
    _rule("head_dim <= 64", 64, BackwardTiles(128, 128, 2, (4, 2), (4, 2), (4, 2)),
          "d=64 300 / 271, next 276 / 253 (64x128)"),
    _rule("head_dim <= 128", 128, BackwardTiles(64, 128, 2, (2, 4), (4, 2), (2, 4)),
          "d=128 338 / 298, next 305 / 275 (64x64, two CTAs per SM)"),
    _rule("head_dim <= 128, dQ on 4 x 2 warps", 128, BackwardTiles(64, 128, 2, (2, 4), (4, 2), (4, 2)),
          "what divides the head dims"),
    # What 100 KiB of shared memory hold, predicted for an RTX 5090, full.
    _rule("head_dim <= 128, 64 x 64, two stages", 128, BackwardTiles(64, 64, 2, (2, 2), (2, 2), (2, 2)),
          "d=96 201, next 196 (32x64), 164 (one stage)"),
    _rule("head_dim <= 128, 32 x 64", 128, BackwardTiles(32, 64, 2, (2, 4), (2, 4), (2, 4)),
          "d=128 194, next 191 (32x128, one stage), 153 (64x64 by 4 warps); RTX PRO 6000 210 (165), GB10 66 (52)"),
    _rule("head_dim <= 128, 64 x 64", 128, BackwardTiles(64, 64, 1, (2, 2), (2, 2), (2, 2)),
          "what shared memory holds"),
    _rule("head_dim <= 256", 256, BackwardTiles(64, 64, 2, (2, 4), (2, 4), (2, 4)),
          "d=256 268 / 256, next 253 / 247 (dK and dV on 4 x 2 warps)"),
    _rule("head_dim <= 256, dK and dV on 4 x 2 warps", 256, BackwardTiles(64, 64, 2, (2, 4), (4, 2), (4, 2)),
          "what divides the head dims"),
    _rule("head_dim <= 256, one stage", 256, BackwardTiles(64, 64, 1, (2, 4), (4, 2), (4, 2)),
          "what shared memory holds"),
    _rule("head_dim <= 256, 32 x 32, two stages", 256, BackwardTiles(32, 32, 2, (2, 2), (2, 2), (2, 2)),
          "what 100 KiB of shared memory hold; predicted, RTX 5090: d=192 184, next 167 (32x64, one stage), 133 (one)"),
    _rule("head_dim <= 256, 32 x 32", 256, BackwardTiles(32, 32, 1, (2, 2), (2, 2), (2, 2)),
          "what 100 KiB of shared memory hold; 16 x 64 spills registers"),
    _rule("head_dim <= 384", 384, BackwardTiles(64, 64, 1, (2, 4), (4, 2), (2, 4)),
          "d=320 causal 208, next 152 (64x32); d=384 full 180, next 167 (two slices)"),
    # dQ, dK and dV in slices of their columns.
    _rule("head_dim <= 576", 576, BackwardTiles(32, 64, 1, (2, 4), (2, 4), (2, 4), slices=2),
          "d=512 145 / 137, next 138 / 131 (dK and dV on 4 x 2 warps); torch 38 / 33"),
    _rule("head_dim <= 576, 32 x 32", 576, BackwardTiles(32, 32, 1, (2, 2), (2, 2), (2, 2), slices=2),
          "what 163 KiB of shared memory hold: d=512 108 / 106, next 77 / 72 (three slices)"),
    _rule("head_dim <= 512, 16 x 32", 512, BackwardTiles(16, 32, 1, (1, 2), (2, 1), (1, 2), slices=4),
          "what 100 KiB of shared memory hold: d=512 causal 77"),
    _rule("head_dim <= 576, 16 x 16", 576, BackwardTiles(16, 16, 1, (1, 1), (1, 1), (1, 1), slices=5),
          "what 100 KiB of shared memory hold: d=512 causal 27"),
)  # fmt: skip


def backward_tiles(head_dim: int, head_dim_v: int, chip: Chip, has_dropout: bool = False) -> Choice[BackwardTiles]:
    """Return the backward tiles.

    Raises:
        ValueError: no row fits.
    """
    return _choose(BACKWARD, "backward", HeadDims(head_dim, head_dim_v, chip, has_dropout=has_dropout))


# Largest L2 swizzle group: (head, sequence) pairs that advance together (`core.order`). On an H100, d=128, causal 4k,
# TFLOP/s for groups of 1 / 4 / 16: forward 315 / 326 / 344, backward 298 / 322 / 308, deterministic 254 / 279 / 291.
# Without a mask, 1 is as fast as any.
LARGEST_L2_GROUP = 16
L2_GROUP_BYTES = 32 * 2**20  # what the pairs of a backward group share in L2
L2_SHARE = 0.64  # of the chip, for what the pairs of a forward group share: 32 MB of an H100's


def forward_l2_group(spec: AttentionSpec, chip: Chip, seqlen_k: int) -> int:
    """Pairs that advance together in the forward, so that their K and V stay in L2."""
    if spec.window_left is None and spec.window_right is None and not spec.has_blocks:
        return 1
    pair_bytes = 2 * seqlen_k * (spec.head_dim + spec.head_dim_v) // spec.group
    return max(1, min(LARGEST_L2_GROUP, int(L2_SHARE * chip.l2) // max(pair_bytes, 1)))
