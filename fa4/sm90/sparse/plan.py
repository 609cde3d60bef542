"""Host side of the sparse backward: which problems it serves, and its launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...bwd import lists_plan
from ...core.program import ProgramRef
from ...runtime.device import Chip, chip_of
from ...runtime.spec import Saved
from ..wgmma import ROWS
from .config import SparseBackwardConfig

KERNEL = ProgramRef[SparseBackwardConfig]("sm90.sparse_backward", "fa4.sm90.sparse.kernel")
_LARGEST_HEAD_DIM = 128
_MOST_ROWS = 2 * ROWS  # of a CTA


def serves(dtype: torch.dtype, head_dim: int, head_dim_v: int, group: int, deterministic: bool) -> bool:
    """Return whether the kernel has tiles for such rows. group: query heads of a key/value head of a list."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    if deterministic and group > _MOST_ROWS:  # two CTAs would store to the same rows
        return False
    return is_half and all(d % 8 == 0 and d <= _LARGEST_HEAD_DIM for d in (head_dim, head_dim_v))


def backward(
    saved: Saved, q: Tensor, keys: tuple[Tensor, Tensor, Tensor, Tensor], dq: Tensor, dkv: tuple[Tensor, Tensor],
    softmax_scale: float, deterministic: bool = False,
) -> None:  # fmt: skip
    """Write dq; add dk and dv to `dkv`, float32, like k and v.

    q, k, v, out and dout are in `Layout.ROWS`, all others row-major.

    Args:
        saved: out, dout (tokens, query heads, columns); lse, dlse (tokens, query heads).
        q: (tokens, query heads, columns). Heads that follow each other share a key/value head of a list.
        keys: k, v (rows, key/value heads of a list, columns); rows (tokens, lists, longest list) int32, listed rows of
            k and v; count (tokens, lists) int32, how many of them are used.
        deterministic: `dkv` has a row for each entry of the lists, (tokens * lists * longest list, key/value heads of
            a list, columns). Store its gradients there; rows of unused entries are not written.
    """
    k, v, rows, _ = keys
    parts, chip = rows.shape[1] * k.shape[1], chip_of(q.device)
    has_front = not deterministic and exceed_l2(dkv, chip)
    columns = q.shape[2], v.shape[2]
    cfg = _config(q.dtype, q.shape[1] // parts, *columns, saved.dlse is not None, deterministic, has_front, chip)
    front = torch.zeros(1, dtype=torch.int32, device=q.device) if has_front else None
    lists_plan.launch(KERNEL, cfg, chip, saved, q, keys, dq, dkv, softmax_scale, front)


def exceed_l2(sums: tuple[Tensor, Tensor], chip: Chip) -> bool:
    """Return whether the sums of dK and dV are larger than the L2 cache together."""
    return sum(x.numel() * x.element_size() for x in sums) > chip.l2


@functools.lru_cache(maxsize=256)
def _config(
    dtype: torch.dtype, group: int, head_dim: int, head_dim_v: int, has_dlse: bool, deterministic: bool,
    has_front: bool, chip: Chip,
) -> SparseBackwardConfig:  # fmt: skip
    fields = lists_plan.fields(dtype, group, head_dim, head_dim_v, has_dlse, deterministic)
    return SparseBackwardConfig(**fields, smem_bytes=chip.smem_per_block, has_front=has_front)
