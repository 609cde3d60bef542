"""Padding rows, which no sequence uses: configuration and launcher of the kernel `padding_rows`, which sets them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..runtime.device import Chip
from .program import ProgramRef

THREADS = 256


@dataclass(frozen=True, slots=True)
class PaddingRowsConfig:
    """Compile-time configuration. dtype: of the matrices. leading: axes of `rows` before those of lse; None if there is
    no `rows` tensor. fill: value of the padding rows in `rows`."""

    dtype: torch.dtype
    matrices: int
    leading: int | None
    fill: float
    varlen: bool
    has_seqused: bool


SET_PADDING_ROWS = ProgramRef[PaddingRowsConfig]("idle_rows", "fa4.core.padding_rows")
"""Its launcher takes `padding_rows.PaddingRows` and the number of CTAs per group, see `blocks`."""


def blocks(elements: int, groups: int, chip: Chip) -> int:
    """Return the CTAs per group: enough to fill the chip if all `elements` are padding, with 32 or more per thread."""
    return max(1, min(8 * chip.sms // groups, elements // (THREADS * 32)))
