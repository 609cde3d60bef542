"""Compile-time properties of a problem on every chip. A compile key adds tile sizes and numbers of the chip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..mods.ir.record import ModSpec
from ..runtime import jit
from ..runtime.dsl import cutlass
from ..runtime.spec import AttentionSpec, CacheSpec, Operands
from .constant import Constant


@dataclass(frozen=True, slots=True)
class Variant(Constant):
    """One kind of attention problem, without sizes other than head dims. Kernel configurations extend it.

    torch_dtype: of out, and of q, k and v unless they are `operands`. group: query heads per key/value head.
    has_dlse, deterministic: backward only.
    """

    torch_dtype: torch.dtype
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
    operands: Operands | None = None

    if TYPE_CHECKING:  # defined by each configuration: a property here would be the default of a field there

        @property
        def ctas(self) -> int:
            """CTAs of a cluster."""

    @staticmethod
    def fields(spec: AttentionSpec, *, backward: bool = False, has_dlse: bool = False) -> dict[str, Any]:
        """Return the fields by name, for a record that extends this one."""
        mods = spec.mods
        if mods is not None and mods.heads_differ and not (backward and spec.group > 1):
            mods = replace(mods, heads_differ=False)  # here heads are processed one by one, or there is one
        return dict(
            torch_dtype=spec.dtype,
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
            operands=spec.operands,
        )

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """DSL type of `torch_dtype`; imports CuTe DSL."""
        return jit.dsl_dtype(self.torch_dtype)

    @property
    def dtype_bits(self) -> int:
        return 8 * self.torch_dtype.itemsize

    @property
    def tma_ctas(self) -> int:
        """CTAs whose loads one barrier counts."""
        return self.ctas

    def sharers(self, name: str) -> int:
        """CTAs of a cluster that multicast tiles of `name`: each loads a share of the rows into all of them."""
        return 1

    @property
    def has_packed_order(self) -> bool:
        """Whether the tiles of the main kernel have a `core.order.PackedOrder`: for varlen, unless a deterministic
        backward numbers the key blocks of all sequences alike."""
        return self.varlen and not self.deterministic

    @property
    def varlen_k(self) -> bool:
        """Whether k and v are varlen; a KV cache never is."""
        return self.varlen and self.cache is None

    @property
    def converts_kv(self) -> bool:
        """Whether k and v hold values of `cache.dtype`, which are converted for the products."""
        return self.operands is None and self.cache is not None and self.cache.converts_kv

    @property
    def has_bytes(self) -> bool:
        """Whether k and v are passed as bytes."""
        return self.converts_kv or self.operands is not None

    @property
    def has_block_scales(self) -> bool:
        """Whether blocks of 32 or 16 numbers of q, k and v have scales."""
        return self.operands in (Operands.MXFP8, Operands.NVFP4)

    @property
    def multiplies_e2m1(self) -> bool:
        """Whether q, k and v have 4 bits, a scale for 16 numbers, and no other factors."""
        return self.operands is Operands.NVFP4

    @property
    def is_nvfp4(self) -> bool:
        """Whether k and v have scales for each 16 columns (`runtime.nvfp4`)."""
        return self.converts_kv and self.cache.is_nvfp4

    @property
    def has_factors(self) -> bool:
        """Whether scores and v have factors, for each sequence and head."""
        return self.has_bytes and not self.is_nvfp4 and not self.multiplies_e2m1

    @property
    def operand_dtype(self) -> type[cutlass.Numeric]:
        """DSL type of q, and of k as the products read it."""
        if self.operands is None:
            return self.dtype
        return cutlass.Float4E2M1FN if self.multiplies_e2m1 else cutlass.Float8E4M3FN

    @property
    def operand_bits(self) -> int:
        """Bits of an element of `operand_dtype`, and of V as the products read it."""
        if self.operands is None:
            return self.dtype_bits
        return 4 if self.multiplies_e2m1 else 8

    @property
    def has_score_mod(self) -> bool:
        return self.mods is not None and self.mods.score is not None

    @property
    def has_dropout(self) -> bool:
        return self.mods is not None and self.mods.dropout

    @property
    def has_blocks(self) -> bool:
        """Whether a block mask lists the blocks to process."""
        return self.mods is not None and self.mods.block is not None

    @property
    def lists_by_head(self) -> bool:
        """Whether a backward has separate block lists for each query head of a group."""
        return self.mods is not None and self.mods.heads_differ

    @property
    def lengths_vary(self) -> bool:
        """Whether a sequence may have fewer rows than the launch size and end before its tensor's rows do. Its TMA maps
        are then `core.sequence.seq_bounded_tma`."""
        return self.varlen or self.has_seqused_q or self.has_seqused_k

    @property
    def ordered_by_lists(self) -> bool:
        """Whether a block mask's lists define the order of additions to a query block."""
        return self.deterministic and self.has_blocks

    @property
    def masked(self) -> bool:
        return self.has_left or self.has_right


def windows(spec: AttentionSpec) -> tuple[int, int]:
    """Return window_left, window_right as numbers. The value of an unbounded side is not used."""
    return spec.window_left or 0, spec.window_right or 0
