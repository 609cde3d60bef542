"""Host side of the sparse backward: which problems it serves, and its launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...bwd import lists_plan
from ...core.program import ProgramRef
from ...core.softmax import LOG2_E
from ...runtime.device import Chip, chip_of
from ...runtime.spec import Saved
from ..stages import PANEL_COLUMNS
from .config import MOST_COLUMNS, Sm100SparseConfig
from .forward.config import HEADS, LATENT_COLUMNS, Sm100ListsForwardConfig
from .transposed.config import Sm100TransposedConfig

KERNEL = ProgramRef[Sm100SparseConfig]("sm100.sparse_backward", "fa4.sm100.sparse.kernel")
TRANSPOSED = ProgramRef[Sm100TransposedConfig]("sm100.transposed_sparse_backward", "fa4.sm100.sparse.transposed.kernel")

FORWARD = ProgramRef[Sm100ListsForwardConfig]("sm100.lists_forward", "fa4.sm100.sparse.forward.kernel")


def serves(dtype: torch.dtype, head_dim: int, head_dim_v: int, group: int, deterministic: bool) -> bool:
    """Return whether the kernel has tiles for such rows. group: query heads of a key/value head of a list."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    if deterministic and group > Sm100SparseConfig.tile_m:  # two pairs would store to the same rows
        return False
    return is_half and all(d % PANEL_COLUMNS == 0 and d <= MOST_COLUMNS for d in (head_dim, head_dim_v))


def backward(
    saved: Saved, q: Tensor, keys: tuple[Tensor, Tensor, Tensor, Tensor], dq: Tensor, dkv: tuple[Tensor, Tensor],
    softmax_scale: float, deterministic: bool = False,
) -> None:  # fmt: skip
    """Write dq; add dk and dv to `dkv`, or store them to it; see `fa4.sm90.sparse.plan.backward`."""
    k, v, rows, count = keys
    k, v = (_with_equal_distances(x) for x in (k, v))
    parts, chip = rows.shape[1] * k.shape[1], chip_of(q.device)
    cfg = _config(q.dtype, q.shape[1] // parts, q.shape[2], v.shape[2], saved.dlse is not None, deterministic, chip)
    kernel = TRANSPOSED if isinstance(cfg, Sm100TransposedConfig) else KERNEL
    lists_plan.launch(kernel, cfg, chip, saved, q, (k, v, rows, count), dq, dkv, softmax_scale)


def serves_forward(dtype: torch.dtype, head_dim: int, head_dim_v: int, group: int, parts: int, chip: Chip) -> bool:
    """Return whether the kernel for lists of latents is the best one for a forward. Values are the first columns of
    keys. group: query heads of a key/value head of a list. parts: key/value heads of the lists of all queries; with
    fewer than multiprocessors, other kernels cut lists into parts."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    has_tiles = head_dim in LATENT_COLUMNS and head_dim_v == LATENT_COLUMNS[0]
    return is_half and has_tiles and group <= HEADS and parts >= chip.sms


def forward(q: Tensor, k: Tensor, rows: Tensor, count: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
    """Write out and lse of queries whose values are the first columns of k; see `fa4.sparse.native.forward`."""
    parts, chip = rows.shape[1] * k.shape[1], chip_of(q.device)
    cfg = _forward_config(q.dtype, q.shape[1] // parts, q.shape[2], out.shape[2], chip)
    by_rows = [x.unflatten(1, (parts, -1)).transpose(1, 2) for x in (q, out)]
    tensors = (*by_rows, _with_equal_distances(k), lse, rows, count)
    FORWARD.launcher(cfg, chip)(tensors, softmax_scale * LOG2_E)


@functools.lru_cache(maxsize=256)
def _forward_config(
    dtype: torch.dtype, group: int, head_dim: int, head_dim_v: int, chip: Chip
) -> Sm100ListsForwardConfig:
    fields = lists_plan.fields(dtype, group, head_dim, head_dim_v, False, False)
    return Sm100ListsForwardConfig(**fields, smem_bytes=chip.smem_per_block)


def _with_equal_distances(x: Tensor) -> Tensor:
    """Return k or v with rows whose heads follow each other at equal distances."""
    heads = x.shape[1]
    return x if heads == 1 or x.stride(0) == heads * x.stride(1) else x.contiguous()


@functools.lru_cache(maxsize=256)
def _config(
    dtype: torch.dtype, group: int, head_dim: int, head_dim_v: int, has_dlse: bool, deterministic: bool, chip: Chip
) -> Sm100SparseConfig | Sm100TransposedConfig:
    """Return the configuration of the kernel whose tiles have fewer rows or columns without a head."""
    fields = lists_plan.fields(dtype, group, head_dim, head_dim_v, has_dlse, deterministic)
    kind = Sm100TransposedConfig if group <= Sm100TransposedConfig.tile_m else Sm100SparseConfig
    return kind(**fields, smem_bytes=chip.smem_per_block)
