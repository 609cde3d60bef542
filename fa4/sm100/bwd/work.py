"""What one CTA works on: a block of keys of one key/value head, and the query blocks that see it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...core.mask import Mask
from ...core.seqlen import Rows
from .config import TILE_N


@dataclass(frozen=True)
class Grid:
    """CTAs in order: batch, then blocks, then heads.

    Ascending key blocks start a causal problem's longest work first: the first blocks are seen by the most queries.
    """

    blocks: Int32
    heads: Int32
    batch: Int32
    descending: cutlass.Constexpr[bool] = False
    cluster: cutlass.Constexpr[int] = 1  # CTAs that share a block

    @property
    def ctas(self) -> Int32:
        return self.blocks * self.heads * self.batch * self.cluster

    @property
    def rank(self) -> Int32:
        """Of this CTA in its cluster."""
        return Int32(0) if self.cluster == 1 else Int32(cute.arch.block_idx()[0]) % self.cluster

    def coordinates(self) -> tuple[Int32, Int32, Int32]:
        """(block, head, batch) of this CTA."""
        index = Int32(cute.arch.block_idx()[0]) // self.cluster
        per_batch = self.blocks * self.heads
        rest = index % per_batch
        block = rest // self.heads
        if self.descending:
            block = self.blocks - 1 - block
        return block, rest % self.heads, index // per_batch


class Work(NamedTuple):
    """A block of keys, of a CTA or of a pair, and its steps: for each query head of the group, the query blocks
    first <= m < stop."""

    n_block: Int32
    rank: Int32  # of this CTA in its pair
    own_block: Int32  # this CTA's block of TILE_N keys
    head_kv: Int32
    batch: Int32
    q: Rows  # the sequence's query rows that hold data
    k: Rows
    mask: Mask
    first: Int32
    stop: Int32
    steps: Int32
    row_block: Int32  # where the sequence's query blocks begin in the row workspaces

    def step(self, index: Int32, group: int) -> tuple[Int32, Int32]:
        """(query head, query block) of a step."""
        blocks = self.stop - self.first
        return self.head_kv * group + index // blocks, self.first + index % blocks

    def cuts(self, m_block: Int32) -> Boolean:
        """Whether some query of a block misses some of this CTA's keys."""
        return replace(self.mask, tile_n=TILE_N).cuts(m_block, self.own_block)

    def turn(self, m_block: Int32, descending: bool) -> Int32:
        """How many key blocks add to dQ of a query block before this one; all that the query block meets do."""
        met = self.mask.key_blocks(m_block)
        return met.stop - 1 - self.n_block if descending else self.n_block - met.first


def work_tile(context) -> Work:
    """This CTA's work; `steps` is 0 if no query sees a key of the block."""
    args, cfg = context.args, context.cfg
    n_block, head_kv, batch = args.grid.coordinates()
    q = Rows.of(batch, args.seqlen_q, args.cu_seqlens_q, args.seqused_q)
    k = Rows.of(batch, args.seqlen_k, args.cu_seqlens_k, args.seqused_k)
    left = args.left if cfg.has_left else None
    right = args.right if cfg.has_right else None
    mask = Mask(cfg.tile_m, cfg.span, q.count, k.count, left, right)
    first, stop = mask.query_blocks(n_block)
    stop = Int32(cutlass.select_(n_block * cfg.span < k.count, stop, first))
    row_block = first_row_block(batch, args.cu_seqlens_q, args.seqlen_q, cfg)
    rank = args.grid.rank
    own_block, steps = n_block * cfg.ctas + rank, (stop - first) * cfg.group
    return Work(n_block, rank, own_block, head_kv, batch, q, k, mask, first, stop, steps, row_block)


def first_row_block(batch: Int32, cu_seqlens_q: cute.Tensor | None, seqlen_q: Int32, cfg) -> Int32:
    """The first of a sequence's blocks of tile_m rows in a workspace where every sequence starts a new block.

    Packed sequences get one block more than their rows fill at most, so that the place follows from cu_seqlens.
    """
    if cu_seqlens_q is None:
        return batch * cute.ceil_div(seqlen_q, cfg.tile_m)
    return cu_seqlens_q[batch] // cfg.tile_m + batch


def ragged(x: cute.Tensor) -> cute.Tensor:
    """(rows, columns, heads, ...) with one mode more, for a TMA map that ends where a sequence's data ends.

    Element (row, column, head, ..., shift) is x's (row + shift - rows, column, head, ...): the shift moves a sequence's
    last row to the last row of the map, and TMA fills what comes after with zeros, or leaves it alone when it stores.
    """
    rows = x.shape[0]
    layout = cute.make_layout((*x.shape, rows + 1), stride=(*x.stride, x.stride[0]))
    return cute.make_tensor(x.iterator - rows * x.stride[0], layout)


def sequence_matrix(x: cute.Tensor, head: Int32, batch: Int32, rows: Rows, cfg) -> cute.Tensor:
    """(rows, columns) of one head of one sequence, from TMA coordinates of a matrix that is `ragged` if cfg says so."""
    place = (head,) if cfg.varlen else (head, batch)
    if not cfg.ragged:
        return x[(None, None, *place)]
    return cute.domain_offset((x.shape[0] - rows.count, 0), x[(None, None, *place, rows.first + rows.count)])
