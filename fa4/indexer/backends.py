"""Which code serves a call: kernels of a chip, or torch.

`backend="auto"` takes the kernels that can serve the call. A named backend serves it or raises, with its reasons.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runtime import dispatch
from ..runtime.device import Chip, chip_of
from . import products
from . import selection as by_torch
from .problem import Problem

Select = Callable[[Tensor, Tensor, Tensor], None]
"""Writes the chosen indices, see `selection.select`."""
ScoresInto = Callable[[Tensor, slice], None]
"""Writes the scores of some rows, where a row sees the key, into (rows, columns)."""

# Backend -> chip number, and the module with `refusals` and `Scores`. As text: nothing imports a chip.
_SCORES = {"sm90": (90, "sm90.indexer.plan")}
_PORTABLE = "sm80"  # has the kernel that selects, for every NVIDIA GPU since Ampere
_CUTE = "cutlass"


def check_torch(backend: str, what: str) -> None:
    """Raise unless torch may serve `backend`."""
    dispatch.check_backend_name(backend)
    if backend not in ("auto", "torch"):
        raise dispatch.NoBackend(f"backend {backend!r} lacks {what} (torch has it)")


def scores(problem: Problem, backend: str, counts: Tensor, needs_gradients: bool) -> ScoresInto | None:
    """Return the kernel that computes scores, or None for torch. counts: see `Problem.visible_counts`.

    Raises:
        NoBackend: the named backend has no kernel for the problem.
        ValueError: no backend has that name.
    """
    dispatch.check_backend_name(backend)
    if backend == "torch":
        return None
    chip = chip_of(problem.q.device)
    for name, (number, module) in _SCORES.items():
        if backend not in ("auto", name):
            continue
        reasons = _reasons(chip, chip.number == number, f"sm_{number}")
        if needs_gradients:
            reasons.append("lacks gradients")
        if not reasons:
            plan: Any = importlib.import_module(f"..{module}", __package__)
            is_paged = problem.page_table is not None
            reasons = plan.refusals(problem.q, problem.k, is_paged)
            if not reasons:
                bounds = problem.bounds.q_begin, problem.bounds.k_begin
                sequences = problem.sequence_of_rows()
                return plan.Scores(
                    problem.q, problem.k, problem.weights, problem.k_descale, bounds, counts, sequences,
                    problem.page_table, chip,
                )  # fmt: skip
        if backend == name:
            raise dispatch.NoBackend(f"backend {name!r} cannot compute scores of the indexer: {'; '.join(reasons)}")
    if backend != "auto":
        raise dispatch.NoBackend(f"backend {backend!r} lacks scores of the indexer ({', '.join(_SCORES)} has them)")
    return None


def scores_of_topk(problem: Problem, backend: str, counts: Tensor) -> ScoresInto:
    """Return what computes the scores of a top-k: with the portable backend torch, as it has no products."""
    kernel = None if backend == _PORTABLE else scores(problem, backend, counts, False)
    return (lambda out, rows: products.scores(problem, rows, counts, out)) if kernel is None else kernel


def selection(problem: Problem, topk: int, backend: str) -> Select:
    """Return what selects: a kernel, or torch.

    Raises:
        NoBackend: a backend with this kernel is named, and it cannot serve the problem.
    """
    if backend == "torch":
        return by_torch.select
    chip = chip_of(problem.q.device)
    reasons = _reasons(chip, chip.number >= 80, "an NVIDIA GPU of compute capability 8.0 or newer")
    if problem.score_dtype != torch.float32:
        reasons.append("lacks scores of float64")
    if not reasons:
        radix: Any = importlib.import_module(".radix", __package__)  # needs CuTe DSL
        cfg = radix.RadixConfig.of(problem.columns, topk)
        if cfg.smem.nbytes > chip.smem_per_block:
            reasons.append(f"lacks rows of {problem.columns} scores")
        elif problem.rows and problem.columns and topk:
            return radix.launcher(cfg, chip)
    if reasons and backend != "auto":
        raise dispatch.NoBackend(f"backend {backend!r} cannot select keys: {'; '.join(reasons)}")
    return by_torch.select


def _reasons(chip: Chip, is_on: bool, needed: str) -> list[str]:
    """Return why no kernel of these chips can run."""
    if not is_on:
        return [f"needs {needed} (this is {chip})"]
    if not dispatch.is_installed(_CUTE):
        return [f"needs the module {_CUTE}, which is not installed"]
    return [] if chip.compiles else [chip.no_target]
