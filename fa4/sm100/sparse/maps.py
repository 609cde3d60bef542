"""TMA maps of a sparse backward."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from ...core.arguments import ALIGNMENT
from ...pipeline.tma import TmaMap


class Maps(NamedTuple):
    """q, do: (query heads of a part, columns, parts, tokens). k, v: (rows times key/value heads, columns), whose boxes
    have one row."""

    q: TmaMap
    do: TmaMap
    k: TmaMap
    v: TmaMap


def list_rows(x: cute.Tensor) -> cute.Tensor:
    """View k or v, whose heads follow each other at equal distances, as (rows times heads, columns)."""
    rows, heads, columns = x.shape
    row = cute.assume(x.stride[0] // heads, divby=ALIGNMENT * 8 // x.element_type.width)
    return cute.make_tensor(x.iterator, cute.make_layout((rows * heads, columns), stride=(row, x.stride[2])))
