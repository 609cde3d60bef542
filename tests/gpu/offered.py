"""Which backends the chip that is here offers, and what each of them takes: what the GPU tests run on."""

from collections.abc import Iterable

import pytest
import torch

from fa4.oracle.cases import Case
from fa4.runtime import dispatch
from fa4.runtime.device import chip_of
from fa4.runtime.spec import Feature

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels on a CUDA device"),
]


def offered() -> tuple[str, ...]:
    """Names of the backends with kernels of their own that run on the chip here; all such where there is none, so
    that what would run can be seen."""
    rows = [row for row in dispatch.BACKENDS if row.requires]
    if torch.cuda.is_available():
        chip = chip_of(torch.device("cuda"))
        rows = [row for row in rows if row.on(chip) and chip.compiles]
    return tuple(dict.fromkeys(row.name for row in rows))


def serving(*cases: Case, needs: Iterable[Feature] = ()) -> list:
    """(backend, case) for every backend offered here and every case that it takes, with the features that are needed
    beside the case's own."""
    needed = frozenset(needs)
    pairs = [(name, case) for name in offered() for case in cases if _takes(name, case, needed)]
    return [pytest.param(name, case, id=f"{name}-{case}") for name, case in pairs]


def _takes(name: str, case: Case, needed: frozenset[Feature]) -> bool:
    dims = case.head_dim, case.head_dim_v or case.head_dim
    rows = [row for row in dispatch.BACKENDS if row.name == name]
    return any(row.head_dims.takes(*dims) and needed <= row.features for row in rows)
