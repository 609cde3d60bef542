"""Packed sequences with block masks, by formula and by the public function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fa4
from fa4.oracle.cases import DRAWS, assert_right, judge_by_draws
from tests.mods.oracle import Problem, by_formula

NAMES = "out", "lse", "dq", "dk", "dv"


@dataclass
class PackedProblem:
    """lengths, used: (queries, keys) of each sequence, and how many of these hold data. padding: rows of q past the
    last sequence. mask_mod is that of the block mask."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    mask_mod: Callable
    block_mask: object
    used: tuple[tuple[int, int], ...] | None = None
    padding: int = 0
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 32
    score_mod: Callable | None = None
    call: dict = field(default_factory=dict)

    def make(self, seed: int, device: str = "cpu") -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator().manual_seed(seed)
        totals = [sum(side) for side in zip(*self.lengths)]
        queries = totals[0] + self.padding
        shapes = [(queries, self.heads), *[(totals[1], self.heads_kv)] * 2, (queries, self.heads)]
        q, k, v, dout = (
            torch.randn(*shape, self.head_dim, generator=generator).to(device, torch.bfloat16) for shape in shapes
        )
        return [q, k, v], dout

    def options(self, device: str) -> dict:
        """The lengths as the public function takes them."""

        def int32(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        of_q, of_k = (torch.tensor([0, *side]).cumsum(0) for side in zip(*self.lengths))
        options = dict(cu_seqlens_q=int32(of_q.tolist()), cu_seqlens_k=int32(of_k.tolist()))
        if self.used is not None:
            options["seqused_q"], options["seqused_k"] = (int32(side) for side in zip(*self.used))
        return options


def by_sequence(problem: PackedProblem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, precise: bool) -> list[Tensor]:
    """out, lse, dq, dk, dv: those of each sequence alone."""
    dtype = torch.float64 if precise else torch.bfloat16
    out, dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (dout, q, k, v))
    lse = torch.full((problem.heads, q.shape[0]), -torch.inf, dtype=torch.float64 if precise else torch.float32)
    lse, begin = lse.to(q.device), (0, 0)
    for b, length in enumerate(problem.lengths):
        queries, keys = length if problem.used is None else problem.used[b]
        rows, columns = slice(begin[0], begin[0] + queries), slice(begin[1], begin[1] + keys)
        begin = tuple(map(sum, zip(begin, length)))
        if not queries or not keys:
            continue

        def mask_mod(_, h, q_idx, kv_idx, b=b):
            return problem.mask_mod(torch.tensor(b, device=q.device), h, q_idx, kv_idx)

        sizes = problem.heads, problem.heads_kv, 1, problem.head_dim
        score_mod = problem.score_mod and functools.partial(_of_sequence, problem.score_mod, b)
        alone = Problem("alone", queries, keys, *sizes, mask_mod=mask_mod, score_mod=score_mod)
        results = by_formula(alone, q[None, rows], k[None, columns], v[None, columns], dout[None, rows], precise)
        for whole, own, of in zip((out, dq, dk, dv), (results[0], *results[2:]), (rows, rows, columns, columns)):
            whole[of] = own[0]
        lse[:, rows] = results[1][0].to(lse.dtype)
    return [out, lse, dq, dk, dv]


def _of_sequence(score_mod, b, score, _, h, q_idx, kv_idx):
    return score_mod(score, torch.tensor(b, device=score.device), h, q_idx, kv_idx)


def results_of(problem: PackedProblem, seed: int, backend: str, device: str = "cpu", **options) -> list[Tensor]:
    """out, lse, dq, dk and dv that the public function gives."""
    qkv, dout = problem.make(seed, device)
    leaves = [x.clone().requires_grad_() for x in qkv]
    mods = dict(score_mod=problem.score_mod, block_mask=problem.block_mask)
    given = problem.options(device) | mods | problem.call | options
    out, lse = fa4.flash_attn_varlen_func(*leaves, backend=backend, return_lse=True, **given)
    return [x.detach() for x in (out, lse, *torch.autograd.grad(out, leaves, dout))]


def assert_packed_is_right(problem: PackedProblem, seed: int, backend: str, device: str = "cpu") -> None:
    """Judge all that the public function gives."""
    results = dict(zip(NAMES, results_of(problem, seed, backend, device)))

    def references(of: int, precise: bool) -> list[Tensor]:
        qkv, dout = problem.make(of, device)
        return by_sequence(problem, *qkv, dout, precise)

    judged = judge_by_draws(results, references, seed, range(seed + 1, seed + DRAWS))
    assert_right(judged, f"{problem.name}, seed {seed}")


@functools.cache
def packed_problems(device: str = "cpu") -> dict[str, PackedProblem]:
    """By name; each with what it shows."""
    generator = torch.Generator().manual_seed(9)
    # Sequences that end within the first block, in a later one, with one of keys alone or of queries alone; none.
    lengths = ((300, 290), (0, 20), (37, 50), (200, 400), (9, 0))
    used = ((270, 290), (0, 20), (37, 3), (200, 257), (9, 0))
    document = torch.randint(0, 3, (len(lengths), 400), generator=generator).sort(dim=1).values.to(device)

    def blocks(mask_mod, batch, heads, size=128):
        sizes = 300, 400
        return dict(
            mask_mod=mask_mod,
            block_mask=fa4.create_block_mask(mask_mod, batch, heads, *sizes, device=device, BLOCK_SIZE=size),
        )

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= 90 * (h + 1)) & (kv_idx - q_idx <= 170)

    in_order = dict(deterministic=True)
    everything = blocks(lambda b, h, q_idx, kv_idx: kv_idx >= 0 * q_idx, None, None)
    return {
        # Each sequence has lists of its own; additions in order; rows of q that no sequence has.
        "documents": PackedProblem(
            "documents", lengths, **blocks(fa4.masks.documents(document), 5, None), padding=40, call=in_order
        ),
        # Lists that are the same for all, each head its own; parts of sequences are unused.
        "heads_used": PackedProblem("heads_used", lengths, **blocks(window, None, 2), used=used),
        # Blocks seen whole, in which sequences end, and a score.
        "whole": PackedProblem("whole", lengths, **everything, used=used, score_mod=fa4.scores.softcap(3.0)),
        # A block of the mask is several of a kernel's, of which sequences have some.
        "large_blocks": PackedProblem("large_blocks", lengths, **blocks(window, None, 2, 256), call=in_order),
        # Blocks that are no tiles.
        "other_blocks": PackedProblem("other_blocks", lengths, **blocks(window, None, 2, (48, 32))),
        "wide": PackedProblem("wide", lengths, **blocks(window, None, 2), head_dim=128, call=in_order),
    }
