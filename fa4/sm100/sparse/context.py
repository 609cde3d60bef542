"""Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...bwd.lists import SparseContext
from ...pipeline.tma import TmaMap
from .. import tmem
from .config import Sm100SparseConfig


class Maps(NamedTuple):
    """q, do: (query heads of a part, columns, parts, tokens). k, v: (rows times key/value heads, columns), whose boxes
    have one row."""

    q: TmaMap
    do: TmaMap
    k: TmaMap
    v: TmaMap


@dataclass(frozen=True, slots=True)
class Sm100SparseContext(SparseContext):
    """Arguments of a role's body. statistics_stored: a named barrier; 0 is the barrier of the CTA."""

    cfg: Sm100SparseConfig
    tmem: tmem.TmemMap | None = None
    statistics_stored: int = 1
