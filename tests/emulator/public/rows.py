"""One kernel of a public package on one shape, run in several orders, judged by value, with what was found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from warpcheck.findings import Finding, Findings
from warpcheck.machine import Order

from fa4.oracle.cases import Judgement, judge


@dataclass(frozen=True)
class Row:
    """A call of a package's public function.

    package: its distribution. run: makes inputs from a seed, calls the function with its default settings, and judges
    every result; the package is imported inside. sms: of the emulated chip; a grid of more tiles gives a CTA several,
    or runs in waves.
    """

    package: str
    name: str
    chip: str
    run: Callable[[int], Iterable[Judgement]]
    sms: int = 4

    @property
    def key(self) -> str:
        return f"{self.package} {self.name} {self.chip}"


@dataclass
class Outcome:
    """What the runs of a row showed.

    runs: orders in which the whole row ran, each with inputs of its own. kernels: different ones that were launched.
    ratio: the largest error of any result in units of the allowed one; wrong: results that err more. instructions and
    seconds (host code, compiling, and running with all checks): of the first run; running: of its launches alone.
    """

    package: str
    name: str
    chip: str
    version: str = ""
    runs: int = 0
    launches: int = 0
    kernels: int = 0
    instructions: int = 0
    seconds: float = 0.0
    running: float = 0.0
    ratio: float = 0.0
    wrong: list[str] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""

    @property
    def key(self) -> str:
        return f"{self.package} {self.name} {self.chip}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def right(self) -> bool:
        return not self.failure and not self.wrong


def version_of(package: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def run_row(row: Row, orders: Iterable[Order]) -> Outcome:
    """Run a row in every order; an exception ends it and is noted."""
    from warpcheck import emulate

    outcome = Outcome(row.package, row.name, row.chip, version_of(row.package) or "")
    found: list[Finding] = []
    for seed, schedule in orders:
        start = time.perf_counter()
        with emulate(
            row.chip, sms=row.sms, seed=seed, schedule=schedule, on_finding="collect", tells_devices_apart=True
        ) as gpu:
            try:
                judgements = list(row.run(seed))
            except Exception as error:
                judgements = []
                lines = str(error).strip().splitlines() or [""]
                outcome.failure = f"{type(error).__name__}: {lines[0][:300]}"
            found += gpu.findings
        if not outcome.launches:
            outcome.launches, outcome.kernels = len(gpu.launches), len({launch.entry for launch in gpu.launches})
            outcome.instructions = sum(launch.warp_instructions for launch in gpu.launches)
            outcome.running = sum(launch.seconds for launch in gpu.launches)
            outcome.seconds = time.perf_counter() - start
        if outcome.failure:
            break
        if not judgements:
            outcome.failure = "nothing was compared"
            break
        outcome.runs += 1
        for judgement in judgements:
            ratio = judgement.error / judgement.allowed if judgement.allowed else float(judgement.error > 0)
            outcome.ratio = max(outcome.ratio, ratio)
            if not judgement.right:
                outcome.wrong.append(f"seed {seed}, {schedule}: {judgement}")
    outcome.findings = [told(finding) for finding in Findings.merged(found)]
    return outcome


def told(finding: Finding) -> dict[str, Any]:
    """A finding for the catalogue: files are named from the folder that their package was imported from."""
    other = finding.others[0][1] if finding.others else None
    return {
        "severity": finding.severity.value,
        "kind": finding.kind,
        "message": finding.message.splitlines()[0],
        "place": _named(finding.location),
        "other": _named(other),
        "kernel": finding.kernel[:80],
        "count": finding.count,
    }


def _named(place: Any) -> str:
    if place is None:
        return ""
    if place.file is None:
        return f"ptx line {place.ptx_line}"
    path = Path(place.file)
    folders = [Path(entry) for entry in sys.path if entry and path.is_relative_to(entry)]
    start = max((len(folder.parts) for folder in folders), default=len(path.parts) - 2)
    return f"{'/'.join(path.parts[start:])}:{place.line}"


def draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Normally distributed tensors on the emulated GPU."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).cuda() for shape in shapes]


def against(name: str, got: Tensor, oracle: Tensor, floor: Tensor) -> Judgement:
    """`fa4.oracle.cases.judge` on host copies: twice the error of `floor`, the same formula in the same precision."""
    return judge(name, got.detach().cpu(), oracle.detach().cpu().double(), floor.detach().cpu())


def by_formula(
    names: Iterable[str], got: Iterable[Tensor], formula: Callable[..., Any], *inputs: Tensor | None
) -> list[Judgement]:
    """Judge results by a formula in torch: in float64 it is the oracle, in float32, rounded to the result's dtype, what
    a kernel may err by half of."""

    def at(dtype: torch.dtype) -> list[Tensor]:
        given = [x.detach().cpu().to(dtype) if x is not None and x.is_floating_point() else x for x in inputs]
        results = formula(*given)
        return list(results) if isinstance(results, (tuple, list)) else [results]

    return [
        against(name, value, exact, rounded.to(value.dtype))
        for name, value, exact, rounded in zip(names, got, at(torch.float64), at(torch.float32), strict=True)
    ]


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """softmax(q k / sqrt(d)) v by formula: (batch, rows, heads, dim), few key heads shared, causal bottom-right."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
