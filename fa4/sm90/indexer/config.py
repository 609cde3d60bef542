"""Compile-time configuration of the scores kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...core.constant import Constant
from ...pipeline.smem import Tile
from ...runtime import jit
from ...runtime.dsl import cutlass
from ..wgmma import ROWS, Major, SmemOperand, Wgmma

BARRIER_BYTES = 512  # upper bound for all mbarriers
MOST_STAGES = 4
CONSUMERS = 4
REGS = (112, 32)  # per thread of (consumers, load warp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresConfig(Constant):
    """The fields are the compile key.

    torch_dtype: of q and k. heads: a multiple of 8. tokens: rows of one product; tokens * heads are its columns, at
    most 128. tile_n: keys of a block, a multiple of 64. page_size: 0 without pages.

    Raises:
        ValueError: the tiles do not fit in shared memory.
    """

    torch_dtype: torch.dtype
    head_dim: int
    heads: int
    tokens: int
    tile_n: int
    page_size: int
    has_k_descale: bool
    smem_bytes: int
    ctas: ClassVar[int] = 1
    consumers: ClassVar[int] = CONSUMERS
    regs: ClassVar[tuple[int, int]] = REGS

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(f"{self.rows} rows of {self.heads} heads leave no room for two key blocks")

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """DSL type of `torch_dtype`; imports CuTe DSL."""
        is_low = self.torch_dtype.itemsize == 1
        return cutlass.Float8E4M3FN if is_low else jit.dsl_dtype(self.torch_dtype)

    def sharers(self, name: str) -> int:
        """CTAs that load tiles of `name` together."""
        return 1

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return self.consumers * self.tokens

    @property
    def columns(self) -> int:
        """Columns of a product: (row, head)."""
        return self.tokens * self.heads

    @property
    def q_tile(self) -> Tile:
        """Queries of one product. A CTA has one for each consumer."""
        return Tile(self.columns, self.head_dim, 8 * self.torch_dtype.itemsize)

    @property
    def k_tile(self) -> Tile:
        return Tile(self.tile_n, self.head_dim, 8 * self.torch_dtype.itemsize, pieces=self.pieces)

    @property
    def pieces(self) -> int:
        """Parts of a key block in different pages."""
        return self.tile_n // self.page_size if 0 < self.page_size < self.tile_n else 1

    @property
    def q_bytes(self) -> int:
        """Bytes of the queries of a CTA."""
        return self.consumers * self.q_tile.nbytes

    @property
    def stages(self) -> int:
        free = self.smem_bytes - BARRIER_BYTES - self.q_bytes
        return min(free // self.k_tile.nbytes, MOST_STAGES)

    @property
    def kq(self) -> Wgmma:
        """S^T = K Q^T: 64 keys by the (row, head) pairs of a consumer. So the sum over heads is within four threads."""
        k = SmemOperand(self.k_tile, Major.K, self.stages, self.k_tile.nbytes)
        q = SmemOperand(self.q_tile, Major.K, self.consumers, self.q_tile.nbytes)
        return Wgmma(self.dtype, n=self.columns, k=self.head_dim, b=q, a=k)

    @property
    def parts(self) -> int:
        """Products of a key block."""
        return self.tile_n // ROWS
