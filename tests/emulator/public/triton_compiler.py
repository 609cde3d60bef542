"""Triton's compiler: kernels of this page, in which it makes copies by tensor maps and specialises warps."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa4.oracle.cases import Judgement
from tests.emulator.public.rows import Row, attention, by_formula, draw

PACKAGE = "triton"


@triton.jit
def _matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, CTAS: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):  # fmt: skip
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [ROWS, DEPTH])
    b = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [COLUMNS, DEPTH])
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [ROWS, COLUMNS])
    across = tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS) * across, CTAS, flatten=False, warp_specialize=SPECIALIZED):
        i, j = tile // across * ROWS, tile % across * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, K, DEPTH):
            total = tl.dot(a.load([i, k]), b.load([j, k]).T, total)
        c.store([i, j], total.to(tl.bfloat16))


@triton.jit
def _attention(
    q_ptr, k_ptr, v_ptr, out_ptr, scale_log2, length, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Full attention of one head a column of the grid; `length` is a multiple of the tiles."""
    row = tl.program_id(1) * length
    rows = tl.num_programs(1) * length
    q = tl.make_tensor_descriptor(q_ptr, [rows, D], [D, 1], [ROWS, D])
    k = tl.make_tensor_descriptor(k_ptr, [rows, D], [D, 1], [KEYS, D])
    v = tl.make_tensor_descriptor(v_ptr, [rows, D], [D, 1], [KEYS, D])
    out = tl.make_tensor_descriptor(out_ptr, [rows, D], [D, 1], [ROWS, D])
    first = row + tl.program_id(0) * ROWS
    query = q.load([first, 0])
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    sum_ = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    for start in tl.range(0, length, KEYS, warp_specialize=SPECIALIZED):
        score = tl.dot(query, k.load([row + start, 0]).T) * scale_log2
        higher = tl.maximum(highest, tl.max(score, 1))
        power = tl.math.exp2(score - higher[:, None])
        less = tl.math.exp2(highest - higher)
        sum_ = sum_ * less + tl.sum(power, 1)
        total = tl.dot(power.to(tl.bfloat16), v.load([row + start, 0]), total * less[:, None])
        highest = higher
    out.store([first, 0], (total / sum_[:, None]).to(tl.bfloat16))


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _product(specialized: bool, seed: int) -> list[Judgement]:
    """4 tiles on 2 persistent CTAs."""
    triton.set_allocator(_scratch)
    a, b = draw(seed, (256, 256), (256, 256))
    c = torch.empty(256, 256, dtype=a.dtype, device="cuda")
    _matmul[(2,)](a, b, c, 256, 256, 256, 128, 128, 64, 2, specialized, num_warps=4, num_stages=3)
    return by_formula(["product"], [c], lambda a, b: a @ b.T, a, b)


def _heads(specialized: bool, seed: int) -> list[Judgement]:
    """2 heads of 2 tiles of rows and 4 of keys."""
    triton.set_allocator(_scratch)
    q, k, v = draw(seed, *((2, 256, 64),) * 3)
    out = torch.empty_like(q)
    scale = 64**-0.5 * math.log2(math.e)
    _attention[(2, 2)](q, k, v, out, scale, 256, 128, 64, 64, specialized, num_warps=4, num_stages=3)

    def formula(*heads_first: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in heads_first)
        return attention(q, k, v, causal=False)[0].transpose(0, 1)

    return by_formula(["out"], [out], formula, q, k, v)


ROWS = [
    Row(PACKAGE, f"{name}{', warp_specialize' if specialized else ''}", chip, functools.partial(run, specialized))
    for chip in ("sm_100a", "sm_90a")
    for name, run in (("persistent matmul by tensor maps", _product), ("attention by tensor maps", _heads))
    for specialized in (False, True)
]
