"""From calls to the kernels that may differ in whether they compile.

A compilation fails for one of three reasons. An instruction or a role has too few registers, or shared memory too few
bytes; the DSL refuses a shape; or Python code that only some combination of options reaches is wrong.

The first two follow from tiles, from who brings keys, and from head dims. Of each such `structure` the smallest and the
largest head dims are compiled, for what grows with a head dim is largest there, and the largest that products pad. What
a thread does with its scores takes registers too, but ptxas spills those.

The third follows from options, of which code asks for two at a time at most (a mask and a score function, a length and
a mask): each pair of options is compiled at each of the usual head dims. The order of work tiles (`ORDER`) is code of
its own, which asks for no other option: each combination of its fields is compiled once.

Numbers that are arguments of a kernel (lengths, widths of windows, the scale, parts) are in no configuration.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fa4.core.program import Program, compile_key
from fa4.runtime import dispatch
from fa4.runtime.device import Chip
from fa4.runtime.plan import ForwardBackwardPlan

from .problems import Problem, families

# (10 * major + minor, backend): each backend on the chips whose numbers choose other kernels. Orin (87) has few
# multiprocessors: it cuts keys into parts less often. The number of multiprocessors, a constant of the code, is
# another of B300 (103) than of B200 (100). On a B200, sm80 takes single rows of pages of wide heads. Chips that are not
# here: 89 and 121 have the shared memory of 86 and 120, and choose the same structures; 110 has that of 100, and needs
# a CuTe DSL for CUDA 13.
TARGETS = (
    (80, "sm80"), (86, "sm80"), (87, "sm80"), (90, "sm80"), (90, "sm90"), (100, "sm80"), (100, "sm100"), (103, "sm100"),
    (120, "sm80"), (120, "sm120"),
)  # fmt: skip
# Fields that say what a thread does with its scores, not how many registers, bytes or threads there are.
_POINTWISE = frozenset(
    ("dtype", "group", "has_left", "has_right", "has_softcap", "has_sink", "has_seqused_q", "has_seqused_k", "has_dlse",
     "rescale_threshold", "polynomial", "sms", "smem_bytes")
)  # fmt: skip
ORDER = (
    "schedule",
    "ping_pong",
    "sawtooth",
    "fixed_parts",
    "first_writer",
    "pairs_per_group",
    "chained",
    "deterministic",
)


@dataclass(frozen=True)
class Kernel:
    """A program with its configuration, and a call that asks for it."""

    program: Program
    cfg: Any
    chip: Chip
    problem: Problem

    @property
    def key(self) -> tuple:
        return self.chip.number, *compile_key(self.program.name, self.cfg)

    @property
    def dims(self) -> tuple[int, int]:
        return self.cfg.head_dim, self.cfg.head_dim_v

    def compile(self) -> None:
        self.program.compile(self.cfg, self.chip)

    def __str__(self) -> str:
        return f"sm_{self.chip.number} {self.program.name}: {self.problem}"


def planned(problem: Problem, number: int, backend: str) -> list[Kernel] | None:
    """The kernels of a call; None if the backend refuses it, with a reason."""
    chip = problem.chip(number)
    row = next((row for row in dispatch.BACKENDS if row.name == backend and not _refusals(row, problem, chip)), None)
    if row is None:
        return None
    plan = row.plan(problem.spec.with_positive_scale(), problem.extent, chip)
    assert isinstance(plan, ForwardBackwardPlan) and plan.describe()
    kernels = [Kernel(plan._forward.kernel.load(), plan._forward.cfg, chip, problem)]
    if problem.spec.needs_backward:
        backward = plan._backward
        kernels += [
            Kernel(backward.kernel.load(), backward.config(has_dlse), chip, problem) for has_dlse in (False, True)
        ]
    return kernels


def _refusals(row: dispatch.Backend, problem: Problem, chip: Chip) -> list[str]:
    reasons = row.refusals(problem.spec, chip)
    assert all(isinstance(reason, str) and reason for reason in reasons)
    return reasons


def structure(kernel: Kernel) -> tuple:
    """What may decide whether registers, bytes and shapes fit, but head dims."""
    cfg, own = kernel.cfg, []
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if field.name in ("head_dim", "head_dim_v", *ORDER) or field.name in _POINTWISE:
            continue
        if field.name == "packed_heads":  # none; a power of two; others leave rows of a tile empty
            value = 1 if value == 1 else 2 if value & (value - 1) == 0 else 3
        elif field.name == "varlen":
            value = cfg.lengths_vary
        elif field.name == "mods":
            value = cfg.has_blocks
        elif field.name == "cache" and value is not None:
            value = value.converts_kv and value.bits, value.is_scattered, value.pieces(cfg.tile_n) > 1
        own.append((field.name, value))
    return kernel.chip.number, kernel.program.name, tuple(own)


def order(kernel: Kernel) -> tuple:
    """What decides how work tiles follow each other."""
    own = tuple(getattr(kernel.cfg, name, None) for name in ORDER)
    return kernel.chip.number, kernel.program.name, own, kernel.cfg.has_blocks, kernel.cfg.lengths_vary


class Representatives:
    """Kernels that stand for all that were added."""

    def __init__(self) -> None:
        self.seen: set[tuple] = set()
        self._chosen: dict[tuple, tuple[int, Kernel]] = {}

    def add(self, kernel: Kernel) -> None:
        if kernel.key in self.seen:
            return
        self.seen.add(kernel.key)
        (dim, dim_v), own = kernel.dims, structure(kernel)
        self._offer((own, "smallest"), -dim - dim_v, kernel)
        self._offer((own, "largest"), dim + dim_v, kernel)
        if dim % 16 or dim_v % 16:
            self._offer((own, "padded"), dim + dim_v, kernel)
        self._offer((order(kernel), "order"), 0, kernel)

    def always(self, kernel: Kernel) -> None:
        """One that is compiled whatever else is."""
        self.add(kernel)
        self._offer((kernel.key, "itself"), 0, kernel)

    def _offer(self, kind: tuple, rank: int, kernel: Kernel) -> None:
        if kind not in self._chosen or rank > self._chosen[kind][0]:
            self._chosen[kind] = rank, kernel

    def chosen(self) -> list[Kernel]:
        """Each once."""
        return list({kernel.key: kernel for _, kernel in self._chosen.values()}.values())


def enumerated(number: int, backend: str, every: int = 1, first: int = 0) -> Representatives:
    """Of all calls to a backend on a chip, or of every n-th, from `first` on.

    Raises:
        AssertionError: a call is neither refused with a reason nor planned; it says which.
    """
    found, is_first = Representatives(), backend not in [b for n, b in TARGETS[: TARGETS.index((number, backend))]]
    for family, problems in families().items():
        always = family == "options" and is_first  # the same code on every chip of the backend
        for problem in problems[first % every :: every] if not always else problems:
            try:
                kernels = planned(problem, number, backend) or []
            except Exception as error:
                raise AssertionError(f"{backend} on sm_{number} neither refuses nor plans {problem}") from error
            for kernel in kernels:
                (found.always if always else found.add)(kernel)
    return found
