"""Conditions on a problem that the tables of tuned values of several chips share."""

from __future__ import annotations

from dataclasses import dataclass

from .choice import Condition
from .device import Chip
from .spec import AttentionSpec, Operands, ProblemSize

MANY = ProblemSize(1, 1 << 20, 1 << 20)  # stands for sizes that are not known


@dataclass(frozen=True, slots=True)
class TuningCase:
    """Problem on a chip, the argument of conditions. tile_rows: rows of the tile; known in tables that are asked after
    the table of tiles."""

    spec: AttentionSpec
    chip: Chip
    extent: ProblemSize = MANY
    tile_rows: int = 0


VARLEN = Condition("varlen", lambda case: case.spec.varlen)
BLOCKS = Condition("block mask", lambda case: case.spec.has_blocks)
TRACED = Condition("traced functions or dropout", lambda case: case.spec.mods is not None)
DROPOUT = Condition("dropout", lambda case: case.spec.has_dropout)
LEFT = Condition("left bound", lambda case: case.spec.window_left is not None)
RIGHT = Condition("right bound", lambda case: case.spec.window_right is not None)
CAUSAL = RIGHT & ~LEFT
FULL = Condition("no mask bounds", lambda case: case.spec.window_right is None and case.spec.window_left is None)
VARYING = Condition("varying lengths", lambda case: case.spec.lengths_vary)
CACHE = Condition("cache", lambda case: case.spec.cache is not None)
FP8 = Condition("8-bit keys", lambda case: case.spec.cache is not None and case.spec.cache.converts_kv)
NVFP4 = Condition("4-bit keys", lambda case: case.spec.cache is not None and case.spec.cache.is_nvfp4)
E4M3 = Condition("products of e4m3", lambda case: case.spec.operands is not None, "products of 16 bits")
MXFP8 = Condition("scales of blocks", lambda case: case.spec.operands is Operands.MXFP8)
E2M1 = Condition("products of e2m1", lambda case: case.spec.operands is Operands.NVFP4, "products of other numbers")
SHARED = Condition("other kernels on the chip", lambda case: case.chip.shared)
SAMPLED = Condition("only some CTAs of the grid run", lambda case: case.chip.sampled, "all CTAs of the grid run")
SCATTERED = Condition("scattered rows", lambda case: case.spec.cache is not None and case.spec.cache.is_scattered)


def head_dims(limit: int, limit_v: int | None = None) -> Condition:
    """Condition that head_dim and head_dim_v are at most these."""
    text = f"head dims <= {limit}" if limit_v is None else f"head dims <= ({limit}, {limit_v})"
    return Condition(
        text,
        lambda case: case.spec.head_dim <= limit and case.spec.head_dim_v <= (limit_v or limit),
        text.replace("<=", "above"),
    )


def window(most: int) -> Condition:
    """Condition that a query sees a band of at most `most` keys."""

    def holds(case: TuningCase) -> bool:
        left, right = case.spec.window_left, case.spec.window_right
        return left is not None and right is not None and left + right < most

    return Condition(f"window of at most {most} keys", holds)


def keys(first: int, last: int | None = None) -> Condition:
    """Condition on the number of keys, last included."""
    text = f"{first} keys or more" if last is None else f"{first} to {last} keys" if first else f"at most {last} keys"
    return Condition(text, lambda case: first <= case.extent.max_seqlen_k <= (last or case.extent.max_seqlen_k))
