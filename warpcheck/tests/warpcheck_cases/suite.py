"""pytest plug-in of every test suite that runs on the emulator: seeds of drawn data, and a heap that stays short."""

import random
import sys

import pytest

_KERNELS_TO_FREEZE = 4  # some 14,000 objects each
_frozen_kernels = 0


def pytest_addoption(parser):
    group = parser.getgroup("drawn data")
    group.addoption("--seed", type=int, help="seed of every test that draws its data [default: a fresh one each]")
    group.addoption("--times", type=int, default=1, help="runs of every test that draws its data, each with its seed")


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


def pytest_collection_finish():
    """Freeze all imported objects: a launch on an emulated chip searches the heap for tensors."""
    memory = sys.modules.get("warpcheck.host.memory")
    if memory is not None:
        memory.freeze()


def pytest_runtest_logfinish():
    """Freeze loaded kernels: after some dozens of them the search of a launch takes longer than its run."""
    global _frozen_kernels
    machine, memory = (sys.modules.get(f"warpcheck.{name}") for name in ("machine.machine", "host.memory"))
    if machine is None or memory is None:
        return
    loaded = machine._load.cache_info().misses
    if not _frozen_kernels <= loaded < _frozen_kernels + _KERNELS_TO_FREEZE:  # fewer: a test emptied the cache
        memory.freeze()
        _frozen_kernels = loaded
