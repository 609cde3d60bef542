"""Gradients of captured tensors, host side: buffers for the kernels (`device.captured_grads`), and their reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.rows import row_blocks
from ..mods.ir.graph import Graph, Scatter, parse
from ..mods.ir.record import Mods
from ..mods.ir.tensors import add_where, evaluation
from ..runtime.spec import AttentionInputs
from .variant import BackwardOptions


def targets(
    inputs: AttentionInputs, mods: Mods | None, gradients: Sequence[Tensor | None], cfg: BackwardOptions
) -> tuple | None:
    """Return the buffer that the kernel adds to, for each scatter of the score graph; None if no gradient is needed. A
    scatter indexed by b and h only gets sums per thread, (heads_q, blocks, threads); others use the gradient itself."""
    if mods is None or not mods.trained:
        return None
    rows_k = inputs.k.shape[0] if inputs.varlen else inputs.k.shape[1]
    blocks = row_blocks(rows_k, inputs.batch, cfg.cta_tile_n, 1, inputs.varlen)
    graph, bufs = parse(mods.score), list[Tensor]()
    for scatter in graph.scatters:
        if graph.is_per_head(scatter):
            shape = inputs.q.shape[-2], blocks, cfg.score_threads
            bufs.append(torch.zeros(shape, dtype=torch.float32, device=inputs.q.device))
            continue
        gradient = gradients[scatter.tensor]
        assert gradient is not None
        bufs.append(gradient)
    return tuple(bufs)


def finish(inputs: AttentionInputs, mods: Mods | None, gradients: Sequence[Tensor | None], bufs: tuple | None) -> None:
    """Reduce the per-thread buffers of per-head scatters and add them to the gradients."""
    if mods is None or bufs is None:
        return
    graph = parse(mods.score)
    for scatter, sums in zip(graph.scatters, bufs):
        gradient = gradients[scatter.tensor]
        if gradient is not None and graph.is_per_head(scatter):
            sequences = 1 if inputs.varlen else inputs.batch
            by_head = sums.view(sums.shape[0], sequences, -1).sum(dim=2).transpose(0, 1)
            _add_by_head(graph, scatter, mods, gradient, by_head)


def _add_by_head(graph: Graph, scatter: Scatter, mods: Mods, gradient: Tensor, sums: Tensor) -> None:
    """sums: (sequences, heads_q)."""
    b, h = (torch.arange(extent, device=sums.device) for extent in sums.shape)
    inputs = {"b": b[:, None], "h": h, "q_idx": h.new_zeros(())}  # the indices do not depend on positions
    evaluated = evaluation(graph, *mods.score_values(), inputs, torch.float32)
    add_where(gradient, [evaluated.value(i) for i in scatter.indices], sums)
