"""New keys and values into their rows of the cache, rotated, and q rotated: by a kernel where there is one, else torch.

The kernel (`fwd.append`) runs on every NVIDIA GPU since Ampere, for float16 and bfloat16, and for fp8 caches on those
that convert to e4m3 (sm_89 and newer); other dtypes and devices, and backend="torch" are torch's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import recording
from ..device import Chip, chip_of
from ..memory import maker
from ..run.prepare import is_elsewhere
from .record import Appended

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


class Append:
    """How new rows get into a cache, for all calls with the shapes, dtypes, device and options of one."""

    def __init__(self, a: Appended) -> None:
        chip, least = chip_of(a.q.device), 89 if a.bytes_dtype == torch.float8_e4m3fn else 80
        by_kernel = a.backend != "torch" and a.q.dtype in _HALF and chip.number >= least and chip.compiles
        self._launch = _launcher(a, chip) if by_kernel else None
        device = a.q.device
        self._device = device.index if device.type == "cuda" else None
        self._seqlens = maker(a.cache_seqlens.shape, torch.int32, device)
        self._turned = None if a.cos is None else maker(a.q.shape, a.q.dtype, device)

    def __call__(self, a: Appended) -> tuple[Tensor | None, Tensor]:
        """(q rotated or None, rows of each sequence in the cache after it); changes a.k_cache and a.v_cache.

        Rows that the cache has no room for are left out.
        """
        if self._launch is None:
            return append_in_torch(a)
        if self._device is not None and is_elsewhere(self._device):
            with torch.cuda.device(self._device):
                return self(a)
        seqlens, turned = self._seqlens(), None if self._turned is None else self._turned()
        caches = a.k_cache, a.v_cache
        if a.bytes_dtype is not None:
            caches = a.k_cache.view(torch.uint8), a.v_cache.view(torch.uint8)
        rotates = turned is not None
        queries = (a.q, turned, a.cu_seqlens_q) if rotates else (None, None, None)
        self._launch(
            (*queries[:2], a.k, a.v, *caches, a.cache_seqlens, seqlens, queries[2], a.cu_seqlens_k_new, a.cos, a.sin,
             a.rotary_seqlens if rotates else None, a.page_table, a.batch_idx, a.k_descale, a.v_descale)
        )  # fmt: skip
        return turned, seqlens


def _launcher(a: Appended, chip: Chip) -> Callable[..., None]:
    from ..fwd.append import Config, launcher  # needs CuTe DSL

    cfg = Config(
        a.q.dtype, None if a.cos is None else a.cos.dtype, a.cu_seqlens_q is not None, a.cu_seqlens_k_new is not None,
        None if a.page_table is None else a.k_cache.shape[1], a.batch_idx is not None, a.rotary_seqlens is not None,
        a.interleaved, a.same_position, a.bytes_dtype,
    )  # fmt: skip
    recording.append(cfg, chip)
    return launcher(cfg, chip)


@torch.no_grad()
def append_in_torch(a: Appended) -> tuple[Tensor | None, Tensor]:
    """The same on any device. Waits for it: which rows there is room for decides what is written."""
    sequence, step, exists = rows_of(a.k, a.batch, a.cu_seqlens_k_new)
    row = a.cache_seqlens[sequence] + step
    capacity = a.cache.capacity(a.k_cache)
    place = _place(a, sequence, row.clamp(0, max(capacity - 1, 0)))
    exists = exists & (row >= 0) & (row < capacity)
    k = a.k.reshape(-1, *a.k.shape[-2:])
    if a.cos is not None and a.sin is not None:
        k = rotate(k, a.cos, a.sin, a.positions[sequence] + step, a.interleaved)
    for cache, x, descale in ((a.k_cache, k, a.k_descale), (a.v_cache, a.v.reshape(-1, *a.v.shape[-2:]), a.v_descale)):
        if descale is not None:
            x = quantised(x.float() / descale[sequence][..., None], cache.dtype)
        cache[place[0][exists], place[1][exists]] = x[exists].to(cache.dtype)
    return _rotated_queries(a), (a.cache_seqlens + _new_rows(a)).clamp(max=capacity).to(torch.int32)


def quantised(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of 8 bits to each of x, or the largest there is."""
    if dtype == torch.int8:
        return x.round().nan_to_num(0.0).clamp(-128, 127).to(dtype)
    return x.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(dtype)


def rows_of(x: Tensor, batch: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of a dense or packed tensor: its sequence, its number there, and whether a sequence has it."""
    if cu_seqlens is None:
        row = torch.arange(batch * x.shape[1], device=x.device)
        return row // x.shape[1], row % x.shape[1], torch.ones_like(row, dtype=torch.bool)
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:], row, right=True).clamp_(max=max(batch - 1, 0))
    return sequence, row - cu_seqlens[sequence], row < cu_seqlens[-1]


def _place(a: Appended, sequence: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The first two indices of rows in the cache."""
    if a.page_table is None:
        return sequence if a.batch_idx is None else a.batch_idx[sequence].long(), row
    size = a.k_cache.shape[1]
    return a.page_table[sequence, row // size].long(), row % size


def _new_rows(a: Appended) -> Tensor | int:
    return a.k.shape[1] if a.cu_seqlens_k_new is None else a.cu_seqlens_k_new.diff()


def _rotated_queries(a: Appended) -> Tensor | None:
    if a.cos is None or a.sin is None:
        return None
    sequence, step, _ = rows_of(a.q, a.batch, a.cu_seqlens_q)
    position = a.positions[sequence] + (0 if a.same_position else step)
    return rotate(a.q.reshape(-1, *a.q.shape[-2:]), a.cos, a.sin, position, a.interleaved).view(a.q.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (rows, heads, head_dim) at `position` (rows,), in float32: pairs (a, b) of its first
    2 * cos.shape[1] columns become (a cos - b sin, a sin + b cos), neighbours or halves; the other columns stay."""
    position = position.clamp(0, cos.shape[0] - 1)
    half, dtype = cos.shape[1], torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[position][:, None].to(dtype) for table in (cos, sin))
    y = x.to(dtype)
    turned, rest = y[..., : 2 * half], y[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1).to(x.dtype)
