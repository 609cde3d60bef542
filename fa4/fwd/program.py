"""Launch of a forward kernel on any chip: convert the arguments to the matrices that kernels use."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute

from ..core.arguments import Inputs, fake_numbers, fake_results
from ..core.cache import CacheTensors
from ..core.program import Program
from ..core.sequence import Lengths, align_strides, as_columns, as_matrices, in_parts
from ..core.traced import ModTensors
from ..runtime import jit
from . import plan
from .variant import Config


class ForwardArguments(NamedTuple):
    """Arguments of a launch, as matrices with the modes of `core.sequence.as_matrices`. q, out and lse have
    `cfg.packed_heads` heads in their rows, and with split-KV out and lse have a last mode of parts."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    sink: cute.Tensor | None
    lengths: Lengths
    scalars: Any
    sizes: plan.LaunchSizes
    mods: ModTensors | None
    cache: CacheTensors | None
    counter: cute.Tensor | None


class ForwardProgram(Program[Config]):
    """Base class; `begin` of a subclass starts the kernel. scalars: type of the record of scalars that the plan
    passes."""

    __slots__ = ()

    scalars: ClassVar[type[tuple]] = plan.Scalars

    @cute.jit
    def launch(
        self,
        inputs: Inputs,
        out: cute.Tensor,
        lse: cute.Tensor,
        scalars: tuple,
        sizes: plan.LaunchSizes,
        mods: ModTensors | None,
        cache: CacheTensors | None,
        counter: cute.Tensor | None,
        cfg: cutlass.Constexpr,
        stream,
    ):
        """Start the kernel.

        Args:
            out: like q, with the columns of v; with split-KV float32 with a leading axis of parts.
            lse: (batch, heads, rows), or varlen (heads, rows), float32; parts as in out.
            counter: see `fa4.runtime.counters`; None unless `cfg.has_counter`.
        """
        q, k, v = as_matrices(inputs.q, cfg.packed_heads), as_matrices(inputs.k), as_matrices(inputs.v)
        out = in_parts(align_strides(out), as_matrices, cfg.packed_heads, cfg.split)
        lse = in_parts(lse, as_columns, cfg.packed_heads, cfg.split)
        mods = ModTensors.of(mods)
        call = ForwardArguments(q, k, v, out, lse, inputs.sink, inputs.lengths, scalars, sizes, mods, cache, counter)
        self.begin(call, cfg, stream)

    def begin(self, call: ForwardArguments, cfg: Config, stream: Any) -> None:
        """Start the kernel, from inside a `cute.jit` host function."""
        raise NotImplementedError

    def fake_args(self, cfg: Config) -> tuple:
        out, lse = fake_results(cfg, cfg.split)
        numbers = fake_numbers(self.scalars), fake_numbers(plan.LaunchSizes)
        counter = jit.fake_tensor(cutlass.Int32, 1, align=4) if cfg.has_counter else None
        return Inputs.fake(cfg), out, lse, *numbers, ModTensors.fake(cfg.mods), CacheTensors.fake(cfg), counter
