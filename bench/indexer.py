"""python -m bench.indexer: the lightning indexer's prefill, exact top-k included, beside torch's own operations.

Of fa4's calls, the two stages are timed apart as well: scores of all chunks, and top-k of all chunks. Rates count the
products of visible pairs. Before anything is timed, some rows are checked: scores against float64, with at most twice
the error of a tensor core's sums, and indices against sorting. torch multiplies in bfloat16, applies ReLU and weights,
and calls torch.topk, for chunks of rows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import fa4
from fa4.indexer import arguments, backends, run
from fa4.indexer.problem import Problem, parts
from fa4.oracle import reference

from . import machine
from .check import what_failed
from .timing import Timing, measure_in_turns

E4M3 = torch.float8_e4m3fn
SUM_BITS = {90: 14}  # of e4m3 products, by chip; float32's elsewhere
CHECKED_ROWS = 24
TORCH_PRODUCTS = 1 << 29  # of a chunk
# TFLOP/s without sparsity, data sheets: H100 and H200 SXM.
PEAK = {("sm_90", E4M3): 1979.0, ("sm_90", torch.bfloat16): 989.5}


@dataclass(frozen=True)
class Case:
    """One causal sequence of `tokens` queries and keys."""

    tokens: int
    dtype: torch.dtype
    heads: int = 64
    head_dim: int = 128
    topk: int = 2048

    @property
    def label(self) -> str:
        dtype = "e4m3" if self.dtype == E4M3 else str(self.dtype).removeprefix("torch.")
        return f"{dtype} {self.tokens} tokens, {self.heads} heads of {self.head_dim}, top {self.topk}"

    @property
    def flops(self) -> float:
        """Of the products of visible pairs."""
        return 2.0 * self.heads * self.head_dim * self.tokens * (self.tokens + 1) / 2

    def tensors(self, device: torch.device, seed: int) -> dict[str, Any]:
        """Return the arguments of `fa4.indexer_topk`."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        q = normal(1, self.tokens, self.heads, self.head_dim).to(self.dtype)
        k = normal(1, self.tokens, self.head_dim).to(self.dtype)
        weights = normal(1, self.tokens, self.heads) / (self.heads * self.head_dim) ** 0.5
        scales = {}
        if self.dtype == E4M3:
            scales = {"k_descale": torch.rand(1, self.tokens, generator=generator, device=device) + 0.5}
        return dict(q=q, k=k, weights=weights, causal=True, **scales)


CASES = tuple(Case(tokens, dtype) for tokens in (8192, 16384, 32768, 65536) for dtype in (E4M3, torch.bfloat16))


def by_torch(q: Tensor, k: Tensor, weights: Tensor, topk: int) -> Tensor:
    """Return indices by torch.topk, whose order and ties are its own; rows that see fewer keys repeat hidden ones. q:
    (tokens, heads, head_dim), k: (tokens, head_dim), both 16-bit."""
    tokens, heads, _ = q.shape
    indices = torch.empty(tokens, min(topk, tokens), dtype=torch.int64, device=q.device)
    positions = torch.arange(tokens, device=q.device)
    for rows in parts(0, tokens, max(TORCH_PRODUCTS // (heads * tokens), 1)):
        keys = max(rows.stop, indices.shape[1])  # later keys are hidden from all of these rows
        z = (q[rows].flatten(0, 1) @ k[:keys].T).unflatten(0, (-1, heads)).relu_()
        scores = torch.bmm(weights[rows, None].to(z.dtype), z).squeeze(1).float()
        scores.masked_fill_(positions[:keys] > positions[rows, None], -torch.inf)
        indices[rows] = scores.topk(indices.shape[1], dim=-1).indices
    return indices


class Stages:
    """The chunks of a call of `fa4.indexer_topk` on one backend, whose stages can run apart."""

    def __init__(self, problem: Problem, topk: int, backend: str) -> None:
        self.problem, self.counts = problem, problem.visible_counts()
        self.compute = backends.scores_of_topk(problem, backend, self.counts)
        self.select = backends.selection(problem, topk, backend)
        width = -(-problem.columns // run.ROW_MULTIPLE) * run.ROW_MULTIPLE
        height = max(run.CHUNK_BYTES // (4 * width), 1)
        self.chunks = list(parts(0, problem.rows, height))
        self.memory = problem.weights.new_empty(min(height, problem.rows), width)
        self.indices = self.counts.new_empty(problem.rows, topk)

    def scores(self, rows: slice) -> Tensor:
        out = self.memory[: rows.stop - rows.start, : self.problem.columns]
        self.compute(out, rows)
        return out

    def timed(self) -> tuple[float, float]:
        """Run all chunks; return milliseconds of the scores and of the top-k."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in self.chunks]
        for rows, (start, middle, stop) in zip(self.chunks, events):
            start.record()
            scores = self.scores(rows)
            middle.record()
            self.select(scores, self.counts[rows], self.indices[rows])
            stop.record()
        torch.cuda.synchronize()
        scores_ms = sum(start.elapsed_time(middle) for start, middle, _ in events)
        return scores_ms, sum(middle.elapsed_time(stop) for _, middle, stop in events)


def check(stages: Stages, indices: Tensor, seed: int) -> float:
    """Raise unless some rows are right. Returns the largest error of their scores, relative to the largest score."""
    problem, chip = stages.problem, backends.chip_of(indices.device)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(problem.rows, (CHECKED_ROWS,), generator=generator).tolist()
    errors, allowed = [], []
    for t in {0, problem.rows - 1, *drawn}:
        count = int(stages.counts[t])
        scores = stages.scores(slice(t, t + 1))[0, :count]
        order = scores.sort(descending=True, stable=True).indices[: indices.shape[-1]].sort().values
        chosen = indices[t][: len(order)]
        if not torch.equal(chosen.long(), order) or not (indices[t][len(order) :] == -1).all():
            raise AssertionError(f"row {t} has other keys than sorting gives, seed {seed}")
        scale = 1.0 if problem.k_descale is None else problem.k_descale[:count].double()
        q, k, weights = problem.q[t], problem.k[:count], problem.weights[t].double()
        exact = (weights @ (q.double() @ k.double().T).relu()) * scale
        bits = {"sum_bits": SUM_BITS[chip.number]} if q.dtype == E4M3 and chip.number in SUM_BITS else {}
        cut = reference.tensor_core_products(q.float(), k.float().T, q.dtype, **bits).relu()
        rounded = (weights.float() @ cut).double() * scale
        largest = exact.abs().max()
        largest = torch.where(largest == 0, 1.0, largest)  # where all products are negative
        errors.append(float((scores - exact).abs().max() / largest))
        allowed.append(2 * float((rounded - exact).abs().max() / largest))
    if max(errors) > max(allowed):
        raise AssertionError(f"scores err by {max(errors):.2e}, allowed are {max(allowed):.2e}, seed {seed}")
    return max(errors)


def _quartiles(name: str, samples: list[float]) -> dict[str, float]:
    time = Timing.of(samples)
    return {f"{name}_ms": time.median_ms, f"{name}_q25_ms": time.q25_ms, f"{name}_q75_ms": time.q75_ms}


def measured(case: Case, seconds: float, seed: int, backend: str) -> list[dict[str, Any]]:
    """Check and time one case: fa4's call, its stages, and torch's operations on 16-bit numbers."""
    device = torch.device("cuda")
    tensors = case.tensors(device, seed)
    call: Callable[[], Any] = functools.partial(fa4.indexer_topk, **tensors, topk=case.topk, backend=backend)
    given = dict(tensors)
    q, k, weights, causal = (given.pop(name) for name in ("q", "k", "weights", "causal"))
    problem = arguments.problem(q, k, weights, causal, arguments.Lengths(), **given)
    stages = Stages(problem, case.topk, backend)
    error = check(stages, call()[0], seed)
    calls = {f"fa4, {backend}": call}
    if case.dtype == torch.bfloat16:
        calls["torch"] = functools.partial(by_torch, q[0], k[0], weights[0], case.topk)
    times = measure_in_turns(calls, device, seconds=seconds)
    samples = [stages.timed() for _ in range(1 + max(7, int(1000 * seconds / times[f"fa4, {backend}"].median_ms)))][1:]
    chip = f"sm_{backends.chip_of(device).number}"
    peak = PEAK.get((chip, case.dtype))
    found = []
    for name, time in times.items():
        row: dict[str, Any] = {
            "suite": "indexer", "provider": name, "label": case.label, "tokens": case.tokens, "heads": case.heads,
            "head_dim": case.head_dim, "topk": case.topk, "median_ms": time.median_ms, "q25_ms": time.q25_ms,
            "q75_ms": time.q75_ms, "repeats": time.repeats, "seed": seed, "bound_ms": peak and case.flops / peak / 1e9,
        }  # fmt: skip
        if name != "torch":
            row |= _quartiles("scores", [x for x, _ in samples]) | _quartiles("topk", [x for _, x in samples])
            row |= {"tflops": case.flops / row["scores_ms"] / 1e9, "error": error, "checked": True}
            row |= {"of_peak": peak and row["tflops"] / peak, "topk_share": row["topk_ms"] / row["scores_ms"]}
        found.append(row)
    return found


def shown(row: dict[str, Any]) -> str:
    """Format a row for the terminal."""
    text = f"{row['label']:52s} {row['provider']:12s} {row['median_ms']:9.3f} ms"
    if "scores_ms" in row:
        peak = f" ({100 * row['of_peak']:.0f}% of the peak)" if row["of_peak"] else ""
        text += f" = scores {row['scores_ms']:.3f}, {row['tflops']:.0f} TFLOP/s{peak}"
        text += f" + top-k {row['topk_ms']:.3f} ({100 * row['topk_share']:.0f}% of the scores)"
    return text


@click.command(help=__doc__)
@click.option("--seconds", default=0.5, show_default=True, help="For each time.")
@click.option("--only", "pattern", default="", help="Cases whose label has this text.")
@click.option("--backend", default="auto", show_default=True, help="Of fa4.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Add rows to a file, lines of JSON.")
def main(seconds: float, pattern: str, backend: str, seed: int, output: Path | None) -> None:
    if not torch.cuda.is_available():
        raise click.UsageError("needs a CUDA device")
    facts = {"machine": machine.facts(torch.device("cuda")), "commit": machine.commit()}
    for case in CASES:
        if pattern not in case.label:
            continue
        try:
            found = measured(case, seconds, seed, backend)
        except torch.cuda.OutOfMemoryError as error:
            click.echo(f"{case.label:52s} is skipped: {what_failed(error)}")
            continue
        for row in found:
            click.echo(shown(row))
        if output is not None:
            clocks = machine.clocks()
            with output.open("a") as file:
                file.writelines(json.dumps(facts | {"clocks": clocks} | row) + "\n" for row in found)


if __name__ == "__main__":
    main()
