"""Launch of a backward on any chip: statistics kernel, main kernel of the chip, finish kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr

from ..core.arguments import ALIGNMENT, Inputs, fake_matrices, fake_numbers, fake_rows
from ..core.program import Program
from ..core.sequence import as_matrices
from ..core.traced import ModTensors
from ..runtime import jit
from ..runtime.spec import BlockScales, GradientOperands, Gradients, ProblemSize, Saved
from .kernels.finish import launch_finish
from .kernels.statistics import launch_statistics
from .plan import Scalars
from .row_tensors import RowTensors
from .variant import BackwardOptions
from .workspace import Workspace


class BackwardArguments(NamedTuple):
    """Arguments of a main kernel, as matrices with the modes of `core.sequence.as_matrices`. q and dout, which
    products read, have the packed heads of `rows`. `rows` holds the workspaces and the lengths."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    rows: RowTensors
    scalars: Scalars
    sizes: ProblemSize
    scales: BlockScales | None
    mods: ModTensors | None


Config = TypeVar("Config", bound=BackwardOptions)


class BackwardProgram(Program[Config]):
    """Base class; `begin` of a subclass starts the main kernel."""

    __slots__ = ()

    @cute.jit
    def launch(
        self,
        inputs: Inputs,
        saved: Saved,
        grads: Gradients,
        workspace: Workspace,
        scalars: Scalars,
        sizes: ProblemSize,
        mods: ModTensors | None,
        operands: GradientOperands | None,
        cfg: cutlass.Constexpr,
        stream,
    ):
        """Start the statistics kernel, the main kernel and, if dQ sums are left, the finish kernel.

        Args:
            saved: out, dout like q with the columns of v; lse, dlse (batch, heads, rows), or varlen (heads, rows),
                float32.
            grads: dq, dk, dv like q, k, v.
            workspace: for `cfg.row_blocks`; the kernels write the terms of dsink to its dsink.
        """
        blocks = cfg.row_blocks
        q = as_matrices(inputs.q, blocks.packed)
        k, v, dk, dv = (as_matrices(x) for x in (inputs.k, inputs.v, grads.dk, grads.dv))
        filled = ModTensors.of(mods)
        dout, factors, scales = (saved.dout, None, None) if const_expr(operands is None) else operands
        rows = RowTensors.of(inputs, saved, grads.dq, workspace, scalars.scale, sizes, filled, factors, blocks)
        rows = replace(rows, statistics=blocks.permute_statistics(rows.statistics))
        launch_statistics(rows, blocks, stream)
        dout = as_matrices(dout, blocks.packed)
        call = BackwardArguments(q, k, v, dout, dk, dv, rows, scalars, sizes, scales, filled)
        self.begin(call, cfg, stream)
        if const_expr(blocks.placement is not None and blocks.finishes):
            launch_finish(rows, blocks, stream)
        self.end(call, cfg, stream)

    def begin(self, call: BackwardArguments, cfg: Config, stream: Any) -> None:
        """Start the main kernel, from inside a `cute.jit` host function."""
        raise NotImplementedError

    def end(self, call: BackwardArguments, cfg: Config, stream: Any) -> None:
        """Start kernels after the others, from inside a `cute.jit` host function."""

    def fake_args(self, cfg: Config) -> tuple:
        out, dout, *grads = fake_matrices(cfg, 5)
        saved = Saved(out, fake_rows(cfg), dout, fake_rows(cfg, cfg.has_dlse))
        workspace, numbers = Workspace.fake(cfg.row_blocks), (fake_numbers(Scalars), ProblemSize(*[Int32(0)] * 3))
        mods = ModTensors.fake(cfg.mods, backward=True, is_ordered=cfg.reads_query_lists)
        operands = None
        if cfg.operands is not None:
            factors = jit.fake_tensor(Float32, 3, align=4, contiguous=True)
            scales = None
            if cfg.has_block_scales:
                scales = BlockScales(*(jit.fake_tensor(Uint8, 4, contiguous=True) for _ in BlockScales._fields))
            dout8 = jit.fake_tensor(Uint8, 3 if cfg.varlen else 4, align=ALIGNMENT)
            operands = GradientOperands(dout8, factors, scales)
        return Inputs.fake(cfg), saved, Gradients(*grads), workspace, *numbers, mods, operands
