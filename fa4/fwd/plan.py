"""The forward of a plan: what its kernels are called with, and their launch."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from cutlass import Float32, Int32
from torch import Tensor

from .. import jit
from ..core.arguments import windows
from ..core.program import Program
from ..core.softmax import LOG2_E
from ..device import Chip
from ..mods.record import Mods
from ..mods.tensors import filled
from ..spec import AttentionInputs, AttentionSpec, Cache


class Scalars(NamedTuple):
    """scale_log2: softmax_scale * log2(e); with a softcap, softcap * log2(e); with a score_mod, which gives logits,
    log2(e). to_natural: turns a logit that was scaled by scale_log2 into natural units, undoing its rounding.
    scale_over_cap: softmax_scale / softcap; with a score_mod softmax_scale. left, right: see `core.mask.Window`."""

    scale_log2: Float32
    to_natural: Float32
    scale_over_cap: Float32
    left: Int32
    right: Int32

    @staticmethod
    def of(spec: AttentionSpec) -> Scalars:
        cap = 1.0 if spec.mods is not None and spec.mods.score is not None else spec.softcap
        scale = cap or spec.softmax_scale
        scale_log2 = ctypes.c_float(scale * LOG2_E).value
        over_cap = spec.softmax_scale / cap if cap else 0.0
        return Scalars(scale_log2, scale / scale_log2, over_cap, *windows(spec))


class LaunchSizes(NamedTuple):
    """section: pairs of head and sequence that advance together, see `core.order`. splits: parts that the keys of a
    tile are cut into. ctas: as many as the chip runs at a time, the size of a persistent grid. part_blocks: key blocks
    of a part, where parts are fixed. most_l2_groups: of a grid that goes to and fro; the last one has the pairs that are
    left, which may be more than `l2_group`."""

    max_seqlen_q: Int32
    batch: Int32
    l2_group: Int32
    splits: Int32
    ctas: Int32
    part_blocks: Int32 = 0
    most_l2_groups: Int32 = 1 << 30


class Forward:
    """One kind of problem on a chip. A chip's class has a `kernel` and knows its configuration, its numbers, and how
    many parts it `splits` keys into."""

    kernel: Program
    splits = 1

    def __init__(self, chip: Chip, cfg: Any, scalars: tuple, sizes: tuple) -> None:
        self.chip, self.cfg, self.scalars, self.sizes = chip, cfg, scalars, sizes
        self._has_bytes, self._looks_up = cfg.has_bytes, cfg.cache is not None and cfg.cache.has_tensors
        self._varlen, self._others = cfg.varlen, tuple(sizes[2:])
        self._numbers = jit.fixed(scalars), jit.fixed(sizes)

    def launch(
        self,
        inputs: AttentionInputs,
        out: Tensor,
        lse: Tensor,
        mods: Mods | None = None,
        cache: Cache | None = None,
    ) -> None:
        if self._has_bytes:
            inputs = inputs._replace(k=inputs.k.view(torch.uint8), v=inputs.v.view(torch.uint8))
        given = None if mods is None else filled(mods, inputs.q.shape[-2])
        place = tuple(cache) if self._looks_up and cache is not None else None
        scalars, sizes = self._numbers
        if self._varlen:  # one plan serves many sizes
            sizes = (inputs.max_seqlen_q, inputs.cu_seqlens_q.shape[0] - 1, *self._others)
        self._launcher(inputs[:8], out, lse, scalars, sizes, given, place)

    def compile(self) -> None:
        """Compile the kernel now, not at the first launch."""
        assert self._launcher is not None

    @functools.cached_property
    def _launcher(self) -> jit.Launcher:
        return self.kernel.launcher(self.cfg, self.chip)
