"""What shapes generated code, whatever the chip: a compile key says this, the tiles, and numbers of the chip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .. import jit
from ..mods.record import ModSpec
from ..spec import AttentionSpec, CacheSpec
from .constant import Constant


@dataclass(frozen=True, slots=True)
class Variant(Constant):
    """One kind of attention problem, without sizes other than those of a head. Configurations of kernels extend it.

    dtype: the DSL's name for that of q, k, v. group: query heads of one key/value head. has_dlse, deterministic: of a
    backward; a forward has neither.
    """

    dtype: Any
    head_dim: int
    head_dim_v: int
    group: int
    has_left: bool
    has_right: bool
    has_softcap: bool
    has_sink: bool
    varlen: bool
    has_seqused_q: bool
    has_seqused_k: bool
    has_dlse: bool = False
    deterministic: bool = False
    mods: ModSpec | None = None
    cache: CacheSpec | None = None

    @staticmethod
    def fields(spec: AttentionSpec, *, backward: bool = False, has_dlse: bool = False) -> dict[str, Any]:
        """The fields by name, for a record that extends this one."""
        mods = spec.mods
        if mods is not None and mods.heads_differ and not (backward and spec.group > 1):
            mods = replace(mods, heads_differ=False)  # here it is one head after the other, or one alone
        return dict(
            dtype=jit.dsl_dtype(spec.dtype),
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            group=spec.group,
            has_left=spec.window_left is not None,
            has_right=spec.window_right is not None,
            has_softcap=spec.softcap > 0,
            has_sink=spec.has_sink,
            varlen=spec.varlen,
            has_seqused_q=spec.has_seqused_q,
            has_seqused_k=spec.has_seqused_k,
            has_dlse=has_dlse,
            deterministic=backward and spec.deterministic,
            mods=mods,
            cache=spec.cache,
        )

    @property
    def tma_ctas(self) -> int:
        """CTAs whose loads are counted together."""
        return self.ctas

    def sharers(self, name: str) -> int:
        """CTAs of a cluster that load tiles of `name` together, each a share of the rows into all of them."""
        return 1

    @property
    def counts_keys(self) -> bool:
        """Whether a backward's tiles are those that packed keys have, see `core.order.PackedOrder`; an order of
        additions numbers the blocks of all sequences alike."""
        return self.varlen and not self.deterministic

    @property
    def varlen_k(self) -> bool:
        """Whether k and v are packed; a cache is not, whatever q is."""
        return self.varlen and self.cache is None

    @property
    def has_bytes(self) -> bool:
        """Whether k and v hold 8-bit numbers, of `cache.dtype`."""
        return self.cache is not None and self.cache.has_bytes

    @property
    def plain_keys(self) -> bool:
        """Whether k and v are read as plain memory, row by row, where others get them by TMA."""
        return self.cache is not None and self.cache.is_scattered

    @property
    def has_score_mod(self) -> bool:
        return self.mods is not None and self.mods.score is not None

    @property
    def has_dropout(self) -> bool:
        return self.mods is not None and self.mods.dropout

    @property
    def has_blocks(self) -> bool:
        """Whether a block mask lists the blocks to visit."""
        return self.mods is not None and self.mods.block is not None

    @property
    def lists_by_head(self) -> bool:
        """Whether a backward goes through other lists for each query head of a group."""
        return self.mods is not None and self.mods.heads_differ

    @property
    def lengths_vary(self) -> bool:
        """Whether a sequence may have fewer rows than the launch was sized for, and end before its tensor's rows do:
        then TMA maps of it are `core.sequence.seq_bounded_tma`."""
        return self.varlen or self.has_seqused_q or self.has_seqused_k

    @property
    def ordered_by_lists(self) -> bool:
        """Whether a block mask's lists say whose turn it is to add to a block of queries."""
        return self.deterministic and self.has_blocks

    @property
    def masked(self) -> bool:
        return self.has_left or self.has_right
