"""Gradients of captured tensors on the host: what kernels add to (`core.captured`), and what is done with it after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.rows import row_blocks
from ..mods.graph import Graph, Scatter, parse
from ..mods.record import Mods
from ..mods.tensors import add_where, evaluation
from ..spec import AttentionInputs


def targets(inputs: AttentionInputs, mods: Mods | None, gradients: Sequence[Tensor | None], cfg: Any) -> tuple | None:
    """For each scatter of the score's graph what the kernel adds to; None if nothing asks for gradients."""
    if mods is None or not mods.trained:
        return None
    rows_k = inputs.k.shape[0] if inputs.varlen else inputs.k.shape[1]
    blocks = row_blocks(rows_k, inputs.batch, cfg.cta_tile_n, 1, inputs.varlen)
    graph, made = parse(mods.score), list[Tensor]()
    for scatter in graph.scatters:
        if graph.is_of_heads(scatter):
            shape = inputs.q.shape[-2], blocks, cfg.score_threads
            made.append(torch.zeros(shape, dtype=torch.float32, device=inputs.q.device))
            continue
        gradient = gradients[scatter.tensor]
        assert gradient is not None
        made.append(gradient)
    return tuple(made)


def finish(inputs: AttentionInputs, mods: Mods | None, gradients: Sequence[Tensor | None], made: tuple | None) -> None:
    """Add what threads have, of scatters that are of heads, to the gradients."""
    if mods is None or made is None:
        return
    graph = parse(mods.score)
    for scatter, sums in zip(graph.scatters, made):
        gradient = gradients[scatter.tensor]
        if gradient is not None and graph.is_of_heads(scatter):
            sequences = 1 if inputs.varlen else inputs.batch
            by_head = sums.view(sums.shape[0], sequences, -1).sum(dim=2).transpose(0, 1)
            _add_by_head(graph, scatter, mods, gradient, by_head)


def _add_by_head(graph: Graph, scatter: Scatter, mods: Mods, gradient: Tensor, sums: Tensor) -> None:
    """sums: (sequences, heads_q)."""
    b, h = (torch.arange(extent, device=sums.device) for extent in sums.shape)
    inputs = {"b": b[:, None], "h": h, "q_idx": h.new_zeros(())}  # a place in a sequence has no part in the indices
    done = evaluation(graph, *mods.of_score(), inputs, torch.float32)
    add_where(gradient, [done.value(i) for i in scatter.indices], sums)
