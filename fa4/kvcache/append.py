"""Append to a cache: write new keys (rotated) and values into their rows, and rotate q, by a kernel if possible, else
in torch.

The kernel (`fwd.kernels.append`) runs on every NVIDIA GPU since Ampere, for float16 and bfloat16. Caches of e4m3, and
of NVFP4 with its e4m3 scales, need a GPU that converts to it (sm_89 and newer). Other dtypes and devices, and
backend="torch", use torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..fwd.launchers import APPEND, AppendConfig
from ..runtime import nvfp4, recording, scaled_rows
from ..runtime.device import Chip, chip_of
from ..runtime.jit import can_run_kernels
from ..runtime.memory import maker
from ..runtime.spec import Cache, compute_dtype
from ..torch_ops.run.prepare import device_to_enter, is_other_device
from .record import AppendArguments

_HALF = (torch.float16, torch.bfloat16)


class Append:
    """Append operation for all calls with the same shapes, dtypes, device and options."""

    def __init__(self, a: AppendArguments) -> None:
        chip, least = chip_of(a.q.device), 80 if a.converted_dtype in (None, torch.int8) else 89
        by_kernel = a.backend != "torch" and a.q.dtype in _HALF and chip.number >= least and can_run_kernels(chip)
        self._launch = _launcher(a, chip) if by_kernel else None
        device = a.q.device
        self._device = device_to_enter(device)
        self._seqlens = maker(a.cache_seqlens.shape, torch.int32, device)
        self._rotated = None if a.cos is None else maker(a.q.shape, a.q.dtype, device)

    def __call__(self, a: AppendArguments) -> tuple[Tensor | None, Tensor]:
        """Write into a.k_cache and a.v_cache; return q rotated (or None), and the resulting rows of each sequence. Rows
        without room in the cache are dropped."""
        if self._launch is None:
            return append_in_torch(a)
        if self._device is not None and is_other_device(self._device):
            with torch.cuda.device(self._device):
                return self(a)
        seqlens, rotated = self._seqlens(), None if self._rotated is None else self._rotated()
        caches, k_descale, v_descale = (a.k_cache, a.v_cache), a.k_descale, a.v_descale
        if a.converted_dtype is not None:
            caches = a.k_cache.view(torch.uint8), a.v_cache.view(torch.uint8)
            if a.k_scales is not None and a.v_scales is not None:
                k_descale, v_descale = a.k_scales.view(torch.uint8), a.v_scales.view(torch.uint8)
        rotates = rotated is not None
        queries = (a.q, rotated, a.cu_seqlens_q) if rotates else (None, None, None)
        self._launch(
            (*queries[:2], a.k, a.v, *caches, a.cache_seqlens, seqlens, queries[2], a.cu_seqlens_k_new, a.cos, a.sin,
             a.rotary_seqlens if rotates else None, a.page_table, a.batch_idx, k_descale, v_descale)
        )  # fmt: skip
        return rotated, seqlens


def _launcher(a: AppendArguments, chip: Chip) -> Callable[..., None]:
    cfg = AppendConfig(
        a.q.dtype, None if a.cos is None else a.cos.dtype, a.cu_seqlens_q is not None, a.cu_seqlens_k_new is not None,
        None if a.page_table is None else a.k_cache.shape[1], a.batch_idx is not None, a.rotary_seqlens is not None,
        a.interleaved, a.same_position, a.converted_dtype,
    )  # fmt: skip
    recording.append(cfg, chip)
    return APPEND.launcher(cfg, chip)


@torch.no_grad()
def append_in_torch(a: AppendArguments) -> tuple[Tensor | None, Tensor]:
    """Append on any device. Synchronises: the rows to write depend on the room left."""
    sequence, step, exists = rows_of(a.k, a.batch, a.cu_seqlens_k_new)
    row = a.cache_seqlens[sequence] + step
    capacity = Cache(a.page_table).capacity(a.k_cache)
    index = _cache_index(a, sequence, row.clamp(0, max(capacity - 1, 0)))
    exists = exists & (row >= 0) & (row < capacity)
    k = a.k.reshape(-1, *a.k.shape[-2:])
    if a.cos is not None and a.sin is not None:
        k = rotate(k, a.cos, a.sin, a.positions[sequence] + step, a.interleaved)
    for target, rows in _stored(a, k, a.v.reshape(-1, *a.v.shape[-2:]), sequence):
        target[index[0][exists], index[1][exists]] = rows[exists]
    return _rotated_queries(a), _rows_after(a, capacity)


def _stored(a: AppendArguments, k: Tensor, v: Tensor, sequence: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tensors that get new rows, and these rows as they are stored. k, v: (rows, heads, dim). sequence: of each
    row."""
    if a.converted_dtype == scaled_rows.DTYPE:
        yield a.k_cache, scaled_rows.quantised(k)
        return
    for cache, x, descale, scales in (
        (a.k_cache, k, a.k_descale, a.k_scales),
        (a.v_cache, v, a.v_descale, a.v_scales),
    ):
        if scales is not None:
            codes, new_scales = nvfp4.quantised(x)
            yield cache.view(torch.uint8), codes
            yield scales, new_scales
        elif descale is not None:
            yield cache, quantised(x.float() / descale[sequence][..., None], cache.dtype)
        else:
            yield cache, x.to(cache.dtype)


def quantised(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round each element to the nearest 8-bit number, clamped to the dtype's range."""
    if dtype == torch.int8:
        return x.round().nan_to_num(0.0).clamp(-128, 127).to(dtype)
    return x.clamp(-scaled_rows.LARGEST, scaled_rows.LARGEST).to(dtype)


def rows_of(x: Tensor, batch: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's sequence, its index there, and whether a sequence uses it; x is dense or packed."""
    if cu_seqlens is None:
        row = torch.arange(batch * x.shape[1], device=x.device)
        return row // x.shape[1], row % x.shape[1], torch.ones_like(row, dtype=torch.bool)
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:], row, right=True).clamp_(max=max(batch - 1, 0))
    return sequence, row - cu_seqlens[sequence], row < cu_seqlens[-1]


def _cache_index(a: AppendArguments, sequence: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two indices of rows in the cache."""
    if a.page_table is None:
        return sequence if a.batch_idx is None else a.batch_idx[sequence].long(), row
    size = a.k_cache.shape[1]
    return a.page_table[sequence, row // size].long(), row % size


def _rows_after(a: AppendArguments, capacity: int) -> Tensor:
    new = a.k.shape[1] if a.cu_seqlens_k_new is None else a.cu_seqlens_k_new.diff()
    return (a.cache_seqlens + new).clamp(max=capacity).to(torch.int32)


def _rotated_queries(a: AppendArguments) -> Tensor | None:
    if a.cos is None or a.sin is None:
        return None
    sequence, step, _ = rows_of(a.q, a.batch, a.cu_seqlens_q)
    position = a.positions[sequence] + (0 if a.same_position else step)
    return rotate(a.q.reshape(-1, *a.q.shape[-2:]), a.cos, a.sin, position, a.interleaved).view(a.q.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """Rotate x (rows, heads, head_dim) at `position` (rows,), in float32: pairs (a, b) of its first 2 * cos.shape[1]
    columns become (a cos - b sin, a sin + b cos). Pairs are neighbours or halves; the other columns stay."""
    position = position.clamp(0, cos.shape[0] - 1)
    half, dtype = cos.shape[1], compute_dtype(x.dtype)
    c, s = (table[position][:, None].to(dtype) for table in (cos, sin))
    y = x.to(dtype)
    rotated, rest = y[..., : 2 * half], y[..., 2 * half :]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else (rotated[..., :half], rotated[..., half:])
    pair = (a * c - b * s, a * s + b * c)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated, rest), dim=-1).to(x.dtype)
