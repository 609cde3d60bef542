"""A row of an array of calls on e4m3 or e2m1 tensors, or of training that rounds to e4m3, and a seed as such a call,
judged by the oracle on the numbers that these tensors stand for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import fa4
from fa4.oracle import cases
from fa4.runtime import nvfp4
from fa4.runtime.device import chip_of
from fa4.runtime.spec import Saved
from fa4.torch_ops import low_precision
from fa4.torch_ops.descales import dequantized
from tests.covering import calls, layouts
from tests.covering.judge import Judged, defined, judge
from tests.covering.model import Row
from tests.fp8.heads import E4M3, noting_kernels, rounding_of

_AS_CALL = dict(dtype="bfloat16", captured="fixed", direction="inference", deterministic="no", dlse="no")


def as_multiplied(problem: cases.Problem, natives: dict[str, Any], chip: int, has_dropout: bool) -> cases.Problem:
    """The problem with the roundings of the kernel that multiplied 8-bit numbers, if one did."""
    if natives.get("native") is None:
        return problem
    problem = replace(problem, spec=replace(problem.spec, operands=natives["native"]))
    return replace(problem, rounding=rounding_of(problem, chip, has_dropout, natives["extent"]))


@dataclass
class EightBitCall(calls.Call):
    """tensors: q, k and v of e4m3 or e2m1, and their factors. natives: see `noting_kernels`. chip: number of the one
    that ran it."""

    tensors: dict[str, Any] = field(default_factory=dict)
    natives: dict[str, Any] = field(default_factory=dict)
    chip: int = 0

    def run(self, backend: str = "auto") -> dict[str, Tensor]:
        i = self.problem.inputs
        self.chip = chip_of(self.tensors["q"].device).number
        given = calls.given(self) | self.extra | self.tensors | dict(seqused_k=i.seqused_k, backend=backend)
        if i.varlen:
            given |= dict(cu_seqlens_q=i.cu_seqlens_q, cu_seqlens_k=i.cu_seqlens_k)

        function: Any = fa4.flash_attn_varlen_func if i.varlen else fa4.flash_attn_func
        with torch.no_grad(), noting_kernels() as self.natives:
            out, lse = function(**given, return_lse=True)
        return {"out": out, "lse": lse}

    def judged(self, results: dict[str, Tensor]) -> list[Judged]:
        problem = as_multiplied(self.problem, self.natives, self.chip, self.kept is not None)
        return judge(problem, results, self.functions, self.kept)


def build(row: Row, seed: int, device: str = "cpu", is_small: bool = True, variant: int | None = None) -> EightBitCall:
    """The call of a row; seed and variant as in `calls.build`."""
    made = calls.build(row | _AS_CALL | {"layout": "contiguous"}, seed, device, is_small, variant)
    problem, generator = made.problem, torch.Generator().manual_seed(seed)
    i, factors = problem.inputs, dict[str, Any]()
    bounds = {"q": (i.cu_seqlens_q, i.seqused_q), "k": (i.cu_seqlens_k, i.seqused_k)}
    bounds["v"] = bounds["k"]
    data, draw = [], random.Random(seed)
    for name, x in zip("qkv", i[:3]):
        recipe = draw.choice(("tensor", "head", "mxfp8")) if row["recipe"] == "mixed" else row["recipe"]
        if recipe == "none":
            data.append(x.to(E4M3))
            continue
        options = dict(zip(("cu_seqlens", "seqused"), bounds[name]))
        if recipe == "head":
            options["heads"] = i.k.shape[-2]
        axis = "tokens" if recipe in ("mxfp8", "nvfp4") and name == "v" else "head_dim"
        codes, factors[f"{name}_descale"] = fa4.quantize(x, recipe, axis=axis, **options)
        data.append(codes)
    eight = i._replace(q=data[0], k=data[1], v=data[2])
    eight = layouts.laid_out(replace(problem, inputs=eight), row["layout"], generator).inputs
    exact = []
    for name, x in zip("qkv", eight[:3]):
        scales, options = factors.get(f"{name}_descale"), {"cu_seqlens": bounds[name][0]}
        if x.dtype is nvfp4.DTYPE and name == "v":
            options["seqlen"] = i.v.shape[1]
        exact.append(x.float() if scales is None else fa4.dequantize(x, scales, torch.float32, **options))
    problem = replace(problem, inputs=i._replace(q=exact[0], k=exact[1], v=exact[2]))
    fields = {name: getattr(made, name) for name in calls.Call.__dataclass_fields__}
    return EightBitCall(**fields | {"problem": problem}, tensors=dict(zip("qkv", eight[:3])) | factors)


def build_four_bits(
    row: Row, seed: int, device: str = "cpu", is_small: bool = True, variant: int | None = None
) -> EightBitCall:
    """The call of a row; seed and variant as in `calls.build`."""
    return build(row | dict(recipe="nvfp4", form="dense"), seed, device, is_small, variant)


@dataclass
class TrainedCall(calls.Call):
    """A training call that rounds to 8 bits. natives: see `noting_kernels`.
    chip: number of the one that ran it."""

    natives: dict[str, Any] = field(default_factory=dict)
    chip: int = 0

    def run(self, backend: str = "auto") -> dict[str, Tensor]:
        self.chip = chip_of(self.problem.inputs.q.device).number
        with noting_kernels() as self.natives:
            return super().run(backend)

    def judged(self, results: dict[str, Tensor]) -> list[Judged]:
        problem, precision = self.problem, self.precision["precision"]
        eight, descales = low_precision.rounded(problem.inputs, precision)
        problem = replace(problem, inputs=dequantized(eight, descales, torch.float32))
        problem = as_multiplied(problem, self.natives, self.chip, self.kept is not None)
        outs = ("out", "lse")
        verdict = judge(problem, {name: results[name] for name in outs}, self.functions, self.kept)
        rounding = {name: x for name, x in problem.rounding.items() if name != "sum_bits"}
        if self.natives.get("native_backward"):
            dlse = defined(problem.dlse, results["lse"]) if self.row["dlse"] == "yes" else None
            saved = Saved(results["out"], results["lse"], problem.dout, dlse)
            dout, operands = low_precision.gradient_operands(saved, eight, descales)
            problem = replace(problem, dout=dout)
            rounding |= dict(ds_factors=operands.ds_factors(problem.spec.group))
        gradients = {name: x for name, x in results.items() if name != "out"}
        problem = replace(problem, rounding=rounding)
        has_dlse = self.row["dlse"] == "yes"
        of_gradients = judge(problem, gradients, self.functions, self.kept, has_dlse, ("ds_factors",))
        return verdict + [one for one in of_gradients if one.name != "lse"]


def build_training(
    row: Row, seed: int, device: str = "cpu", is_small: bool = True, variant: int | None = None
) -> TrainedCall:
    """The call of a row; seed and variant as in `calls.build`."""
    made = calls.build(
        row | dict(captured="fixed", block_mask="none", direction="training"), seed, device, is_small, variant
    )
    fields = {name: getattr(made, name) for name in calls.Call.__dataclass_fields__}
    return TrainedCall(**fields | {"precision": dict(precision=row["precision"])})
