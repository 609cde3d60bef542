"""The forward of a plan: arguments of its kernel, and the launch."""

from __future__ import annotations

import copy
import ctypes
import functools
from typing import Any, Generic, NamedTuple, Self

import torch
from torch import Tensor

from ..core.program import ProgramRef
from ..core.softmax import LOG2_E
from ..core.variant import windows
from ..mods.ir.record import Mods
from ..mods.ir.tensors import kernel_mods
from ..runtime import jit
from ..runtime.choice import Choice
from ..runtime.counters import tile_counter
from ..runtime.device import Chip
from ..runtime.dsl import cutlass
from ..runtime.spec import AttentionInputs, AttentionSpec, Cache, ProblemSize
from .variant import Config, padded_heads_of


class Scalars(NamedTuple):
    """Scalar arguments of the kernel. scale_log2: softmax_scale * log2(e); with a softcap, softcap * log2(e); with a
    score_mod, which returns logits, log2(e). to_natural: factor from a logit scaled by the rounded scale_log2 to
    natural units; it cancels the rounding. scale_over_cap: softmax_scale / softcap; with a score_mod, softmax_scale.
    left, right: see `core.mask.Band`."""

    scale_log2: cutlass.Float32
    to_natural: cutlass.Float32
    scale_over_cap: cutlass.Float32
    left: cutlass.Int32
    right: cutlass.Int32

    @staticmethod
    def of(spec: AttentionSpec) -> Scalars:
        cap = 1.0 if spec.mods is not None and spec.mods.score is not None else spec.softcap
        scale = cap or spec.softmax_scale
        scale_log2 = ctypes.c_float(scale * LOG2_E).value
        over_cap = spec.softmax_scale / cap if cap else 0.0
        return Scalars(scale_log2, scale / scale_log2, over_cap, *windows(spec))


class LaunchSizes(NamedTuple):
    """Integer arguments of the launch. l2_group: (head, sequence) pairs of an L2 swizzle group, see `core.order`.
    splits: parts per work tile (split-KV). ctas: resident CTAs of the chip, the size of a persistent grid. part_blocks:
    key blocks of a part, if `fixed_parts`. most_l2_groups: number of groups, if the last one gets all remaining pairs,
    perhaps more than `l2_group`; see `ForwardVariant.merges_l2_groups`."""

    max_seqlen_q: cutlass.Int32
    batch: cutlass.Int32
    l2_group: cutlass.Int32
    splits: cutlass.Int32
    ctas: cutlass.Int32
    part_blocks: cutlass.Int32 = 0
    most_l2_groups: cutlass.Int32 = 1 << 30


def work_tiles(spec: AttentionSpec, extent: ProblemSize, packed: int, rows: int) -> int:
    """Return the number of work tiles of `rows` rows, with `packed` heads in a tile, before keys are split."""
    return -(-extent.max_seqlen_q * padded_heads_of(packed) // rows) * (spec.heads_q // packed) * extent.batch


class ForwardDirection(Generic[Config]):
    """The forward of one kind of problem on one chip. A subclass per chip sets `kernel` and `splits` (split-KV
    parts) and passes the configuration, the scalars and the sizes."""

    kernel: ProgramRef[Config]
    splits = 1
    choice: Choice[Any] | None = None  # of tiles; None if there is one row

    def __init__(self, chip: Chip, cfg: Config, scalars: tuple, sizes: tuple) -> None:
        self.chip, self.cfg, self.scalars, self.sizes = chip, cfg, scalars, sizes
        self._has_8bit_q, self._has_bytes = cfg.operands is not None, cfg.has_bytes
        self._has_block_scales = cfg.has_block_scales
        self._is_nvfp4, self._has_counter = cfg.is_nvfp4, cfg.has_counter
        self._has_cache_tensors = (
            cfg.has_factors or cfg.has_block_scales or (cfg.cache is not None and cfg.cache.has_tensors)
        )
        self._varlen, self._fixed_sizes = cfg.varlen, tuple(sizes[2:])
        self._fixed_arguments = jit.fixed(scalars), jit.fixed(sizes)

    def arranged(self, cache: Cache, inputs: AttentionInputs) -> Cache:
        """Return the cache with scales of blocks in the layout that the kernel loads."""
        raise NotImplementedError

    def launch(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, mods: Mods | None = None, cache: Cache | None = None
    ) -> None:
        if self._has_bytes:
            inputs = inputs._replace(k=inputs.k.view(torch.uint8), v=inputs.v.view(torch.uint8))
            if self._is_nvfp4 and cache is not None:
                scales = (cache.k_descale, cache.v_descale)
                cache = Cache(*cache[:3], *(None if x is None else x.view(torch.uint8) for x in scales))
        if self._has_8bit_q:
            inputs = inputs._replace(q=inputs.q.view(torch.uint8))
            if self._has_block_scales and cache is not None:
                cache = self.arranged(cache, inputs)
        mod_tensors = None if mods is None else kernel_mods(mods, inputs.q.shape[-2])
        cache_tensors = tuple(cache) if self._has_cache_tensors and cache is not None else None
        scalars, sizes = self._fixed_arguments
        if self._varlen:  # one plan serves many lengths
            sizes = (inputs.max_seqlen_q, inputs.cu_seqlens_q.shape[0] - 1, *self._fixed_sizes)
        counter = tile_counter(inputs[0], self.chip) if self._has_counter else None
        self._launcher(inputs[:8], out, lse, scalars, sizes, mod_tensors, cache_tensors, counter)

    def for_extent(self, extent: ProblemSize) -> Self:
        """Return the same kernel for another size of the same spec; tuned values, such as L2 groups, stay."""
        other = copy.copy(self)
        other.sizes = LaunchSizes(extent.max_seqlen_q, extent.batch, *self._fixed_sizes)
        other._fixed_arguments = self._fixed_arguments[0], jit.fixed(other.sizes)
        return other

    def request(self) -> jit.Request:
        """Return what its first launch compiles."""
        return self.kernel.request(self.cfg, self.chip)

    def compile(self) -> None:
        """Compile the kernel before its first launch."""
        assert self._launcher is not None

    @functools.cached_property
    def _launcher(self) -> jit.Launcher:
        return self.kernel.launcher(self.cfg, self.chip)
