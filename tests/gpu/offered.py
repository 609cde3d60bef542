"""Which backends the chip that is here offers, and what each of them takes: what the GPU tests run on."""

from collections.abc import Iterable

import pytest
import torch

from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import dispatch
from fa4.runtime.device import chip_of
from fa4.runtime.spec import Feature

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels on a CUDA device"),
]


def offered() -> tuple[str, ...]:
    """Names of the backends with kernels of their own for 16-bit tensors that run on the chip here; all such where
    there is none, so that what would run can be seen."""
    rows = [row for row in dispatch.BACKENDS if row.requires and not row.multiplies_low]
    if torch.cuda.is_available():
        chip = chip_of(torch.device("cuda"))
        rows = [row for row in rows if row.on(chip) and chip.compiles]
    return tuple(dict.fromkeys(row.name for row in rows))


def serving(*named: Case, needs: Iterable[Feature] = ()) -> list:
    """(backend, case) for every backend offered here and every case that it takes, with the features that are needed
    beside the case's own."""
    needed = frozenset(needs)
    pairs = [(name, case) for name in offered() for case in named if _takes(name, case, needed)]
    return [pytest.param(name, case, id=f"{name}-{case}") for name, case in pairs]


def _takes(name: str, case: Case, needed: frozenset[Feature]) -> bool:
    spec = cases.make(case, 0, "meta").spec
    rows = [row for row in dispatch.BACKENDS if row.name == name and needed <= row.features]
    rows = [row for row in rows if row.head_dims.takes(spec.head_dim, spec.head_dim_v)]
    return any(not any(list(limit.refusals(spec)) for limit in row.limits) for row in rows)
