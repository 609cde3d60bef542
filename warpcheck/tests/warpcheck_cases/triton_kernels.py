"""Kernels as users of Triton write them, and their PTX as Triton 3.9 compiled it, for tests without Triton.

Write triton_ptx/, with Triton installed:

    PYTHONPATH=warpcheck/tests TRITON_DEFAULT_FP_FUSION=1 python -m warpcheck_cases.triton_kernels
"""

import gzip
import re
from pathlib import Path

import torch
import triton
import triton.language as tl

FOLDER = Path(__file__).parent / "triton_ptx"
CHIPS = ("sm_80", "sm_90a", "sm_100a")


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax(out, x, stride, n, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + column, mask=column < n, other=-float("inf"))
    power = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row * stride + column, power / tl.sum(power, axis=0), mask=column < n)


@triton.jit
def matmul(a, b, c, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    left, right = a + i[:, None] * K + k[None, :], b + k[:, None] * N + j[None, :]
    for _ in range(tl.cdiv(K, DEPTH)):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += DEPTH
        right += DEPTH * N
    tl.store(c + i[:, None] * N + j[None, :], total.to(tl.float16))


@triton.jit
def attention(q, k, v, out, scale_log2, length, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    i, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    head = tl.program_id(1) * length * D
    query = tl.load(q + head + i[:, None] * D + d[None, :])
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total, sum_ = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, length, KEYS):
        j = start + tl.arange(0, KEYS)
        score = tl.dot(query, tl.load(k + head + j[None, :] * D + d[:, None])) * scale_log2
        higher = tl.maximum(highest, tl.max(score, 1))
        power = tl.math.exp2(score - higher[:, None])
        less = tl.math.exp2(highest - higher)
        sum_ = sum_ * less + tl.sum(power, 1)
        value = tl.load(v + head + j[:, None] * D + d[None, :])
        total = tl.dot(power.to(tl.float16), value, total * less[:, None])
        highest = higher
    tl.store(out + head + i[:, None] * D + d[None, :], (total / sum_[:, None]).to(tl.float16))


def run_add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor):
    return add[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256)


def run_softmax(x: torch.Tensor, out: torch.Tensor):
    return softmax[(len(x),)](out, x, x.stride(0), x.shape[1], BLOCK=512)


def run_matmul(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor):
    grid = (len(a) // 128, b.shape[1] // 64)
    return matmul[grid](a, b, c, b.shape[1], a.shape[1], ROWS=128, COLUMNS=64, DEPTH=64, num_stages=3)


def run_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor):
    heads, length, d = q.shape
    return attention[(length // 128, heads)](
        q, k, v, out, d**-0.5 * 1.4426950408889634, length, ROWS=128, KEYS=64, D=d, num_stages=2
    )


def record() -> None:
    """Write the PTX of the matmul and the attention for each chip, with the shared memory that it is launched with."""
    from warpcheck import emulate

    for chip in CHIPS:
        with emulate(chip, tells_devices_apart=True):
            a, b, c = (torch.zeros(128, 128, device="cuda", dtype=torch.float16) for _ in range(3))
            x = torch.zeros(1, 256, 64, device="cuda", dtype=torch.float16)
            for name, kernel in (("matmul", run_matmul(a, b, c)), ("attention", run_attention(x, x, x, x.clone()))):
                ptx = re.sub(r'"/[^"]*/', '"', kernel.asm["ptx"])  # folders of whoever recorded it
                text = f"// shared {kernel.metadata.shared}\n{ptx}"
                (FOLDER / f"{name}_{chip}.ptx.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    record()
