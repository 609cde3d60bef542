"""Which work tile next, and what it consists of: rows, keys, key blocks.

The loop over work is the same in every role:

    index = scheduler.first()
    while scheduler.has(index):
        work = work_tile(context, index)
        ...
        index = scheduler.next(index)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...core.mask import Blocks, Mask
from ...core.seqlen import Rows
from .config import CTA_ROWS, TILE_M, TILE_N, Schedule


@dataclass(frozen=True)
class Scheduler:
    """Work tiles in order: batch, then sections of heads, then row blocks from last to first, then heads.

    The last row blocks of a causal problem see the most keys, so the longest tiles start first. Without a mask a
    section of one head keeps the CTAs that share K and V close in time.
    """

    m_blocks: Int32
    heads: Int32
    batch: Int32
    section: Int32

    @property
    def tiles(self) -> Int32:
        return self.m_blocks * self.heads * self.batch

    def grid(self, schedule: Schedule, ctas: Int32) -> Int32:
        return self.tiles if schedule is Schedule.SINGLE else cutlass.min(self.tiles, ctas)

    def first(self) -> Int32:
        return Int32(cute.arch.block_idx()[0])

    def has(self, index: Int32) -> Boolean:
        return index < self.tiles

    def next(self, index: Int32) -> Int32:
        return index + Int32(cute.arch.grid_dim()[0])

    def coordinates(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(row block, head, batch) of a work tile."""
        per_batch = self.m_blocks * self.heads
        batch, rest = index // per_batch, index % per_batch
        per_section = self.m_blocks * self.section
        section, rest = rest // per_section, rest % per_section
        first_head = section * self.section
        width = cutlass.min(self.section, self.heads - first_head)  # the last section may be narrower
        return self.m_blocks - 1 - rest // width, first_head + rest % width, batch


class Work(NamedTuple):
    """One work tile: both Q tiles of a row block, for one (packed) head of one sequence."""

    m_block: Int32
    head: Int32
    head_kv: Int32
    batch: Int32
    q: Rows  # the sequence's query rows that hold data
    rows_out: Int32  # its query rows that have a place in out
    k: Rows
    mask: Mask
    blocks: Blocks  # key blocks, taken from stop - 1 down to first

    @property
    def count(self) -> Int32:
        return self.blocks.stop - self.blocks.first


def work_tile(context, index: Int32) -> Work:
    """What a work tile consists of; empty (`count` 0) if no row of it sees a key."""
    args, cfg = context.args, context.cfg
    m_block, head, batch = args.scheduler.coordinates(index)
    extent_q = args.q.shape[0] if cfg.group == 1 else args.q.shape[0][1]
    place = Rows.of(batch, extent_q, args.cu_seqlens_q, None)
    q = Rows.of(batch, extent_q, args.cu_seqlens_q, args.seqused_q)
    k = Rows.of(batch, args.k.shape[0], args.cu_seqlens_k, args.seqused_k)
    left = args.left if cfg.has_left else None
    right = args.right if cfg.has_right else None
    mask = Mask(CTA_ROWS, TILE_N, q.count, k.count, left, right, cfg.group)
    blocks = mask.key_blocks(m_block)
    is_empty = Boolean(m_block * CTA_ROWS >= q.count * cfg.group)
    stop = cutlass.select_(is_empty, blocks.first, blocks.stop)
    blocks = Blocks(*(cutlass.min(Int32(bound), Int32(stop)) for bound in blocks))
    head_kv = head if cfg.group == cfg.queries_per_kv else head * cfg.group // cfg.queries_per_kv
    return Work(m_block, head, head_kv, batch, q, place.count, k, mask, blocks)


def sequence_matrix(x: cute.Tensor, head: Int32, batch: Int32, first: Int32, varlen: bool) -> cute.Tensor:
    """(rows, columns) of one head of one sequence, from a tensor in the kernel's modes."""
    if not varlen:
        return x[None, None, head, batch]
    packed = isinstance(x.shape[0], tuple)
    return cute.domain_offset(((0, first) if packed else first, 0), x[None, None, head])


def fills_tile(context, work: Work, tile: int):
    """Whether a whole tile may be stored: in a packed (varlen) tensor the rows after a sequence's end belong to the
    next one; a dense tensor's TMA map leaves them out by itself."""
    if not context.cfg.varlen:
        return True
    return Boolean(work.m_block * CTA_ROWS + (tile + 1) * TILE_M <= work.rows_out * context.cfg.group)
