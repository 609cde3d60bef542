"""Host side of the sparse backward: which problems it serves, and its launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...core.softmax import LOG2_E
from ...core.variant import Variant
from ...runtime.device import Chip, chip_of
from ...runtime.spec import AttentionSpec, Saved
from .config import SparseBackwardConfig
from .kernel import KERNEL

_LARGEST_HEAD_DIM = 128


def serves(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> bool:
    """Return whether the kernel has tiles for such rows."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return is_half and all(d % 8 == 0 and d <= _LARGEST_HEAD_DIM for d in (head_dim, head_dim_v))


def backward(
    saved: Saved, q: Tensor, keys: tuple[Tensor, Tensor, Tensor, Tensor], dq: Tensor, sums: tuple[Tensor, Tensor],
    softmax_scale: float,
) -> None:  # fmt: skip
    """Write dq; add dk and dv to `sums`, float32, like k and v. These three are row-major.

    Args:
        saved: out, dout (tokens, query heads, columns); lse, dlse (tokens, query heads).
        q: (tokens, query heads, columns). Heads that follow each other share a key/value head of a list.
        keys: k, v (rows, key/value heads of a list, columns); rows (tokens, lists, longest list) int32, listed rows of
            k and v; count (tokens, lists) int32, how many of them are used.
    """
    k, v, rows, count = keys
    parts, chip = rows.shape[1] * k.shape[1], chip_of(q.device)
    cfg = _config(q.dtype, q.shape[1] // parts, q.shape[2], v.shape[2], saved.dlse is not None, chip)
    by_rows = [x.unflatten(1, (parts, -1)).transpose(1, 2) for x in map(_aligned, (q, saved.out, saved.dout, dq))]
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    tensors = (*by_rows, _aligned(k), _aligned(v), saved.lse.contiguous(), dlse, rows, count, *sums)
    KERNEL.launcher(cfg, chip)(tensors, softmax_scale, softmax_scale * LOG2_E)


def _aligned(x: Tensor) -> Tensor:
    """Return x with rows that start at multiples of 16 bytes."""
    is_aligned = x.stride(-1) == 1 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    return x if is_aligned and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def _config(
    dtype: torch.dtype, group: int, head_dim: int, head_dim_v: int, has_dlse: bool, chip: Chip
) -> SparseBackwardConfig:
    spec = AttentionSpec(dtype, head_dim, head_dim_v, group, 1, softmax_scale=1.0, needs_backward=True)
    fields = Variant.fields(spec, backward=True, has_dlse=has_dlse)
    return SparseBackwardConfig(**fields, smem_bytes=chip.smem_per_block)
