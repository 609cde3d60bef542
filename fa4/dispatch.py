"""One table: backend x chips x features. The dispatcher picks the first row that fits, or lists why none does.

`explain`, the refusals and the README's support table all read `BACKENDS`; a new backend is a new row.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from .device import Chip
from .spec import AttentionSpec, Feature

_HALF = (torch.float16, torch.bfloat16)
ALL_FEATURES = frozenset(Feature)


@dataclass(frozen=True, slots=True)
class HeadDims:
    """Which (head_dim, head_dim_v) a backend takes: multiples of `multiple` up to `largest`, and `pairs` besides."""

    multiple: int = 1
    largest: int | None = None
    pairs: tuple[tuple[int, int], ...] = ()

    def takes(self, head_dim: int, head_dim_v: int) -> bool:
        def regular(d: int) -> bool:
            return d % self.multiple == 0 and (self.largest is None or d <= self.largest)

        return (head_dim, head_dim_v) in self.pairs or (regular(head_dim) and regular(head_dim_v))

    def __str__(self) -> str:
        if self.largest is None:
            return "any"
        rule = f"multiples of {self.multiple} up to {self.largest}"
        return rule + "".join(f", ({d}, {dv})" for d, dv in self.pairs)


@dataclass(frozen=True, slots=True)
class Backend:
    """One row of the table.

    `module` is imported when the row is first used and offers `forward(inputs, spec, chip) -> (out, lse)`,
    `backward(inputs, spec, chip, out, lse, dout, dlse) -> Gradients` and `describe(spec, chip) -> str`.
    """

    name: str
    summary: str
    chips: str  # what `on` accepts, in words
    on: Callable[[Chip], bool]
    dtypes: tuple[torch.dtype, ...]
    head_dims: HeadDims
    features: frozenset[Feature]
    module: str
    requires: tuple[str, ...] = ()

    def refusals(self, spec: AttentionSpec, chip: Chip) -> list[str]:
        """Every reason why this backend cannot serve `spec` on `chip`; empty when it can."""
        reasons = []
        if not self.on(chip):
            reasons.append(f"needs {self.chips} (this is {chip})")
        reasons += [
            f"needs the module {name}, which is not installed" for name in self.requires if not _installed(name)
        ]
        if spec.dtype not in self.dtypes:
            reasons.append(f"lacks dtype {_dtype_name(spec.dtype)} (has {', '.join(map(_dtype_name, self.dtypes))})")
        if not self.head_dims.takes(spec.head_dim, spec.head_dim_v):
            reasons.append(f"lacks head_dim ({spec.head_dim}, {spec.head_dim_v}) (has {self.head_dims})")
        reasons += [f"lacks {feature.value}" for feature in Feature if feature in spec.features() - self.features]
        return reasons

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


# Order is preference.
BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="sm100",
        summary="CuTe DSL, tcgen05 and TMA: Blackwell datacenter GPUs",
        chips="sm_100 or sm_103",
        on=lambda chip: chip.number in (100, 103),
        dtypes=_HALF,
        head_dims=HeadDims(multiple=8, largest=128, pairs=((192, 128),)),
        features=ALL_FEATURES,
        module="fa4.sm100.backend",
        requires=("cutlass", "tvm_ffi"),
    ),
    Backend(
        name="sm80",
        summary="CuTe DSL, cp.async and mma.sync: every NVIDIA GPU since Ampere",
        chips="an NVIDIA GPU of compute capability 8.0 or newer",
        on=lambda chip: chip.number >= 80,
        dtypes=_HALF,
        head_dims=HeadDims(multiple=8, largest=256),
        features=ALL_FEATURES,
        module="fa4.sm80.backend",
        requires=("cutlass", "tvm_ffi"),
    ),
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


@functools.cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def backend_names() -> tuple[str, ...]:
    return tuple(row.name for row in BACKENDS)


def check_backend_name(backend: str) -> None:
    """Raise ValueError unless `backend` is "auto" or the name of a row."""
    if backend != "auto" and backend not in backend_names():
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(map(repr, ('auto', *backend_names())))}")


class NoBackend(ValueError):
    """No backend, or not the named one, can serve the call; the message lists each with its reasons."""


@functools.lru_cache(maxsize=4096)
def select(spec: AttentionSpec, chip: Chip, backend: str = "auto") -> Backend:
    """The first backend that fits, or the named one.

    Raises:
        NoBackend: the named backend cannot serve the spec, or (auto) none can.
        ValueError: no backend has that name.
    """
    check_backend_name(backend)
    rows = [row for row in BACKENDS if backend in ("auto", row.name)]
    refused = []
    for row in rows:
        reasons = row.refusals(spec, chip)
        if not reasons:
            return row
        refused.append(f"{row.name} {', '.join(reasons)}")
    raise NoBackend(f"no backend can run this on {chip}: " + "; ".join(refused))


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `fa4.explain` returns; prints as a few lines of text."""

    spec: AttentionSpec
    chip: Chip
    chosen: str | None
    tiles: str
    refused: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        lines = [f"chip     {self.chip}", f"backend  {self.chosen or 'none'}"]
        if self.tiles:
            lines.append(f"tiles    {self.tiles}")
        lines += [f"not {name}: {'; '.join(reasons)}" for name, reasons in self.refused]
        return "\n".join(lines)


def explain(spec: AttentionSpec, chip: Chip, backend: str = "auto") -> Explanation:
    """Which backend serves the spec, with which tiles, and why not those preferred to it.

    Raises:
        ValueError: no backend has that name.
    """
    check_backend_name(backend)
    refused: list[tuple[str, tuple[str, ...]]] = []
    chosen = None
    for row in BACKENDS:
        reasons = row.refusals(spec, chip)
        if backend not in ("auto", row.name):
            reasons.insert(0, f"backend={backend!r} was asked for")
        if not reasons:
            chosen = row
            break
        refused.append((row.name, tuple(reasons)))
    tiles = chosen.load().describe(spec, chip) if chosen else ""
    return Explanation(spec, chip, chosen.name if chosen else None, tiles, tuple(refused))
