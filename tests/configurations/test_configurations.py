"""Every call is planned, or refused with a reason; and what is planned compiles for its chip."""

import dataclasses
import random

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from .kernels import ORDER, TARGETS, enumerated
from .problems import _OPTIONS, pairwise

EVERY = 997  # calls of which a run of the tests looks at one
KERNELS = 1  # of each backend that a run of the tests compiles
BACKENDS = {backend: number for number, backend in reversed(TARGETS)}


@pytest.mark.parametrize("number, backend", TARGETS)
def test_every_call_is_planned_or_refused_with_a_reason(number, backend, seed):
    assert enumerated(number, backend, EVERY, seed).seen


@pytest.mark.soak
@pytest.mark.parametrize("number, backend", TARGETS)
def test_all_calls_are_planned_or_refused_with_a_reason(number, backend):
    assert enumerated(number, backend).seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_some_kernels_compile(backend, seed):
    kernels = enumerated(BACKENDS[backend], backend, EVERY, seed).chosen()
    for kernel in random.Random(seed).sample(kernels, KERNELS):
        print(kernel)
        kernel.compile()


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number, backend", TARGETS)
def test_all_kernels_compile(number, backend):
    failures = {}
    for kernel in enumerated(number, backend).chosen():
        try:
            kernel.compile()
        except Exception as error:
            failures[str(kernel)] = str(error)[-500:]
    assert not failures, failures


def test_each_field_that_decides_an_order_is_one_of_a_configuration():
    kernels = [kernel for backend in BACKENDS for kernel in enumerated(BACKENDS[backend], backend, EVERY).chosen()]
    fields = {field.name for kernel in kernels for field in dataclasses.fields(kernel.cfg)}
    assert set(ORDER) <= fields


def test_each_pair_of_options_is_enumerated():
    rows = pairwise(_OPTIONS)
    for a in _OPTIONS:
        for b in _OPTIONS:
            if a != b:
                met = {(repr(row[a]), repr(row[b])) for row in rows}
                assert len(met) == len(_OPTIONS[a]) * len(_OPTIONS[b]), (a, b)
