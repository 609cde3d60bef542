"""What a chip answered to small problems, kept in a file, so that the emulator answers for it where no chip is.

    python -m fa4.emulator.answers keep FILE.npz       # on a machine with a GPU, whose kernels answer
    python -m fa4.emulator.answers compare FILE.npz    # anywhere: the same problems, emulated

Matrix instructions agree with an H100 to the bit, and so does what they sum in a fixed order. Approximate functions do
not: the ISA bounds their error, and their tables are not public. Where the last bits of an exponential decide how a
weight is rounded, an element of a result comes out one rounding step away; so do sums that atomic additions make in
any order. Cases named `exact` have whole scores in the base of two, whose exponentials are the same everywhere.
Where a case has other tiles than when the chip answered, its sums have another order, and nothing is compared.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from torch import Tensor
from warpcheck.options import PATTERN

from fa4.oracle import cases as problems
from fa4.oracle.cases import Case, Problem
from fa4.runtime import dispatch
from fa4.runtime.device import chip_of

CASES = {
    case.name: case
    for case in (
        Case("fwd_d64_causal", seqlen_q=100, seqlen_k=200, causal=True, heads_kv=1),
        Case("fwd_d64_window_sink", seqlen_q=90, seqlen_k=150, window_size=(40, 0), sink=True, softcap=20.0),
        Case("fwd_d128_full", seqlen_q=70, seqlen_k=300, head_dim=128, heads_q=1, heads_kv=1),
        Case("fwd_d128_packed", lengths=((40, 130), (0, 5), (33, 33)), head_dim=128, causal=True, heads_kv=1),
        Case("fwd_d192_128_causal", seqlen_q=70, seqlen_k=130, head_dim=192, head_dim_v=128, causal=True),
        Case("fwd_d256_full", seqlen_q=100, seqlen_k=130, head_dim=256, heads_q=1, heads_kv=1),
        Case("fwd_split_keys", seqlen_q=1, seqlen_k=1300, heads_q=8, heads_kv=2, head_dim=128, causal=True),
        Case("fwd_exact_d64", seqlen_q=100, seqlen_k=300, heads_q=1, heads_kv=1, softmax_scale=math.log(2)),
        Case("fwd_exact_d128_causal", seqlen_q=70, seqlen_k=200, head_dim=128, causal=True, softmax_scale=math.log(2)),
        Case("bwd_d64_full", seqlen_q=70, seqlen_k=100, heads_q=1, heads_kv=1),
        Case("bwd_d64_ordered_packed", lengths=((70, 100), (30, 30)), causal=True, deterministic=True, heads_kv=1),
        Case("bwd_d128_causal", seqlen_q=70, seqlen_k=140, head_dim=128, causal=True, heads_q=1, heads_kv=1),
        Case("bwd_d128_ordered", seqlen_q=70, seqlen_k=140, head_dim=128, causal=True, deterministic=True, heads_kv=1),
        Case("bwd_d192_128_causal", seqlen_q=70, seqlen_k=90, head_dim=192, head_dim_v=128, causal=True, heads_q=1,
             heads_kv=1),
        Case("bwd_d256_full", seqlen_q=70, seqlen_k=70, head_dim=256, heads_q=1, heads_kv=1),
    )
}  # fmt: skip
# Of the elements of a 16-bit result, how many may differ at all, and of any result, by how many rounding steps of its
# largest element.
SHARE, STEPS = 0.02, 1.0


@dataclass(frozen=True)
class Row:
    """A result of a case as the chip and as the emulator have it. error: the largest difference."""

    case: str
    tensor: str
    elements: int
    different: int
    error: float
    largest: float
    dtype: torch.dtype

    @property
    def agrees(self) -> bool:
        """Whether rounding explains what differs: float32 holds the logarithm of a sum, which differs in last bits."""
        step = torch.finfo(self.dtype).eps * self.largest
        many = self.different > SHARE * self.elements and self.dtype != torch.float32
        return self.error <= STEPS * step * (2 if self.dtype == torch.float32 else 1) and not many  # False for NaN

    def __str__(self) -> str:
        told = f"{self.elements:,} the same bits"
        if self.different:
            of = f"{self.different:,} of {self.elements:,}"
            told = f"{of} differ, by at most {self.error:.2g} (largest {self.largest:.2g})"
        return f"| {self.case} | {self.tensor} | {told} |"


def made(case: Case, device: str = "cpu") -> Problem:
    """The case with data by seed 0; of an `exact` one q and k are -1, 0 or 1, so that scores are whole numbers."""
    problem = problems.make(case, 0, device)
    if "exact" not in case.name:
        return problem
    q, k = (x.sign() * (x.abs() > 0.67) for x in problem.inputs[:2])
    return replace(problem, inputs=problem.inputs._replace(q=q, k=k))


class Answer(NamedTuple):
    """Of one case: by name, on the CPU, out, lse, and of a backward the gradients that there are; and its tiles."""

    tensors: dict[str, Tensor]
    tiles: str

    def has_sums_of(self, other: Answer) -> bool:
        """Whether the tiles sum in the same order; which CTA takes a tile does not matter."""
        mine, others = (re.sub(r", (single|packed|persistent|counted)(?=;|$)", "", x.tiles) for x in (self, other))
        return mine == others


def answered(problem: Problem) -> Answer:
    has_backward = problem.case.name.startswith("bwd")
    spec = replace(problem.spec, needs_backward=has_backward)
    described = dispatch.plan(spec, problem.inputs.extent, chip_of(problem.inputs.q.device)).describe()
    tiles = re.sub(r" \(.*?\)(?=; backward |$)", "", described)  # without the reasons
    if has_backward:
        out, lse, grads = problem.call_with_gradients()
        results = {"out": out, "lse": lse, **grads._asdict()}
    else:
        results = dict(zip(("out", "lse"), problem.call()))
    return Answer({name: x.cpu() for name, x in results.items() if x is not None}, tiles)


def emulated(case: Case, chip: str, sms: int) -> Answer:
    """sms: multiprocessors, of which the choice of tiles and of parts takes account."""
    from fa4.emulator import emulate

    with emulate(chip, sms=sms):
        return answered(made(case))


@dataclass(frozen=True)
class Answers:
    """What one chip answered, by case."""

    device: str
    chip: str
    sms: int
    of: dict[str, Answer]

    def save(self, path: Path) -> None:
        """Write a compressed .npz file."""
        about: dict[str, Any] = {"device": self.device, "chip": self.chip, "sms": self.sms, "dtypes": {}}
        about["tiles"] = {case: answer.tiles for case, answer in self.of.items()}
        arrays: dict[str, Any] = {}
        for case, answer in self.of.items():
            for name, x in answer.tensors.items():
                about["dtypes"][f"{case}.{name}"] = str(x.dtype).removeprefix("torch.")
                plain = torch.int16 if x.element_size() == 2 else x.dtype
                arrays[f"{case}.{name}"] = x.contiguous().view(plain).numpy()
        np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)

    @staticmethod
    def load(path: Path) -> Answers:
        with np.load(path) as file:
            about = json.loads(str(file["about"]))
            of = {case: Answer({}, tiles) for case, tiles in about["tiles"].items()}
            for key, dtype in about["dtypes"].items():
                case, _, name = key.partition(".")
                of[case].tensors[name] = torch.from_numpy(file[key]).view(getattr(torch, dtype))
        return Answers(about["device"], about["chip"], about["sms"], of)


def rows(case: str, chip: dict[str, Tensor], here: dict[str, Tensor]) -> list[Row]:
    """Compare the chip's results of a case with the emulator's. Raises ValueError if the tensors differ in shape."""
    if {name: (x.shape, x.dtype) for name, x in chip.items()} != {name: (x.shape, x.dtype) for name, x in here.items()}:
        raise ValueError(f"{case}: the file holds other tensors than the case has; keep it anew")
    return [_row(case, name, x, here[name]) for name, x in chip.items()]


def _row(case: str, name: str, a: Tensor, b: Tensor) -> Row:
    a64, b64 = a.double(), b.double()
    error = torch.where(a64 == b64, 0.0, (a64 - b64).abs())  # equal infinities differ by 0
    largest = b64[b64.isfinite()].abs().max().item() if b64.isfinite().any() else 0.0
    return Row(case, name, a.numel(), int((error != 0).sum()), error.max().item(), largest, a.dtype)


@click.group(help=__doc__)
def main() -> None: ...


@main.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def keep(file: Path) -> None:
    """Run the cases on the GPU here and write what it answers."""
    if not torch.cuda.is_available():
        raise click.UsageError("no GPU here")
    chip = chip_of(torch.device("cuda"))
    of = {case.name: answered(made(case, "cuda")) for case in CASES.values()}
    Answers(chip.name, chip.target, chip.sms, of).save(file)
    click.echo(f"{file}: {len(of)} cases of one {chip.name}")


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--only", type=PATTERN, default="", help="Regular expression on the names of cases.")
def compare(file: Path, only: str) -> None:
    """Run the cases of a file emulated, and print a Markdown table; status 1 where rounding does not explain a row."""
    answers, agree = Answers.load(file), True
    click.echo(f"| on one {answers.device} ({answers.chip}), and emulated | tensor | result |\n|---|---|---|")
    for name, chip in answers.of.items():
        if re.search(only, name):
            here = emulated(CASES[name], answers.chip, answers.sms)
            if not here.has_sums_of(chip):
                click.echo(f"| {name} | | not compared: {chip.tiles} then, {here.tiles} now |")
                continue
            for row in rows(name, chip.tensors, here.tensors):
                click.echo(str(row))
                agree &= row.agrees
    if not agree:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
