"""Calls on e4m3 tensors with a factor of each sequence and head, which kernels multiply as such: cases and judge."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import fa4
from fa4.oracle import cases, reference
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.spec import Operands, ProblemSize
from fa4.sm90.fwd.fp8.plan import Fp8Forward
from fa4.sm100.fwd.plan import Sm100Forward
from fa4.torch_ops import low_precision
from fa4.torch_ops.descales import operands_of

E4M3 = torch.float8_e4m3fn
_SMALL = dict(seqlen_q=300, head_dim=64, batch=2)
CASES = (
    Case("full", **_SMALL, seqlen_k=520, heads_q=2),
    Case("causal", seqlen_q=530, seqlen_k=530, head_dim=128, causal=True),
    Case("more_keys", seqlen_q=257, seqlen_k=900, head_dim=128, causal=True, heads_q=4, heads_kv=2),
    Case("window", **_SMALL, seqlen_k=700, window_size=(200, 30), softcap=15.0, sink=True),
    Case("left", **_SMALL, seqlen_k=300, window_size=(10, None), heads_q=3, heads_kv=1),
    Case("empty_rows", **_SMALL, seqlen_k=100, causal=True, sink=True),
    Case("widths", seqlen_q=256, seqlen_k=333, head_dim=96, head_dim_v=80, batch=2, seqused=((None, 333), (None, 7))),
    Case("narrow", seqlen_q=261, seqlen_k=130, head_dim=16, head_dim_v=48, softmax_scale=0.7),
    Case("large", **_SMALL, seqlen_k=300, logits=300.0),
)


def rounding_of(problem, chip, has_dropout=False, extent=None):
    """How a chip's kernel rounds products of e4m3, as options of the reference. chip: its number. extent: what the call
    said, whose bounds may be larger than the longest sequences."""
    i = problem.inputs
    operands = problem.spec.operands or Operands.E4M3
    spec = replace(problem.spec, dtype=torch.bfloat16, operands=operands)
    extent = extent or ProblemSize(i.batch, i.max_seqlen_q, i.max_seqlen_k)
    if chip == 90:
        line = Fp8Forward(spec, extent, chip_by_number(chip)).cfg.line
        return reference.HOPPER_8BIT | ({"line": (line, 16)} if line else {})
    if chip // 10 != 10:
        return {}
    cfg = Sm100Forward(spec, extent, chip_by_number(chip)).cfg
    return {"line": (cfg.polynomial, 4)} if cfg.p_in_smem and not has_dropout else {}


def of_heads(problem, seed, chip):
    """The problem on the numbers that e4m3 tensors and random factors stand for, and the call's arguments. chip: the
    number of the one that rounds P."""
    generator = torch.Generator().manual_seed(seed)
    exact, arguments, shape = [], {}, (problem.inputs.batch, problem.spec.heads_kv)
    for name, x, bounds in zip("qkv", problem.inputs[:3], _bounds(problem)):
        scales = torch.rand(shape, generator=generator) + 0.5
        by_head = scales.repeat_interleave(x.shape[-2] // shape[1], 1)
        by_row = by_head[:, None] if bounds is None else by_head.repeat_interleave(bounds, 0)
        data = (x.float() / by_row[..., None]).clamp(-448, 448).to(E4M3)
        exact.append(data.float() * by_row[..., None])
        arguments |= {name: data, f"{name}_descale": scales}
    inputs = problem.inputs._replace(q=exact[0], k=exact[1], v=exact[2])
    spec = replace(problem.spec, dtype=torch.bfloat16, operands=Operands.E4M3)
    problem = replace(problem, inputs=inputs, spec=spec)
    return replace(problem, rounding=rounding_of(problem, chip)), arguments


def _bounds(problem):
    """Rows of each sequence of q, k and v; None if they are not packed."""
    i = problem.inputs
    cumulative = i.cu_seqlens_q, i.cu_seqlens_k, i.cu_seqlens_k
    return [None if x is None else _counts(x, rows.shape[0]) for x, rows in zip(cumulative, i[:3])]


def _counts(cumulative, rows):
    """Rows of each sequence; those past the end belong to the last one."""
    counts = cumulative.diff()
    counts[-1] += rows - cumulative[-1]
    return counts


def judged(problem, out, lse):
    """Judge by the reference that rounds P to e4m3 and adds with few bits, in other orders of the keys, too."""

    def references(of, precise):
        return reference.forward(of.inputs, of.spec, precise=precise, **of.rounding)

    results = {"out": out, "lse": lse}
    return cases.judge_by_draws(results, references, problem, (), cases.roundings(problem))


@contextlib.contextmanager
def noting_kernels() -> Iterator[dict[str, Any]]:
    """What kernels multiplied in 8 bits, of the last forward ("native") and backward ("native_backward"); None if they
    multiplied 16 bits. "extent": of the forward."""
    taken: dict[str, Any] = {}
    native, native_backward = low_precision.native, low_precision.native_backward

    def forward(inputs: Any, descales: Any, *others: Any) -> Any:
        found = native(inputs, descales, *others)
        taken["extent"] = inputs.extent
        taken["native"] = None if found is None else operands_of(inputs, descales)
        return found

    def backward(*arguments: Any) -> Any:
        found = native_backward(*arguments)
        _, inputs, _, descales = arguments
        taken["native_backward"] = None if found is None else operands_of(inputs, descales)
        return found

    with mock.patch.multiple(low_precision, native=forward, native_backward=backward):
        yield taken


def explained(chip, changes):
    """What a call of e4m3 tensors gets on a chip. changes: of its arguments; q, k and v by their shapes."""
    arguments = dict(q=(2, 300, 4, 64), k=(2, 300, 4, 64), v=(2, 300, 4, 64)) | changes
    arguments |= {name: torch.empty(arguments[name], dtype=E4M3) for name in "qkv"}
    with emulating(chip):
        return fa4.explain(**arguments)
