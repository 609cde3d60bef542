"""Kernels compiled ahead of time, for a chip that need not be here, into a directory for FA4_CACHE_DIR."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import disk, jit, mod_ops, ops, run  # noqa: F401  mod_ops: its operators
from .device import chip_by_number, chip_of, emulating
from .kvcache import ops as of_caches
from .mods.record import Mods, ModSpec
from .spec import AttentionInputs, AttentionSpec, Cache, CacheSpec, Flags, ProblemSize, Saved


class Problem(NamedTuple):
    """What a model asked of a chip."""

    chip: int  # 10 * major + minor of the compute capability
    spec: AttentionSpec
    extent: ProblemSize
    backend: str = "auto"
    sms: int | None = None  # multiprocessors; None for as many as `fa4.chips` has of the chip


class Appending(NamedTuple):
    """What a model asked of a chip to put new rows into a cache; config: the fields of a `fwd.append.Config`."""

    chip: int
    config: dict[str, Any]
    sms: int | None = None


def recorded(file: Path) -> Iterator[Problem | Appending]:
    """The problems that FA4_RECORD wrote to a file, each once.

    Raises:
        ValueError: a line is not one of its lines.
    """
    lines = dict.fromkeys(file.read_text().splitlines())
    for number, line in enumerate(lines, start=1):
        try:
            given = json.loads(line)
            if "append" in given:
                yield Appending(given["chip"], _with_dtypes(given["append"]), given["sms"])
                continue
            of_spec = _with_dtypes(given["spec"])
            if "mods" in of_spec:
                of_spec["mods"] = ModSpec.of_plain(of_spec["mods"])
            if "cache" in of_spec:
                of_spec["cache"] = CacheSpec(**_with_dtypes(of_spec["cache"]))
            spec = AttentionSpec(**of_spec)
            yield Problem(given["chip"], spec, ProblemSize(*given["extent"]), given["backend"], given.get("sms"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}, line {number} is no problem that FA4_RECORD wrote: {error}") from error


def _with_dtypes(given: dict[str, Any]) -> dict[str, Any]:
    """The same with dtypes in place of their names."""
    names = ("dtype", "rotary", "bytes_dtype")
    return given | {name: getattr(torch, given[name]) for name in names if given.get(name) is not None}


def compile_into(directory: Path, problem: Problem | Appending) -> dict[tuple, float]:
    """Compile the kernels of a problem, forward and, if it needs one, backward (of out alone, without a gradient of the
    lse); seconds by (target, key).

    The directory is one for FA4_CACHE_DIR: entries lie below, by toolchain and source text.

    Raises:
        NoBackend: no backend serves the problem on the chip.
        ValueError: the chip is not known.
    """
    chip = chip_by_number(problem.chip, sms=problem.sms)
    below = directory / jit.fingerprint()
    below.mkdir(mode=0o700, parents=True, exist_ok=True)
    disk.keep(directory)
    with emulating(chip), jit.compile_only(below) as compiled, torch.no_grad():
        if isinstance(problem, Appending):
            _ask_for_append(problem)
        else:
            _ask_for_attention(problem)
    return compiled.seconds


def _ask_for_append(problem: Appending) -> None:
    from .fwd.append import Config, launcher  # needs CuTe DSL

    missing = {field.name: None for field in dataclasses.fields(Config)}
    launcher(Config(**missing | problem.config), chip_of(torch.device("cpu")))


def _ask_for_attention(problem: Problem) -> None:
    inputs, flags = _inputs(problem)
    mods = None if problem.spec.mods is None else _mods(problem.spec.mods, problem)
    if problem.spec.cache is not None:
        inputs, cache = _on_a_cache(inputs, problem)
        run.forward(inputs, *of_caches.route(inputs, cache, mods, flags), mods, cache)
        return
    out, lse = ops.route(inputs, flags, mods).forward(inputs, mods)
    if flags.needs_backward:
        saved = Saved(out, lse, out)
        if mods is None:
            torch.ops.fa4.backward(*saved, *inputs, *flags)
        else:
            torch.ops.fa4.backward_with_mods(*saved, *inputs, *mods, *flags)


def _on_a_cache(inputs: AttentionInputs, problem: Problem) -> tuple[AttentionInputs, Cache]:
    """The same call where keys and values lie in a cache of such a kind, with room for the longest sequence."""
    spec, (batch, _, rows) = problem.spec, problem.extent
    kind = spec.cache
    assert kind is not None
    shape = (batch, rows) if kind.page_size is None else (batch * -(-rows // kind.page_size), kind.page_size)
    k, v = (
        torch.empty(*shape, spec.heads_kv, dim, dtype=kind.dtype or spec.dtype)
        for dim in (spec.head_dim, spec.head_dim_v)
    )
    numbers = torch.zeros(batch, dtype=torch.int32)
    factors = torch.ones(batch, spec.heads_kv) if kind.has_bytes else None
    cache = Cache(
        None if kind.page_size is None else torch.zeros(batch, shape[0] // batch, dtype=torch.int32),
        numbers if kind.has_batch_idx else None,
        numbers if kind.has_leftpad else None,
        factors,
        factors,
    )
    return inputs._replace(k=k, v=v, cu_seqlens_k=None), cache


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
