"""Host side of a backward of lists that is the same on every chip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.program import ProgramRef
from ..core.softmax import LOG2_E
from ..core.variant import Variant
from ..runtime.device import Chip
from ..runtime.spec import AttentionSpec, Saved


class ListsVariant(Variant):
    """What the host needs of the configuration of a chip's kernels of lists."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def tile_m(self) -> int:
            """Query heads of a CTA or a pair."""

        @property
        def tile_n(self) -> int:
            """Listed keys of a step."""

        @property
        def has_front(self) -> bool:
            """Whether CTAs start where others are in the keys."""

    @property
    def row_tiles(self) -> int:
        """CTAs or pairs that share the query heads of a key/value head."""
        return -(-self.group // self.tile_m)


def fields(
    dtype: torch.dtype, group: int, head_dim: int, head_dim_v: int, has_dlse: bool, deterministic: bool
) -> dict[str, Any]:
    """Return the fields of a configuration that are those of `Variant`. group: query heads of a key/value head of a
    list."""
    spec = AttentionSpec(dtype, head_dim, head_dim_v, group, 1, 1.0, needs_backward=True, deterministic=deterministic)
    return Variant.fields(spec, backward=True, has_dlse=has_dlse)


def launch(
    kernel: ProgramRef, cfg: Variant, chip: Chip, saved: Saved, q: Tensor, keys: tuple[Tensor, Tensor, Tensor, Tensor],
    dq: Tensor, dkv: tuple[Tensor, Tensor], softmax_scale: float, front: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel: write dq, add dk and dv to `dkv`; see `fa4.sm90.sparse.plan.backward`. front: see
    `lists.SparseTensors`."""
    k, v, rows, count = keys
    parts = rows.shape[1] * k.shape[1]
    by_rows = [x.unflatten(1, (parts, -1)).transpose(1, 2) for x in (q, saved.out, saved.dout, dq)]
    tensors = (*by_rows, k, v, saved.lse, saved.dlse, rows, count, *dkv, front)
    kernel.launcher(cfg, chip)(tensors, softmax_scale, softmax_scale * LOG2_E)
