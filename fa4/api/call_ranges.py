"""`fa4.compile_ahead`: compile all kernels that calls of a range of lengths and batches can meet, in parallel."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..fwd.launchers import combine_warps
from ..mods.frontend.call import MaskMod, ScoreMod
from ..mods.ir.record import ModSpec
from ..runtime import dispatch, jit, workers
from ..runtime.device import Chip, chip_by_number, chip_of
from ..runtime.plan import ForwardBackwardPlan, Plan
from ..runtime.spec import AttentionSpec, ProblemSize
from ..torch_ops import checks
from .ahead import AheadProblem, prepare, requests_of

Range = int | tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CallRange:
    """Calls of `flash_attn_func` (with varlen: of `flash_attn_varlen_func`) that differ in lengths and batch.

    Args:
        batch, seqlen_q, seqlen_k: a number, or the first and the last one of a range. seqlen_k None: as many keys as
            queries in each call. With varlen, `batch` is the number of sequences and a length that of the longest one.
        backward: training calls, whose q, k or v require a gradient.
        deterministic: training calls with deterministic=True.
        learnable_sink, dropout: whether calls have one.
        score_mod, mask_mod: as in a call. Calls with a block_mask: record them (FA4_RECORD).
        chip: target such as "sm_90a"; None for the current GPU. sms: its number of multiprocessors, if it is another
            one than that of the chip's first GPU.

    The other arguments are those of the calls; heads_kv None means heads_q, and head_dim_v None means head_dim.
    """

    head_dim: int
    heads_q: int
    batch: Range
    seqlen_q: Range
    seqlen_k: Range | None = None
    heads_kv: int | None = None
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window_size: checks.WindowSize = (None, None)
    softcap: float = 0.0
    learnable_sink: bool = False
    dropout: bool = False
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    varlen: bool = False
    backward: bool = False
    deterministic: bool = False
    backend: str = "auto"
    chip: str | None = None
    sms: int | None = None

    def __post_init__(self) -> None:
        for name in ("head_dim", "heads_q", "heads_kv", "head_dim_v", "sms"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value >= 1):
                raise ValueError(f"{name} is {value!r}, expected an int of at least 1")
        if self.heads_kv is not None and self.heads_q % self.heads_kv:
            raise ValueError(f"heads_kv is {self.heads_kv}, which does not divide heads_q, {self.heads_q}")
        for name in ("batch", "seqlen_q", "seqlen_k"):
            if getattr(self, name) is not None:
                _bounds(name, getattr(self, name))
        dispatch.check_backend_name(self.backend)

    def spec(self) -> AttentionSpec:
        """Return the spec of these calls."""
        left, right = checks.window(self.causal, self.window_size)
        return AttentionSpec(
            dtype=self.dtype,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v or self.head_dim,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv or self.heads_q,
            softmax_scale=self.head_dim**-0.5,
            window_left=left,
            window_right=right,
            softcap=self.softcap,
            has_sink=self.learnable_sink,
            varlen=self.varlen,
            deterministic=self.deterministic,
            needs_backward=self.backward,
            mods=self._mods(),
        )

    def _mods(self) -> ModSpec | None:
        from ..mods.frontend.trace import trace_mask, trace_score

        score = None if self.score_mod is None else trace_score(self.score_mod).graph
        mask = None if self.mask_mod is None else trace_mask(self.mask_mod).graph
        trained = () if score is None else tuple(sorted({scatter.tensor for scatter in score.scatters}))
        mods = ModSpec(score, mask, trained=trained if self.backward else (), dropout=self.dropout)
        return None if mods == ModSpec() else mods

    def problems(self) -> list[AheadProblem]:
        """Return what `problems_of` returns for these calls.

        Raises:
            ValueError: the chip is unknown, or there is no GPU and none is named.
        """
        ranges = Ranges(self.batch, self.seqlen_q, self.seqlen_k)
        return problems_of(self.spec(), ranges, _chip(self.chip, self.sms), self.backend)


class Ranges(NamedTuple):
    """Ranges of sizes, see `CallRange`."""

    batch: Range
    seqlen_q: Range
    seqlen_k: Range | None = None

    def extents(self) -> Iterator[ProblemSize]:
        """Yield sizes that stand for all: choices change at lengths that are round numbers, or one above."""
        lengths: Iterable[tuple[int, int]]
        if self.seqlen_k is None:
            batches = _steps("batch", self.batch, bits=2)
            lengths = [(n, n) for n in _steps("seqlen_q", self.seqlen_q, bits=4)]
        else:
            batches = _steps("batch", self.batch, bits=1)
            keys = _steps("seqlen_k", self.seqlen_k, bits=1)
            lengths = itertools.product(_steps("seqlen_q", self.seqlen_q, bits=2), keys)
        yield from (ProblemSize(batch, *both) for both, batch in itertools.product(lengths, batches))


def problems_of(spec: AttentionSpec, ranges: Ranges, chip: Chip, backend: str = "auto") -> list[AheadProblem]:
    """Return a problem for each combination of kernels that calls of a range need.

    Raises:
        NoBackend: no backend serves these calls on the chip.
    """
    row = dispatch.select(spec, chip, backend)
    found: dict[object, ProblemSize] = {}
    for extent in dict.fromkeys(extent.planned(spec) for extent in ranges.extents()):
        found.setdefault(_kernels(row.plan(spec.with_positive_scale(), extent, chip)), extent)
    return [AheadProblem(chip.number, spec, extent, backend, chip.sms) for extent in found.values()]


def _kernels(plan: Plan) -> object:
    """Return what two problems with the same kernels have in common."""
    if not isinstance(plan, ForwardBackwardPlan):
        return None
    forward, backward = plan.both()
    split = combine_warps(plan.splits) if plan.splits > 1 else 0
    return forward.cfg, split, plan.spec.needs_backward and (backward.kernel.name, backward.config(has_dlse=False))


def _bounds(name: str, value: Range) -> tuple[int, int]:
    first, last = (value, value) if isinstance(value, int) else value if len(value) == 2 else (0, 0)
    if not (type(first) is type(last) is int and 1 <= first <= last):
        raise ValueError(f"{name} is {value!r}, expected an int of at least 1, or the first and the last of a range")
    return first, last


def _steps(name: str, value: Range, bits: int) -> list[int]:
    """Return the numbers of a range with that many significant bits, the numbers one above, and both ends."""
    first, last = _bounds(name, value)
    steps, n = {first, last}, 1
    while n <= last:
        steps |= {n, n + 1}
        n += 1 << max(n.bit_length() - bits, 0)
    return sorted(x for x in steps if first <= x <= last)


def _chip(target: str | None, sms: int | None) -> Chip:
    if target is not None:
        try:
            return chip_by_number(int(target.removeprefix("sm_").rstrip("af")), sms=sms)
        except ValueError as error:
            raise ValueError(f"chip is {target!r}, expected a target such as 'sm_90a': {error}") from None
    if not torch.cuda.is_available():
        raise ValueError("chip is None, and there is no GPU: name the target, for example chip='sm_90a'")
    found = chip_of(torch.device("cuda"))
    return chip_by_number(found.number, sms=found.sms if sms is None else sms)


def compile_ahead(
    *ranges: CallRange, directory: str | os.PathLike | None = None, jobs: int | None = None, progress: bool = True
) -> int:
    """Compile all kernels that calls of some ranges can meet, unless they are on disk, in several processes at once.

    Ranks that start together compile each kernel once. Without a GPU, name the chip of each range.

    Args:
        ranges: `CallRange`s.
        directory: for FA4_CACHE_DIR, with all that an image without a compiler needs; None: the disk cache.
        jobs: processes; None: as many as CPU cores, at most one for each kernel.
        progress: show a progress bar on a terminal, elsewhere a line for each kernel, if there is more than one.

    Returns:
        The number of kernels that calls of the ranges need.

    Raises:
        TypeError: an argument is no `CallRange`.
        ValueError: a range is wrong, nothing serves it (`NoBackend`), or there is no disk cache.
        WorkerFailed: a kernel could not be compiled.
    """
    for x in ranges:
        if not isinstance(x, CallRange):
            raise TypeError(f"ranges has {x!r}, expected fa4.CallRange objects")
    if jobs is not None and not (type(jobs) is int and jobs >= 1):
        raise ValueError(f"jobs is {jobs!r}, expected an int of at least 1")
    requests: dict[tuple, jit.Request] = {}
    for problem in dict.fromkeys(problem for x in ranges for problem in x.problems()):
        requests |= requests_of(problem)
    compile_requests(requests.values(), folder_for(directory), jobs, progress)
    return len(requests)


def folder_for(directory: str | os.PathLike | None) -> Path:
    """Return the folder of entries of a directory, or of the disk cache."""
    if directory is not None:
        return prepare(Path(directory))
    folder = jit.cache_directory()
    if folder is None:
        raise ValueError("directory is None, and there is no disk cache (FA4_CACHE=0, or see the warning)")
    return folder


def compile_requests(
    requests: Iterable[jit.Request], folder: Path, jobs: int | None = None, progress: bool = True
) -> None:
    """Compile kernels into a folder of entries, those that are not there.

    Raises:
        WorkerFailed: a kernel could not be compiled; the others are.
    """
    # (`import fa4` does not import it.)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    missing = [request for request in requests if not request.is_in(folder)]
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(missing))
    console, errors = Console(stderr=True), []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    shows = progress and len(missing) > 1
    with Progress(*columns, console=console, disable=not (shows and console.is_terminal)) as bar:
        task = bar.add_task("fa4 compiles kernels", total=len(missing))

        def done(request: jit.Request, error: str | None) -> None:
            bar.advance(task)
            if error is not None:
                errors.append(f"{request.key[0]}: {error}")
            elif shows and not console.is_terminal:
                count = int(bar.tasks[0].completed)
                console.print(f"fa4 compiled {request.key[0]}, {count} of {len(missing)}", highlight=False)

        workers.compile_all(missing, folder, jobs, done)
    if errors:
        raise workers.WorkerFailed("; ".join(errors))
