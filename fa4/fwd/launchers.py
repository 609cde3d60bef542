"""Small kernels of a forward: configurations and launchers. Their device code is in `kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.constant import Constant
from ..core.program import ProgramRef
from ..runtime import jit, nvfp4, scaled_rows
from ..runtime.device import Chip
from ..runtime.spec import AttentionSpec

TRANSPOSED_KEYS = 128  # of a CTA of the transposition; its results' rows are a multiple of this
COMBINE_WARPS = 8  # per block
PARTS_IN_FLIGHT = 4  # parts that a warp of combine loads before it adds the first one, and before weights are known
JOIN_VECTOR = 8  # columns per lane: 16 bytes of 16-bit values


@dataclass(frozen=True, slots=True)
class TransposeConfig:
    """Compile-time configuration. columns: a multiple of 16."""

    columns: int
    has_seqused_k: bool


TRANSPOSE = ProgramRef[TransposeConfig]("fwd.transpose", "fa4.fwd.kernels.transpose")
"""Its launcher takes (v, result, seqused_k or None)."""


@dataclass(frozen=True, slots=True)
class CombineConfig(Constant):
    """Compile-time configuration. warps: per row, a power of two up to `COMBINE_WARPS`. pdl: use programmatic dependent
    launch (sm_90 and later)."""

    dtype: torch.dtype
    head_dim_v: int
    has_sink: bool
    warps: int
    pdl: bool


COMBINE = ProgramRef[CombineConfig]("combine", "fa4.fwd.kernels.combine")


def combine_warps(splits: int) -> int:
    """Return the warps of a row that combine this number of parts."""
    return min(1 << (-(-splits // PARTS_IN_FLIGHT) - 1).bit_length(), COMBINE_WARPS)


def combine_config(spec: AttentionSpec, splits: int, chip: Chip) -> CombineConfig:
    return CombineConfig(spec.dtype, spec.head_dim_v, spec.has_sink, combine_warps(splits), chip.number >= 90)


def combine_launcher(spec: AttentionSpec, splits: int, chip: Chip) -> jit.Launcher:
    """Return the launcher; its argument is a `kernels.combine.Parts` with a float32 sink."""
    return COMBINE.launcher(combine_config(spec, splits, chip), chip)


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """dtype: of the tensor `more`, 16 bits. out: dtype of the result, the same or float32."""

    dtype: torch.dtype
    out: torch.dtype
    head_dim_v: int

    @property
    def lanes(self) -> int:
        """Lanes per row, a power of two: all of them read the lse of the row before one lane writes it."""
        return 1 << (self.head_dim_v // JOIN_VECTOR - 1).bit_length()


JOIN = ProgramRef[JoinConfig]("join_states", "fa4.fwd.kernels.join")
"""Its launcher takes a `kernels.join.JoinTensors`."""


def can_join(more: torch.Tensor) -> bool:
    """True if the kernel supports these outputs: 16-bit, not empty, and rows of whole 16-byte vectors."""
    head_dim_v = more.shape[-1]
    fits = head_dim_v % JOIN_VECTOR == 0 and head_dim_v <= 32 * JOIN_VECTOR
    return fits and more.dtype in (torch.float16, torch.bfloat16) and more.numel() > 0


@dataclass(frozen=True, slots=True)
class AppendConfig:
    """Compile-time configuration; fields as in `kvcache.record.AppendArguments`, and two more. rotary: dtype of cos and
    sin, or None. converted_dtype: dtype of a cache whose numbers are converted (one of
    `spec.CONVERTED`), passed as uint8; None if the cache
    has the dtype of k and v."""

    dtype: torch.dtype
    rotary: torch.dtype | None
    varlen_q: bool
    varlen_k: bool
    page_size: int | None
    has_batch_idx: bool
    has_rotary_seqlens: bool
    interleaved: bool
    same_position: bool
    converted_dtype: torch.dtype | None

    @property
    def converts_kv(self) -> bool:
        return self.converted_dtype is not None

    @property
    def has_scaled_rows(self) -> bool:
        return self.converted_dtype is scaled_rows.DTYPE

    @property
    def is_nvfp4(self) -> bool:
        return self.converted_dtype is nvfp4.DTYPE


APPEND = ProgramRef[AppendConfig]("append", "fa4.fwd.kernels.append")
"""Its launcher takes a `kernels.append.AppendTensors`."""


@dataclass(frozen=True, slots=True)
class SelectConfig:
    """granularity, causal: of a `sparse.selection.Rule`. per_head: rows are of k with its heads flattened into rows."""

    granularity: int
    causal: bool
    has_window: bool
    has_counts: bool
    packed_q: bool
    packed_k: bool
    has_used: bool
    page_size: int | None
    per_head: bool


SELECT = ProgramRef[SelectConfig]("select_rows", "fa4.fwd.kernels.select")
"""Its launcher takes a `kernels.select.SelectTensors` and a `kernels.select.SelectNumbers`."""
