"""Dispatch table: backend x chips x features. The first row that fits serves a call; else the error lists why.

`explain`, the refusals and the README's support table all read `BACKENDS`; a new backend is a new row.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import jit, limits, recording
from .device import Chip
from .limits import Limit
from .plan import Plan
from .spec import MOST_KEYS_OF_8BIT_P, AttentionSpec, Feature, ProblemSize
from .toolchain import COMPILER, is_installed

_HALF = (torch.float16, torch.bfloat16)
# Without them, numbers of 8 and 4 bits are dequantised before.
_LOW_FEATURES = frozenset((Feature.OPERANDS_8BIT, Feature.BLOCK_SCALES, Feature.OPERANDS_4BIT))
ALL_FEATURES = frozenset(Feature) - _LOW_FEATURES
_BACKWARD_FEATURES = frozenset((Feature.BACKWARD, Feature.DETERMINISTIC, Feature.CAPTURED_GRADIENTS))
_CACHE_FEATURES = frozenset(
    (
        Feature.PAGES,
        Feature.CACHE_ROWS,
        Feature.CACHE_VARLEN,
        Feature.CACHE_8BIT,
        Feature.CACHE_4BIT,
        Feature.SCALED_ROWS,
    )
)
MODS = frozenset((Feature.SCORE_MOD, Feature.MASK_MOD, Feature.BLOCK_MASK, Feature.CAPTURED_GRADIENTS, Feature.DROPOUT))


@dataclass(frozen=True, slots=True)
class HeadDims:
    """Supported (head_dim, head_dim_v): multiples of `multiple` up to `largest`, and additional `pairs`. largest: None
    for no bound, 0 for `pairs` alone. largest_v: of head_dim_v; None for `largest`."""

    multiple: int = 1
    largest: int | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    largest_v: int | None = None

    def takes(self, head_dim: int, head_dim_v: int) -> bool:
        def regular(d: int, largest: int | None) -> bool:
            return d % self.multiple == 0 and (largest is None or d <= largest)

        is_regular = regular(head_dim, self.largest) and regular(head_dim_v, self.largest_v or self.largest)
        return is_regular or (head_dim, head_dim_v) in self.pairs

    def __str__(self) -> str:
        if self.largest is None:
            return "any"
        largest = self.largest if self.largest_v is None else (self.largest, self.largest_v)
        rule = [f"multiples of {self.multiple} up to {largest}"] if self.largest else []
        return ", ".join([*rule, *(f"({d}, {dv})" for d, dv in self.pairs)])


@dataclass(frozen=True, slots=True)
class Backend:
    """One row of the table.

    `module` is imported when the row is first used and offers a class `Plan`, see `fa4.runtime.plan`. A backend may
    have further rows, for more shapes with fewer features, or with the backward of another backend.
    """

    name: str
    summary: str
    chips: str  # text of `on`
    on: Callable[[Chip], bool]
    dtypes: tuple[torch.dtype, ...]
    head_dims: HeadDims
    features: frozenset[Feature]
    module: str
    requires: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    backward: str | None = None  # backend whose plan has the backward; None for this one
    least_queries: int = 1  # with fewer, 8-bit q, k and v are dequantised
    most_keys: int | None = None  # with more, too

    @property
    def multiplies_low(self) -> bool:
        """Whether the row is of products of 8- or 4-bit numbers."""
        return bool(self.features & {Feature.OPERANDS_8BIT, Feature.OPERANDS_4BIT})

    def refusals(self, spec: AttentionSpec, chip: Chip) -> list[str]:
        """Return every reason why this backend cannot serve the problem on `chip`; empty if it can."""
        reasons = []
        if not self.on(chip):
            reasons.append(f"needs {self.chips} (this is {chip})")
        elif self.requires and not chip.compiles:
            reasons.append(chip.no_target)
        reasons += [
            f"needs the module {name}, which is not installed"
            for name in self.requires
            if not (is_installed(name) or (name == COMPILER and jit.can_run_kernels(chip)))
        ]
        if spec.dtype not in self.dtypes:
            reasons.append(f"lacks dtype {_dtype_name(spec.dtype)} (has {', '.join(map(_dtype_name, self.dtypes))})")
        if not self.head_dims.takes(spec.head_dim, spec.head_dim_v):
            reasons.append(f"lacks head_dim ({spec.head_dim}, {spec.head_dim_v}) (has {self.head_dims})")
        for limit in self.limits:
            reasons += dict.fromkeys(limit.refusals(spec))  # several parts may have the same reason
        lacking = spec.features() - self.features
        reasons += [f"lacks {feature.value}" for feature in Feature if feature in lacking]
        return reasons

    def plan(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> Plan:
        """Return a new plan of a problem that the row serves."""
        made = _plan_class(self.module)(spec, extent, chip)
        if self.backward is not None and spec.needs_backward:
            other = next(row for row in BACKENDS if row.name == self.backward)
            made.take_backward(_plan_class(other.module)(spec, extent, chip))
        return made


_LIMITS = limits.mod_limits, limits.block_limits, limits.captured_limits, limits.narrow_cache_limits
_CUTE = (COMPILER, "tvm_ffi")
_WIDE = HeadDims(multiple=8, largest=256)
_SM80 = Backend(
    name="sm80",
    summary="CuTe DSL, cp.async and mma.sync: every NVIDIA GPU since Ampere",
    chips="an NVIDIA GPU of compute capability 8.0 or newer",
    on=lambda chip: chip.number >= 80,
    dtypes=_HALF,
    head_dims=HeadDims(multiple=8, largest=576),
    features=ALL_FEATURES,
    module="fa4.sm80.plan",
    requires=_CUTE,
    limits=(*_LIMITS, limits.nvfp4_limits),
)
_SM90 = Backend(
    name="sm90",
    summary="CuTe DSL, wgmma and TMA: Hopper GPUs",
    chips="sm_90",
    on=lambda chip: chip.number == 90,
    dtypes=_HALF,
    head_dims=HeadDims(multiple=8, largest=128, pairs=((192, 128),)),
    features=ALL_FEATURES,
    module="fa4.sm90.plan",
    requires=_CUTE,
    limits=(*_LIMITS, limits.sm90_dropout_limits),
)
_SM90_WIDE = replace(_SM90, head_dims=_WIDE, limits=_LIMITS)
_SM100 = replace(
    _SM90,
    name="sm100",
    summary="CuTe DSL, tcgen05 and TMA: Blackwell datacenter GPUs",
    chips="sm_100 or sm_103",
    on=lambda chip: chip.number in (100, 103),
    head_dims=HeadDims(multiple=8, largest=576),
    module="fa4.sm100.plan",
    limits=(*_LIMITS, limits.sm100_page_limits, limits.nvfp4_limits),
)

_SM90_LATENT = replace(
    _SM90,
    summary="the same, the forward of latent attention",
    head_dims=HeadDims(largest=0, pairs=((576, 512), (512, 512))),
    features=_SM90.features - MODS - _BACKWARD_FEATURES - {Feature.CACHE_4BIT},
    module="fa4.sm90.latent.plan",
    limits=(limits.latent_limits,),
)

_PORTABLE_BACKWARD: dict[str, Any] = dict(summary="the same, with the backward of sm80", backward=_SM80.name)
_SM90_WIDEST = replace(
    _SM90,
    **_PORTABLE_BACKWARD,
    head_dims=HeadDims(multiple=8, largest=576, largest_v=512),
    features=_SM90.features - {Feature.CACHE_8BIT, Feature.CACHE_4BIT, Feature.SCALED_ROWS, Feature.DROPOUT},
    module="fa4.sm90.fwd.widest.plan",
    limits=(limits.mod_limits, limits.block_limits, limits.captured_limits, limits.scattered_limits),
)

_SM90_FP8 = replace(
    _SM90,
    summary="the same, products of e4m3",
    head_dims=HeadDims(multiple=16, largest=256),
    features=frozenset(
        (
            Feature.CAUSAL, Feature.WINDOW, Feature.GQA, Feature.HEAD_DIM_V, Feature.SEQUSED, Feature.SOFTCAP,
            Feature.SINK, Feature.OPERANDS_8BIT, Feature.BATCH_INVARIANT,
        )
    ),
    module="fa4.sm90.fwd.fp8.plan",
    limits=(),
    least_queries=256,  # with fewer rows, reading keys is what takes time, and a transposition would read v twice
)  # fmt: skip
_SM100_FP8 = replace(
    _SM100,
    summary="CuTe DSL, tcgen05 and TMA, products of e4m3",
    head_dims=HeadDims(multiple=16, largest=256),
    features=_SM100.features - _CACHE_FEATURES - _BACKWARD_FEATURES | {Feature.OPERANDS_8BIT},
    limits=(limits.mod_limits, limits.block_limits),
)
_SM100_FP8_TRAINING = replace(
    _SM100_FP8,
    summary="the same, with the backward",
    head_dims=HeadDims(multiple=16, largest=128),
    features=_SM90_FP8.features - {Feature.SEQUSED} | {Feature.BACKWARD, Feature.DETERMINISTIC},
    limits=(),
    most_keys=MOST_KEYS_OF_8BIT_P,
)

_LEAST_QUERIES_OF_BLOCKS = 129  # fewer are read from memory faster than they are multiplied
_SM100_MXFP8_TRAINING = replace(
    _SM100_FP8_TRAINING,
    summary="the same, with the backward and scales of blocks of 32 x 32 numbers",
    head_dims=HeadDims(multiple=16, largest=64),
    features=_SM100_FP8_TRAINING.features - {Feature.BATCH_INVARIANT} | {Feature.BLOCK_SCALES},
    limits=(limits.block_scale_limits,),
    least_queries=_LEAST_QUERIES_OF_BLOCKS,
)

_SM100_MXFP8 = replace(
    _SM100_FP8,
    summary="CuTe DSL, tcgen05 and TMA, products of e4m3 with scales of blocks of 32 numbers",
    head_dims=HeadDims(multiple=16, largest=128, pairs=((192, 128),)),
    features=_SM100_FP8.features - {Feature.BLOCK_MASK, Feature.BATCH_INVARIANT} | {Feature.BLOCK_SCALES},
    limits=(limits.mod_limits, limits.block_scale_limits),
    least_queries=_LEAST_QUERIES_OF_BLOCKS,
)

_SM120_FP8 = replace(
    _SM100_FP8,
    name="sm120",
    summary="CuTe DSL, block-scaled mma.sync and TMA, products of e4m3: consumer Blackwell GPUs",
    chips="sm_120 or sm_121",
    on=lambda chip: chip.number in (120, 121),
    head_dims=HeadDims(multiple=16, largest=128),
    # Where dropout drops the largest P of a row, the rounding of another one would count by up to 6 %.
    features=_SM100_FP8.features - {Feature.DROPOUT},
    module="fa4.sm120.plan",
    limits=(limits.mod_limits, limits.block_limits, limits.only_8bit_limits),
)
_SM120_MXFP8 = replace(
    _SM120_FP8,
    summary="the same, with scales of blocks of 32 numbers",
    features=_SM120_FP8.features | {Feature.BLOCK_SCALES},
    limits=(*_SM120_FP8.limits, limits.block_scale_limits),
)
_SM120_NVFP4 = replace(
    _SM120_FP8,
    summary="the same, products of e2m1 with scales of blocks of 16 numbers",
    features=_SM120_FP8.features - {Feature.OPERANDS_8BIT, Feature.VARLEN} | {Feature.OPERANDS_4BIT},
    limits=(*_SM120_FP8.limits, limits.e2m1_limits),
)

# In order of preference.
BACKENDS: tuple[Backend, ...] = (
    _SM100,
    _SM90,
    replace(
        _SM90_WIDE,
        summary="the same, without functions and masks of callers",
        features=_SM90.features - MODS | {Feature.DROPOUT},
    ),
    replace(_SM90_WIDE, **_PORTABLE_BACKWARD, module="fa4.sm90.fwd.plan"),
    _SM90_LATENT,
    _SM90_WIDEST,
    _SM90_FP8,
    _SM100_FP8,
    _SM100_FP8_TRAINING,
    _SM100_MXFP8_TRAINING,
    _SM100_MXFP8,
    _SM120_FP8,
    _SM120_MXFP8,
    _SM120_NVFP4,
    _SM80,
    Backend(
        name="torch",
        summary="tiled torch: online softmax, O(N) memory, any device; always deterministic",
        chips="any torch device",
        on=lambda chip: True,
        dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        head_dims=HeadDims(),
        features=ALL_FEATURES,
        module="fa4.fallback",
    ),
)


def _plan_class(module: str) -> type[Plan]:
    return importlib.import_module(module).Plan


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def backend_names() -> tuple[str, ...]:
    """Return the name of every backend, once, in order of preference."""
    return tuple(dict.fromkeys(row.name for row in BACKENDS))


def check_backend_name(backend: str) -> None:
    """Raise ValueError unless `backend` is "auto" or the name of a row."""
    if backend != "auto" and backend not in backend_names():
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(map(repr, ('auto', *backend_names())))}")


class NoBackend(ValueError):
    """No backend, or not the named one, can serve the call; the message lists the reasons of each."""


@functools.lru_cache(maxsize=4096)
def select(spec: AttentionSpec, chip: Chip, backend: str = "auto") -> Backend:
    """Return the first backend that fits, or the named one.

    Raises:
        NoBackend: the named backend cannot serve the problem, or (auto) none can.
        ValueError: no backend has that name.
    """
    row, refused = _judge(spec, chip, backend)
    if row is None:
        named = [(name, reasons) for name, reasons in refused if backend in ("auto", name)]
        raise NoBackend(f"no backend can run this on {chip}: {text_of(named)}")
    return row


def for_16_bits(backend: str) -> str:
    """Return the backend of the part of a call on 8-bit numbers that is computed on 16-bit ones: "auto" in place of one
    whose kernels have products of 8 bits alone."""
    rows = [row for row in BACKENDS if row.name == backend]
    return "auto" if rows and all(row.multiplies_low for row in rows) else backend


def takes_8bit_operands(spec: AttentionSpec, extent: ProblemSize, chip: Chip, backend: str = "auto") -> bool:
    """Return whether a kernel multiplies the 8- or 4-bit numbers of a spec with `operands`, and it pays."""
    queries, keys = extent.max_seqlen_q, extent.max_seqlen_k
    if keys == 0 or spec.softmax_scale < 0:
        return False
    rows = (row for row in BACKENDS if backend in ("auto", row.name))
    large = (row for row in rows if row.least_queries <= queries and (row.most_keys is None or keys <= row.most_keys))
    return any(not row.refusals(spec, chip) for row in large)


def plan(spec: AttentionSpec, extent: ProblemSize, chip: Chip, backend: str = "auto") -> Plan:
    """Return the cached plan of the selected backend, for `spec.with_positive_scale()` and `extent.planned(spec)`."""
    return planned(spec, extent.planned(spec), chip, backend)


@functools.lru_cache(maxsize=4096)
def planned(spec: AttentionSpec, extent: ProblemSize, chip: Chip, backend: str) -> Plan:
    """Return the cached plan for exactly this extent."""
    result = select(spec, chip, backend).plan(spec.with_positive_scale(), extent, chip)
    if result.compiled:
        recording.problem(spec, extent, chip, backend)
    return result


def _judge(spec: AttentionSpec, chip: Chip, backend: str) -> tuple[Backend | None, Refused]:
    """Return the row that serves the problem, and the rows before it. ValueError: no backend has that name."""
    check_backend_name(backend)
    refused: list[tuple[str, tuple[str, ...]]] = []
    for row in BACKENDS:
        if not row.on(chip) and any(name == row.name for name, _ in refused):
            continue  # a further row of another chip's backend gives no further reason
        if backend == "auto" and spec.operands is None and row.multiplies_low:
            continue  # nor does a row of such products for a call on 16-bit numbers
        reasons = row.refusals(spec, chip)
        if backend not in ("auto", row.name):
            reasons.insert(0, f"backend={backend!r} was asked for")
        if not reasons:
            return row, tuple(refused)
        if (row.name, tuple(reasons)) not in refused:  # several rows of a backend may have the same reasons
            refused.append((row.name, tuple(reasons)))
    return None, tuple(refused)


_warned = False


def warn_of_tiled_torch(spec: AttentionSpec, chip: Chip, backend: str) -> None:
    """Warn once, with the reasons, if "auto" selects plain torch on an accelerator: it is several times slower than
    kernels."""
    global _warned
    if _warned or backend != "auto" or chip.emulated or chip.device_type in ("cpu", "meta"):
        return
    try:
        row = select(spec, chip, backend)
    except NoBackend:  # the call will raise it
        return
    if row.requires:
        return
    _warned = True
    _, refused = _judge(spec, chip, backend)
    warnings.warn(
        f"fa4 runs attention on {chip} in plain torch, which is several times slower than a kernel: "
        f"{text_of(refused)}. Said once; pass backend={row.name!r} to choose it, or filter this UserWarning.",
        stacklevel=2,
    )


Refused = tuple[tuple[str, tuple[str, ...]], ...]
"""Names of refused rows, with reasons."""


def text_of(refused: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    return "; ".join(f"{name} {', '.join(reasons)}" for name, reasons in refused)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Result of `fa4.explain`; prints as a few lines of text."""

    spec: AttentionSpec
    extent: ProblemSize
    chip: Chip
    chosen: str | None
    tiles: str
    refused: Refused
    visited: float | None = None  # fraction of blocks that the block mask lists
    progress: str = ""  # what CTAs wait for
    backward: str | None = None  # backend of the backward, if another one

    def __str__(self) -> str:
        backward = "" if self.backward is None else f", backward {self.backward}"
        lines = [f"chip     {self.chip}", f"backend  {self.chosen or 'none'}{backward}"]
        if self.tiles:
            lines.append(f"tiles    {self.tiles}")
        if self.progress:
            lines.append(f"progress {self.progress}")
        if self.spec.mods is not None:
            share = "" if self.visited is None else f"; {self.visited:.1%} of the blocks are visited"
            lines.append(f"mods     {self.spec.mods}{share}")
        lines += [f"not {name}: {'; '.join(reasons)}" for name, reasons in self.refused]
        return "\n".join(lines)


def explain(
    spec: AttentionSpec, extent: ProblemSize, chip: Chip, backend: str = "auto", visited: float | None = None
) -> Explanation:
    """Return which backend serves the problem, with which tiles, and why the preferred ones do not. visited: see
    `Explanation`.

    Raises:
        ValueError: no backend has that name.
    """
    row, refused = _judge(spec, chip, backend)
    if row is None:
        return Explanation(spec, extent, chip, None, "", refused, visited)
    chosen = plan(spec, extent, chip, backend)
    backward = row.backward if spec.needs_backward else None
    return Explanation(spec, extent, chip, row.name, chosen.describe(), refused, visited, chosen.progress, backward)
