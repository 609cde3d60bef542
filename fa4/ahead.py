"""Kernels compiled ahead of time, for a chip that need not be here, into a directory for FA4_CACHE_DIR."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import jit, mod_ops, ops  # noqa: F401  mod_ops: its operators
from .device import chip_by_number, emulating
from .mods.record import Mods, ModSpec
from .spec import AttentionInputs, AttentionSpec, Extent, Flags, Saved


class Problem(NamedTuple):
    """What a model asked of a chip."""

    chip: int  # 10 * major + minor of the compute capability
    spec: AttentionSpec
    extent: Extent
    backend: str = "auto"


def recorded(file: Path) -> Iterator[Problem]:
    """The problems that FA4_RECORD wrote to a file, each once.

    Raises:
        ValueError: a line is not one of its lines.
    """
    lines = dict.fromkeys(file.read_text().splitlines())
    for number, line in enumerate(lines, start=1):
        try:
            given = json.loads(line)
            of_spec = given["spec"] | {"dtype": getattr(torch, given["spec"]["dtype"])}
            if "mods" in of_spec:
                of_spec["mods"] = ModSpec.of_plain(of_spec["mods"])
            spec = AttentionSpec(**of_spec)
            yield Problem(given["chip"], spec, Extent(*given["extent"]), given["backend"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}, line {number} is no problem that FA4_RECORD wrote: {error}") from error


def compile_into(directory: Path, problem: Problem) -> dict[tuple, float]:
    """Compile the kernels of a problem, forward and, if it needs one, backward (of out alone, without a gradient of the
    lse); seconds by (target, key).

    The directory is one for FA4_CACHE_DIR: entries lie below, by toolchain and source text.

    Raises:
        NoBackend: no backend serves the problem on the chip.
        ValueError: the chip is not known.
    """
    chip = chip_by_number(problem.chip)
    below = directory / jit.fingerprint()
    below.mkdir(mode=0o700, parents=True, exist_ok=True)
    with emulating(chip), jit.compile_only(below) as compiled, torch.no_grad():
        inputs, flags = _inputs(problem)
        mods = None if problem.spec.mods is None else _mods(problem.spec.mods, problem)
        out, lse = ops.route(inputs, flags, mods).forward(inputs, mods)
        if flags.needs_backward:
            saved = Saved(out, lse, out)
            if mods is None:
                torch.ops.fa4.backward(*saved, *inputs, *flags)
            else:
                torch.ops.fa4.backward_with_mods(*saved, *inputs, *mods, *flags)
    return compiled.seconds


def _mods(spec: ModSpec, problem: Problem) -> Mods:
    """What fills a call's functions and lists of blocks, with numbers that nobody reads."""
    graphs = [graph for graph in (spec.score, spec.mask) if graph is not None]
    types = [tensor for graph in graphs for tensor in graph.tensors]
    tensors = [torch.empty((1,) * tensor.rank, dtype=getattr(torch, tensor.dtype)) for tensor in types]
    blocks: list[Tensor] = []
    block_q, block_k = spec.block or (0, 0)
    if spec.block is not None:
        heads = problem.spec.heads_q if spec.heads_differ else 1
        rows, keys = -(-problem.extent.max_seqlen_q // block_q), -(-problem.extent.max_seqlen_k // block_k)
        for along, across in ((rows, keys), (rows, keys), (keys, rows), (keys, rows)):
            blocks += [torch.empty(1, heads, *shape, dtype=torch.int32) for shape in ((along,), (along, across))]
        blocks += [torch.empty(1, heads, along, dtype=torch.int32) for along in (rows, keys)]
    return Mods(
        tensors,
        blocks,
        "" if spec.score is None else spec.score.text,
        "" if spec.mask is None else spec.mask.text,
        [0.0] * sum(len(graph.numbers) for graph in graphs),
        block_q,
        block_k,
        list(spec.trained),
        0.5 if spec.dropout else 0.0,
        torch.empty(2, dtype=torch.int64) if spec.dropout else None,
    )


def _inputs(problem: Problem) -> tuple[AttentionInputs, Flags]:
    """A call of the problem's shape, with tensors that nobody reads."""
    spec, (batch, rows_q, rows_k) = problem.spec, problem.extent
    lead_q, lead_k = ((batch * rows_q,), (batch * rows_k,)) if spec.varlen else ((batch, rows_q), (batch, rows_k))
    whole = torch.full((batch,), rows_q, dtype=torch.int32), torch.full((batch,), rows_k, dtype=torch.int32)
    bounds = [torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in whole]
    inputs = AttentionInputs(
        q=torch.empty(*lead_q, spec.heads_q, spec.head_dim, dtype=spec.dtype),
        k=torch.empty(*lead_k, spec.heads_kv, spec.head_dim, dtype=spec.dtype),
        v=torch.empty(*lead_k, spec.heads_kv, spec.head_dim_v, dtype=spec.dtype),
        sink=torch.zeros(spec.heads_q) if spec.has_sink else None,
        cu_seqlens_q=bounds[0] if spec.varlen else None,
        cu_seqlens_k=bounds[1] if spec.varlen else None,
        seqused_q=whole[0] if spec.has_seqused_q else None,
        seqused_k=whole[1] if spec.has_seqused_k else None,
        max_seqlen_q=rows_q,
        max_seqlen_k=rows_k,
    )
    named = {name: getattr(spec, name) for name in Flags._fields if hasattr(spec, name)}
    return inputs, Flags(**named | {"backend": problem.backend})
