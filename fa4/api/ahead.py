"""Ahead-of-time compilation of kernels into a directory for FA4_CACHE_DIR; the target chip need not be present."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fwd.launchers import APPEND, AppendConfig
from ..mods.ir.record import Mods, ModSpec
from ..runtime import disk, jit, linked, nvfp4, scaled_rows, toolchain
from ..runtime.device import chip_by_number, chip_of, emulating
from ..runtime.spec import AttentionInputs, AttentionSpec, Cache, CacheSpec, Flags, Operands, ProblemSize, Saved
from ..torch_ops import low_precision, ops, run
from ..torch_ops.descales import ones


class AheadProblem(NamedTuple):
    """An attention problem that a model ran on a chip."""

    chip: int  # 10 * major + minor of the compute capability
    spec: AttentionSpec
    extent: ProblemSize
    backend: str = "auto"
    sms: int | None = None  # multiprocessors; None means the number in `fa4.runtime.chips`


class AppendProblem(NamedTuple):
    """An append to a cache that a model ran on a chip; config: the fields of a `fwd.launchers.AppendConfig`."""

    chip: int
    config: dict[str, Any]
    sms: int | None = None


def recorded(file: Path) -> Iterator[AheadProblem | AppendProblem]:
    """Yield the problems that FA4_RECORD wrote to a file, each once.

    Raises:
        ValueError: a line does not have that format.
    """
    lines = dict.fromkeys(file.read_text().splitlines())
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            if "append" in fields:
                yield AppendProblem(fields["chip"], _with_dtypes(fields["append"]), fields["sms"])
                continue
            spec_fields = _with_dtypes(fields["spec"])
            if "mods" in spec_fields:
                spec_fields["mods"] = ModSpec.of_plain(spec_fields["mods"])
            if "cache" in spec_fields:
                spec_fields["cache"] = CacheSpec(**_with_dtypes(spec_fields["cache"]))
            if "operands" in spec_fields:
                spec_fields["operands"] = Operands(spec_fields["operands"])
            spec = AttentionSpec(**spec_fields)
            yield AheadProblem(
                fields["chip"], spec, ProblemSize(*fields["extent"]), fields["backend"], fields.get("sms")
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}, line {number} is no problem that FA4_RECORD wrote: {error}") from error


def _with_dtypes(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert names of dtypes to dtypes."""
    names = ("dtype", "rotary", "converted_dtype")
    return fields | {name: getattr(torch, fields[name]) for name in names if fields.get(name) is not None}


def prepare(directory: Path) -> Path:
    """Make a directory for FA4_CACHE_DIR and return its folder of entries.

    Nothing is removed from it. It gets all that a launch needs beside fa4, torch, tvm-ffi and the kernels.
    """
    below = directory / jit.fingerprint()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    jit.prepare(below)
    disk.keep(directory)
    library = toolchain.runtime_library()
    if library is not None:
        linked.ship(below, library)
    return below


def requests_of(problem: AheadProblem | AppendProblem) -> dict[tuple, jit.Request]:
    """Return the kernels of a problem by (target, key): forward and, if needed, backward (for out only, without dlse).

    Raises:
        NoBackend: no backend serves the problem on the chip.
        ValueError: the chip is unknown.
    """
    with jit.list_only() as listed:
        _run(problem)
    return listed.requests


def _run(problem: AheadProblem | AppendProblem) -> None:
    """Call what runs a problem on its chip, inside a dry run."""
    with emulating(chip_by_number(problem.chip, sms=problem.sms)), torch.no_grad():
        if isinstance(problem, AppendProblem):
            _run_append(problem)
        else:
            _run_attention(problem)


def _run_append(problem: AppendProblem) -> None:
    missing = {field.name: None for field in dataclasses.fields(AppendConfig)}
    APPEND.launcher(AppendConfig(**missing | problem.config), chip_of(torch.device("cpu")))


def _run_attention(problem: AheadProblem) -> None:
    inputs, flags = _inputs(problem)
    mods = None if problem.spec.mods is None else _mods(problem.spec.mods, problem)
    if problem.spec.operands is not None:
        inputs, dtype = _in_low_precision(inputs, problem.spec.operands), problem.spec.dtype
        descales = ones(inputs, problem.spec.operands)
        if flags.needs_backward:
            out = torch.empty(*inputs.q.shape[:-1], problem.spec.head_dim_v, dtype=dtype)
            lse = torch.empty(inputs.batch, problem.spec.heads_q, inputs.max_seqlen_q)
            low_precision.native_backward(Saved(out, lse, torch.zeros_like(out)), inputs, flags, descales)
        else:
            low_precision.native(inputs, descales, mods, flags, dtype)
        return
    if problem.spec.cache is not None:
        inputs, cache = _with_cache(inputs, problem)
        run.forward(inputs, *ops.spec_and_plan(inputs, flags, mods, cache), mods, cache)
        return
    out, lse = ops.route(inputs, flags, mods).forward(inputs, mods)
    if flags.needs_backward:
        ops.backward(Saved(out, lse, out), inputs, mods, flags)


def _in_low_precision(inputs: AttentionInputs, operands: Operands) -> AttentionInputs:
    """Return the same call with q, k and v as operands of products."""
    if operands is not Operands.NVFP4:
        q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs[:3])
        return AttentionInputs(q, k, v, *inputs[3:])
    q, k = (x[..., : x.shape[-1] // nvfp4.PER_BYTE] for x in (inputs.q, inputs.k))
    v = inputs.v[:, : nvfp4.bytes_of(inputs.v.shape[1])]
    q, k, v = (torch.empty(x.shape, dtype=nvfp4.DTYPE) for x in (q, k, v))
    return AttentionInputs(q, k, v, *inputs[3:])


def _with_cache(inputs: AttentionInputs, problem: AheadProblem) -> tuple[AttentionInputs, Cache]:
    """Return the same call with keys and values in a cache of this kind, with room for the longest sequence."""
    spec, (batch, _, rows) = problem.spec, problem.extent
    kind = spec.cache
    assert kind is not None
    shape = (batch, rows) if kind.page_size is None else (batch * -(-rows // kind.page_size), kind.page_size)
    dims = scaled_rows.BYTES_OF_ROW if kind.has_scaled_rows else spec.head_dim, spec.head_dim_v
    per_element = nvfp4.PER_BYTE if kind.is_nvfp4 else 1
    k, v = (torch.empty(*shape, spec.heads_kv, dim // per_element, dtype=kind.dtype or spec.dtype) for dim in dims)
    numbers = torch.zeros(batch, dtype=torch.int32)
    factors = [torch.ones(batch, spec.heads_kv) if kind.converts_kv else None] * 2
    if kind.is_nvfp4:
        factors = [torch.empty(*shape, spec.heads_kv, dim // nvfp4.COLUMNS, dtype=nvfp4.SCALE_DTYPE) for dim in dims]
    table = None if kind.page_size is None else torch.zeros(batch, shape[0] // batch, dtype=torch.int32)
    batch_idx, leftpad = (numbers if is_given else None for is_given in (kind.has_batch_idx, kind.has_leftpad))
    cache = Cache(table, batch_idx, leftpad, *factors)
    return inputs._replace(k=k, v=v, cu_seqlens_k=None), cache


def _mods(spec: ModSpec, problem: AheadProblem) -> Mods:
    """Return functions and block lists for a call; values of numbers and tensors are never read."""
    graphs = [graph for graph in (spec.score, spec.mask) if graph is not None]
    types = [tensor for graph in graphs for tensor in graph.tensors]
    tensors = [torch.empty((1,) * tensor.rank, dtype=getattr(torch, tensor.dtype)) for tensor in types]
    blocks: list[Tensor] = []
    block_q, block_k = spec.block or (0, 0)
    if spec.block is not None:
        heads = problem.spec.heads_q if spec.heads_differ else 1
        rows, keys = -(-problem.extent.max_seqlen_q // block_q), -(-problem.extent.max_seqlen_k // block_k)
        for count, other in ((rows, keys), (rows, keys), (keys, rows), (keys, rows)):
            blocks += [torch.empty(1, heads, *shape, dtype=torch.int32) for shape in ((count,), (count, other))]
        blocks += [torch.empty(1, heads, count, dtype=torch.int32) for count in (rows, keys)]
    score, mask = ("" if graph is None else graph.text for graph in (spec.score, spec.mask))
    numbers = [0.0] * sum(len(graph.numbers) for graph in graphs)
    dropout_p, seed = (0.5, torch.empty(2, dtype=torch.int64)) if spec.dropout else (0.0, None)
    return Mods(tensors, blocks, score, mask, numbers, block_q, block_k, list(spec.trained), dropout_p, seed)


def _inputs(problem: AheadProblem) -> tuple[AttentionInputs, Flags]:
    """Return a call of the problem's shape; values of its tensors are never read."""
    spec, (batch, rows_q, rows_k) = problem.spec, problem.extent
    lead_q, lead_k = ((batch * rows_q,), (batch * rows_k,)) if spec.varlen else ((batch, rows_q), (batch, rows_k))
    lengths = torch.full((batch,), rows_q, dtype=torch.int32), torch.full((batch,), rows_k, dtype=torch.int32)
    bounds = [torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in lengths]
    inputs = AttentionInputs(
        q=torch.empty(*lead_q, spec.heads_q, spec.head_dim, dtype=spec.dtype),
        k=torch.empty(*lead_k, spec.heads_kv, spec.head_dim, dtype=spec.dtype),
        v=torch.empty(*lead_k, spec.heads_kv, spec.head_dim_v, dtype=spec.dtype),
        sink=torch.zeros(spec.heads_q) if spec.has_sink else None,
        cu_seqlens_q=bounds[0] if spec.varlen else None,
        cu_seqlens_k=bounds[1] if spec.varlen else None,
        seqused_q=lengths[0] if spec.has_seqused_q else None,
        seqused_k=lengths[1] if spec.has_seqused_k else None,
        max_seqlen_q=rows_q,
        max_seqlen_k=rows_k,
    )
    flag_fields = {name: getattr(spec, name) for name in Flags._fields if hasattr(spec, name)}
    return inputs, Flags(**flag_fields | {"backend": problem.backend})
