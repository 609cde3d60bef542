"""The launch of a forward, whatever the chip: what comes in, as the matrices that kernels see."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute

from ..core.arguments import Inputs, fake_numbers, fake_results
from ..core.cache import CacheTensors
from ..core.program import Program
from ..core.sequence import Lengths, align_strides, as_columns, as_matrices, in_parts
from ..core.traced import ModTensors
from . import plan


class Call(NamedTuple):
    """What a launch gets. Matrices have the modes of `core.sequence.as_matrices`, those of q, out and lse with
    `cfg.packed` heads, those of out and lse with a last mode of parts if keys are split."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    sink: cute.Tensor | None
    lengths: Lengths
    scalars: Any
    sizes: Any
    mods: ModTensors | None
    cache: CacheTensors | None


class ForwardProgram(Program):
    """`begin` of a subclass starts the kernel. Configurations are a `Variant` with `packed` heads and whether keys are
    `split`. scalars, sizes: records of numbers that the plan gives."""

    __slots__ = ()

    scalars: ClassVar[type[tuple]] = plan.Scalars
    sizes: ClassVar[type[tuple]] = plan.LaunchSizes

    @cute.jit
    def launch(
        self,
        inputs: Inputs,
        out: cute.Tensor,
        lse: cute.Tensor,
        scalars: tuple,
        sizes: tuple,
        mods: ModTensors | None,
        cache: CacheTensors | None,
        cfg: cutlass.Constexpr,
        stream,
    ):
        """Start the kernel.

        Args:
            out: like q, with the columns of v; of split keys with an axis of parts in front, and float32.
            lse: (batch, heads, rows), or varlen (heads, rows), float32; parts as in out.
        """
        q, k, v = as_matrices(inputs.q, cfg.packed), as_matrices(inputs.k), as_matrices(inputs.v)
        out = in_parts(align_strides(out), as_matrices, cfg.packed, cfg.split)
        lse = in_parts(lse, as_columns, cfg.packed, cfg.split)
        mods = ModTensors.of(mods)
        self.begin(Call(q, k, v, out, lse, inputs.sink, inputs.lengths, scalars, sizes, mods, cache), cfg, stream)

    def begin(self, call: Call, cfg: Any, stream: Any) -> None:
        """Inside a `cute.jit` host function: start the kernel."""
        raise NotImplementedError

    def stand_ins(self, cfg: Any) -> tuple:
        out, lse = fake_results(cfg)
        numbers = fake_numbers(self.scalars), fake_numbers(self.sizes)
        return Inputs.fake(cfg), out, lse, *numbers, ModTensors.fake(cfg.mods), CacheTensors.fake(cfg.cache)
