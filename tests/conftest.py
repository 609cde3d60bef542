"""Fixtures shared by every test; fresh memory is poisoned, so that a result nobody wrote cannot look right."""

import os
import random
import sys

import pytest
import torch

from tests.poisoned import fresh_memory_is_poison

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers already fill the cores; more threads would only get in each other's way.
    torch.set_num_threads(1)


_KERNELS_TO_FREEZE = 4  # some 14,000 objects each
_frozen_kernels = 0


def pytest_collection_finish():
    """What all tests imported need not be looked through for tensors at every launch on an emulated chip."""
    memory = sys.modules.get("warpcheck.host.memory")
    if memory is not None:
        memory.freeze()


def pytest_runtest_logfinish():
    """Nor need the kernels that were loaded since: after some dozens of them a launch would look for longer than it
    runs."""
    global _frozen_kernels
    machine, memory = (sys.modules.get(f"warpcheck.{name}") for name in ("machine.machine", "host.memory"))
    if machine is None or memory is None:
        return
    loaded = machine._load.cache_info().misses
    if not _frozen_kernels <= loaded < _frozen_kernels + _KERNELS_TO_FREEZE:  # fewer: a test emptied the cache
        memory.freeze()
        _frozen_kernels = loaded


@pytest.fixture(autouse=True)
def _poison_fresh_memory():
    """In every test."""
    with fresh_memory_is_poison():
        yield


def pytest_addoption(parser):
    group = parser.getgroup("fa4")
    group.addoption(
        "--seed", type=int, help="of every test that draws its data, instead of a fresh one: the one that failed"
    )
    group.addoption("--times", type=int, default=1, help="ask every test that draws its data so often, each time anew")


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames and metafunc.config.getoption("--times") > 1:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--times")), indirect=True)


@pytest.fixture
def seed(request) -> int:
    """A fresh seed for each run, or that of `--seed`; printed when the test fails (pytest shows captured output)."""
    given = request.config.getoption("--seed")
    value = random.SystemRandom().randrange(2**31) if given is None else given
    print(f"seed = {value}")
    return value


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[str]:
    """The entries of kernels that calls ask the disk for, none of which is there; what is launched does nothing."""
    from fa4.runtime import jit
    from tests.forget import forget_calls

    entries = []

    def through_disk(directory, full_key, build):
        entries.append(jit._entry(directory, full_key).name)
        return lambda *arguments: None

    forget_calls()
    monkeypatch.setattr(jit, "_through_disk", through_disk)
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    yield entries
    forget_calls()
