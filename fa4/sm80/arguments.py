"""Run-time arguments of the portable kernels."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.cache import CacheTensors
from ..core.order import Order, PackedOrder
from ..core.sequence import Lengths
from ..core.traced import ModTensors


@dataclass(frozen=True)
class Sm80ForwardArguments:
    """Run-time arguments of the kernel. Matrices have the modes of `core.sequence.as_matrices`; q, out and lse have
    packed heads; with split-KV, out and lse have a last mode of parts."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    sink: cute.Tensor | None
    lengths: Lengths
    order: Order | PackedOrder
    splits: Int32
    part_blocks: Int32 | None
    left: Int32 | None
    right: Int32 | None
    scale_over_cap: Float32 | None  # softmax_scale / softcap
    scale: Float32  # factor from scores (or the output of the softcap) to logits
    mods: ModTensors | None
    cache: CacheTensors | None


@dataclass(frozen=True)
class Sm80BackwardArguments:
    """Run-time arguments of the main kernel. Matrices have the modes of `core.sequence.as_matrices`, q and dout with
    packed heads. Workspaces have the modes of `bwd.blocks.RowTensors`."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    statistics: cute.Tensor
    dq_sum: cute.Tensor
    semaphores: cute.Tensor | None
    ranks: cute.Tensor | None
    lengths: Lengths
    order: Order | PackedOrder
    left: Int32 | None
    right: Int32 | None
    scale_over_cap: Float32 | None  # softmax_scale / softcap
    softmax_scale: Float32
    scale_log2: Float32  # scale of the output of the softcap, in log2 units
    mods: ModTensors | None
