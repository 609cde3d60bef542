"""Plan of the scores kernel: which problems it serves, its tiles, and its launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.program import ProgramRef
from ...runtime.device import Chip
from .config import ScoresConfig

KERNEL = ProgramRef[ScoresConfig]("sm90.indexer", "fa4.sm90.indexer.kernel")
COLUMNS = 128  # of a product, at most
TILE_N = 128
WAVES = 4  # of CTAs, at least, so that the last one is short
LEAST_BLOCKS = 32  # of a CTA, so that the load of Q is short beside them

_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def refusals(q: Tensor, k: Tensor, is_paged: bool) -> list[str]:
    """Return the reasons why the kernel cannot compute these scores. q: (rows, heads, head_dim). k: (key rows,
    head_dim), or pages (pages, page_size, head_dim)."""
    heads, head_dim = q.shape[1:]
    reasons = []
    if q.dtype not in _DTYPES:
        reasons.append(f"lacks dtype {str(q.dtype).removeprefix('torch.')} (has float16, bfloat16, float8_e4m3fn)")
    if heads % 8 or heads > COLUMNS:
        reasons.append(f"lacks {heads} heads (has multiples of 8 up to {COLUMNS})")
    if head_dim * q.dtype.itemsize % 16 or head_dim > 128:
        reasons.append(f"lacks head_dim {head_dim} (has rows of a multiple of 16 bytes, up to 128 columns)")
    if is_paged:
        size = k.shape[1]
        if size % 8 or (size % TILE_N and TILE_N % size):
            reasons.append(f"lacks pages of {size} rows (has 8, 16, 32, 64 and multiples of {TILE_N})")
        if k.stride(0) != size * k.stride(1):
            reasons.append("lacks pages that do not follow each other in memory")
    if k.stride(-2) * k.dtype.itemsize % 16 or k.data_ptr() % 16:
        reasons.append("lacks a k whose rows do not start at multiples of 16 bytes")
    return reasons


class Scores:
    """Launches of the kernel for one problem. Tensors: see `context.ScoresTensors`; q and k as in `refusals`."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        k_descale: Tensor | None,
        bounds: tuple[Tensor, Tensor],
        counts: Tensor,
        sequences: Tensor,
        page_table: Tensor | None,
        chip: Chip,
    ) -> None:
        self.heads, self.head_dim = q.shape[1:]
        self.sms, is_low = chip.sms, q.dtype.itemsize == 1
        self.cfg = ScoresConfig(
            torch_dtype=q.dtype,
            head_dim=self.head_dim,
            heads=self.heads,
            tokens=max(COLUMNS // self.heads, 1),
            tile_n=TILE_N,
            page_size=0 if page_table is None else k.shape[1],
            has_k_descale=k_descale is not None,
            smem_bytes=chip.smem_per_block,
        )
        flat_k = k.flatten(0, 1) if page_table is not None else k
        flat_q = q.reshape(-1, self.head_dim)
        if flat_q.data_ptr() % 16:
            flat_q = flat_q.clone()
        if is_low:
            flat_q, flat_k = flat_q.view(torch.uint8), flat_k.view(torch.uint8)
        if k_descale is not None:
            k_descale = k_descale.reshape(-1)
        q_begin, k_begin = bounds
        self._tensors = (flat_q, flat_k, weights.contiguous()), (
            k_descale, q_begin, k_begin, counts, sequences, page_table,
        )  # fmt: skip
        self._launch = KERNEL.launcher(self.cfg, chip)

    def __call__(self, scores: Tensor, rows: slice) -> None:
        """Write the scores of some rows, (rows, columns), where a row sees the key; other elements stay as they are."""
        tiles = -(-(rows.stop - rows.start) // self.cfg.rows)
        blocks = -(-scores.shape[1] // self.cfg.tile_n)
        if not tiles or not blocks:
            return
        splits = min(-(-WAVES * self.sms // tiles), -(-blocks // LEAST_BLOCKS))
        split_blocks = -(-blocks // max(splits, 1))
        operands, others = self._tensors
        tensors = (*operands, scores, *others)
        self._launch(tensors, (rows.start, rows.stop, tiles, -(-blocks // split_blocks), split_blocks))
