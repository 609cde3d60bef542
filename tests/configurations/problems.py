"""The calls: products of axes, each with a value on either side of every border that a plan's code asks about.

Two families. `shapes` crosses all that chooses tiles, registers, stages, schedules and who brings keys, with few
options. `options` crosses, by pairs, all that changes what a thread does with its scores, at the usual shapes.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

import fa4
from fa4.mods.frontend.trace import trace_mask, trace_score
from fa4.mods.ir.graph import Graph
from fa4.mods.ir.record import ModSpec
from fa4.runtime import nvfp4
from fa4.runtime.device import Chip, chip_by_number
from fa4.runtime.spec import MX_BLOCK, AttentionSpec, CacheSpec, Operands, ProblemSize

# Tables ask for 64, 96, 128, 192 and 256 columns, panels have 64, the portable kernels pad to 32, products to 16.
DIMS = (8, 64, 72, 96, 104, 128, 136, 192, 200, 208, 256)
WIDEST = ((320, 320), (512, 512), (408, 296), (576, 512))
PAIRS = (*itertools.product(DIMS, DIMS), *WIDEST)
USUAL = tuple((a, b) for a, b in PAIRS if a == b or (a, b) in ((192, 128), (128, 256), (256, 64), *WIDEST))
# One row; rows that heads fill a tile with; a tile, and one row more; the borders of `tiles_for`; few rows, many keys.
EXTENTS = (
    (1, 1), (1, 4096), (1, 1 << 17), (8, 300), (32, 600), (64, 512), (65, 512), (300, 300), (512, 512), (1024, 1024),
    (1025, 1025), (2048, 2048), (4096, 4096), (1 << 14, 1 << 14), (1 << 16, 1 << 16), (130, 1 << 17),
)  # fmt: skip
# (batch, query heads, key/value heads): alone, enough to fill a chip, groups of powers of two, of others, and large.
HEADS = ((1, 1, 1), (8, 16, 16), (4, 16, 4), (2, 24, 8), (1, 40, 8), (1, 64, 1), (1, 160, 1))
WINDOWS = ((None, None), (None, 0), (100, 0), (100, None))
LENGTHS = (
    {},
    {"varlen": True},
    {"has_seqused_q": True, "has_seqused_k": True},
    {"varlen": True, "has_seqused_k": True},
)
PAGES = (None, 1, 5, 8, 16, 48, 64, 128, 192, 256)


@dataclass(frozen=True)
class Problem:
    """A call as the dispatcher gets it. shared: with kernels of others on the chip. sampled: of each grid, some CTAs
    run."""

    spec: AttentionSpec
    extent: ProblemSize
    shared: bool = False
    sampled: bool = False

    def chip(self, number: int) -> Chip:
        return replace(chip_by_number(number), shared=self.shared, sampled=self.sampled)

    def __str__(self) -> str:
        changed = {field.name: getattr(self.spec, field.name) for field in fields(self.spec)}
        given = ", ".join(f"{name}={value}" for name, value in changed.items() if value not in (None, False, 0, 0.0))
        return f"{given}, extent={tuple(self.extent)}{', shared' * self.shared}{', sampled' * self.sampled}"


def _spec(dims: tuple[int, int], heads: tuple[int, int], **options: Any) -> AttentionSpec:
    options = {"dtype": torch.bfloat16} | options
    return AttentionSpec(
        head_dim=dims[0], head_dim_v=dims[1], heads_q=heads[0], heads_kv=heads[1], softmax_scale=0.1, **options
    )


def score_graph(trains: bool = False) -> Graph:
    return trace_score(fa4.scores.alibi(torch.ones(4, requires_grad=trains))).graph


def mask_graph() -> Graph:
    return trace_mask(fa4.masks.documents(torch.zeros(1, 8, dtype=torch.int32))).graph


def _functions() -> tuple[ModSpec | None, ...]:
    mask = mask_graph()
    return None, ModSpec(score=score_graph()), ModSpec(dropout=True), ModSpec(mask=mask, block=(128, 128))


def shapes(backward: bool) -> Iterator[Problem]:
    """All that chooses tiles."""
    extents = EXTENTS[1::2] if backward else EXTENTS  # a backward asks for the number of keys alone
    # head dims x sizes x masks, where a plan asks for all three
    for dims, size, (batch, *heads), window in itertools.product(PAIRS, extents, HEADS[:3], WINDOWS[:3]):
        asked = dict(window_left=window[0], window_right=window[1], needs_backward=backward)
        yield Problem(_spec(dims, tuple(heads), **asked), ProblemSize(batch, *size))
    # and, at the head dims of each row of tables, everything else that chooses one
    rest = itertools.product(USUAL, extents, HEADS[1:], WINDOWS[1:], LENGTHS[:3], _functions())
    for dims, size, (batch, *heads), window, lengths, mods in rest:
        asked = dict(window_left=window[0], window_right=window[1], needs_backward=backward)
        problem = Problem(_spec(dims, tuple(heads), mods=mods, **asked, **lengths), ProblemSize(batch, *size))
        yield problem
        if backward:
            yield replace(problem, spec=replace(problem.spec, deterministic=True))
        elif mods is None:
            yield replace(problem, shared=True)
            yield replace(problem, spec=replace(problem.spec, softcap=5.0))
            yield replace(problem, spec=replace(problem.spec, num_splits=3))
            yield replace(problem, spec=replace(problem.spec, batch_invariant=True))


def caches() -> Iterator[Problem]:
    """All that chooses tiles where keys are a cache."""
    yield from _caches(None, torch.float8_e4m3fn, torch.int8)
    yield from _caches(nvfp4.DTYPE)


def _caches(*dtypes: torch.dtype | None) -> Iterator[Problem]:
    kinds = itertools.product(PAGES, (False, True), (False, True), dtypes)
    for (pages, has_index, has_leftpad, dtype), dims in itertools.product(kinds, (*USUAL, (208, 200), (200, 208))):
        if pages is not None and has_index:
            continue  # refused with the arguments: pages are an index of their own
        cache = CacheSpec(pages, has_index, has_leftpad, dtype)
        for size, (batch, *heads), varlen in itertools.product(EXTENTS[1:8:2], HEADS[2:6:3], (False, True)):
            spec = _spec(dims, tuple(heads), cache=cache, varlen=varlen, has_seqused_k=True, window_right=0)
            yield Problem(spec, ProblemSize(batch, *size))
        for options in (dict(softcap=5.0, has_sink=True), dict(num_splits=1), dict(batch_invariant=True)):
            spec = _spec(dims, (16, 4), cache=cache, has_seqused_k=True, **options)
            yield Problem(spec, ProblemSize(4, 3, 4096))


_OPTIONS: dict[str, Sequence[Any]] = {
    "dtype": (torch.bfloat16, torch.float16),
    "heads": ((4, 4), (6, 2)),
    "window": WINDOWS,
    "lengths": LENGTHS,
    "score": ("none", "softcap", "score_mod", "trained"),
    "mask": (False, True),
    "block": (None, (128, 128), (256, 256)),
    "heads_differ": (False, True),
    "dropout": (False, True),
    "has_sink": (False, True),
    "deterministic": (False, True),
    "rows": (3, 300),
}


def pairwise(axes: dict[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which each two values of different axes meet once at least: greedily, the best of some random rows."""
    names, random_row = list(axes), random.Random(seed)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }

    def met(row: dict[str, int]) -> set:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)} & missing

    rows = []
    while missing:
        a, i, b, j = min(missing)
        drawn = [{name: random_row.randrange(len(axes[name])) for name in names} | {a: i, b: j} for _ in range(60)]
        best = max(drawn, key=lambda row: len(met(row)))
        missing -= met(best)
        rows.append({name: axes[name][index] for name, index in best.items()})
    return rows


def options(backward: bool) -> Iterator[Problem]:
    """All pairs of options at the usual head dims."""
    graphs = {False: score_graph(), True: score_graph(trains=True)}
    mask = mask_graph()
    dims_of_options = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), *WIDEST)
    for dims, row in itertools.product(dims_of_options, pairwise(_OPTIONS)):
        given = dict(row)
        kind, lengths, window, rows = (given.pop(name) for name in ("score", "lengths", "window", "rows"))
        block, has_mask = given.pop("block"), given.pop("mask")
        trains = kind == "trained" and backward
        mods = ModSpec(
            score=graphs[trains] if kind in ("score_mod", "trained") else None,
            mask=mask if has_mask else None,
            block=block,
            trained=(0,) if trains else (),
            heads_differ=given.pop("heads_differ") and block is not None,
            dropout=given.pop("dropout"),
        )
        spec = _spec(
            dims,
            given.pop("heads"),
            window_left=window[0],
            window_right=window[1],
            softcap=7.0 if kind == "softcap" else 0.0,
            mods=None if mods == ModSpec() else mods,
            needs_backward=backward,
            **given,
            **lengths,
        )
        yield Problem(spec, ProblemSize(2, rows, 300))


def eight_bits() -> Iterator[Problem]:
    """Of e4m3 and e2m1 q, k and v: forwards, and what a backward of e4m3 ones takes."""
    dims, lengths, sides = ((32, 32), (64, 64), (96, 128), (128, 128)), (300, 1 << 14), (False, True)
    for dim, heads, window, length, options_of in itertools.product(
        dims, ((4, 4), (6, 2)), WINDOWS, lengths, itertools.product(sides, sides, (0.0, 5.0))
    ):
        deterministic, has_sink, softcap = options_of
        asked = dict(deterministic=deterministic, has_sink=has_sink, softcap=softcap, operands=Operands.E4M3)
        spec = _spec(dim, heads, window_left=window[0], window_right=window[1], needs_backward=True, **asked)
        yield Problem(spec, ProblemSize(2, length, length))
        if dim[0] <= 64:
            yield Problem(replace(spec, operands=Operands.MXFP8), ProblemSize(2, length, length))
    for problem in itertools.chain(options(backward=False), itertools.islice(shapes(backward=False), 0, None, 7)):
        spec = problem.spec
        if spec.dtype == torch.bfloat16 and not (spec.head_dim % 16 or spec.head_dim_v % 16):
            yield replace(problem, spec=replace(spec, operands=Operands.E4M3))
            if spec.head_dim % MX_BLOCK == 0:
                yield replace(problem, spec=replace(spec, operands=Operands.MXFP8))
                if not spec.varlen:
                    yield replace(problem, spec=replace(spec, operands=Operands.NVFP4))


def few_keys() -> Iterator[Problem]:
    """Narrow windows of groups of eight heads, and backwards with few key blocks for a chip."""
    for dim, softcap, has_sink in itertools.product((40, 64, 128), (0.0, 5.0), (False, True)):
        spec = _spec((dim, dim), (64, 8), window_left=127, window_right=0, softcap=softcap, has_sink=has_sink)
        yield Problem(spec, ProblemSize(2, 8192, 8192))
    for dims, softcap, right in itertools.product(((64, 64), (72, 104), (128, 128)), (0.0, 5.0), (None, 0)):
        spec = _spec(dims, (14, 2), softcap=softcap, window_right=right, needs_backward=True)
        problem = Problem(spec, ProblemSize(1, 1 << 14, 600))
        yield problem
        yield replace(problem, spec=replace(spec, deterministic=True))
    yield Problem(_spec((72, 72), (16, 16), needs_backward=True), ProblemSize(8, 4096, 100))


@functools.cache
def families() -> dict[str, list[Problem]]:
    """All, by what they are enumerated for."""
    sides = False, True
    return {
        "options": [problem for backward in sides for problem in options(backward)],
        "shapes": [problem for backward in sides for problem in shapes(backward)],
        "caches": list(caches()),
        "eight bits": list(eight_bits()),
        "few keys": list(few_keys()),
    }
